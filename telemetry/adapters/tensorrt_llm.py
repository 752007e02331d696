"""TensorRT-LLM (trtllm-serve): Prometheus text at /prometheus/metrics; its /metrics is a JSON list of iterations.

Names: tensorrt_llm/metrics/collector.py, prefix ``trtllm_`` (``trtllm:`` in some versions).  No spans of requests.
"""

from __future__ import annotations

from typing import Final

from telemetry import names
from telemetry.adapters.adapter import Adapter, histogram

_DECODE: Final = "time in which it was paused"

ADAPTER: Final = Adapter(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    prefixes=("trtllm_", "trtllm:"),
    owners=("tensorrt_llm",),
    metrics="/prometheus/metrics",
    version=("/version", "version"),
    means=tuple(
        histogram(phase, f"{prefix}request_{word}_time_seconds", contains)
        for prefix in ("trtllm_", "trtllm:")
        for phase, word, contains in (
            (names.QUEUE, "queue", ""),
            (names.PREFILL, "prefill", ""),
            (names.DECODE, "decode", _DECODE),
        )
    ),
    pressure={
        "running": "trtllm_num_requests_running",
        "waiting": "trtllm_num_requests_waiting",
        "kv_usage": "trtllm_kv_cache_utilization",
    },
    hint="it tells nothing of single requests; return_perf_metrics: true in its options brings the means",
)
