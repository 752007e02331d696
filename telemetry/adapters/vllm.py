"""vLLM: metrics ``vllm:…``, and a span ``llm_request`` for each finished request that carries ``gen_ai.latency.*``.

Its span is opened at the finish, so a request that hangs leaves none.  Recorded from vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from telemetry import names
from telemetry.adapters.adapter import Account, Adapter, Span, histogram, rest_is_front, seconds

_DECODE: Final = "time in preemption and in recomputing what it lost"
_FRONT: Final = "HTTP, tokenising, detokenising and the way between the processes: what no other phase tells"


def of_spans(spans: Sequence[Span]) -> Account | None:
    """The three times of the root span; the rest of its end-to-end time is the front end."""
    root = next((span for span in spans if span["name"] == names.SERVER_SPAN), None)
    if root is None:
        return None
    told = root["attributes"]
    keys = {
        names.QUEUE: names.ATTR_LATENCY_QUEUE,
        names.PREFILL: names.ATTR_LATENCY_PREFILL,
        names.DECODE: names.ATTR_LATENCY_DECODE,
    }
    found = {phase: seconds(told.get(key)) for phase, key in keys.items()}
    duration = seconds(told.get(names.ATTR_LATENCY_E2E))
    phases = {phase: value for phase, value in found.items() if value is not None}
    return rest_is_front(phases, duration) if duration is not None and len(phases) == len(keys) else None


ADAPTER: Final = Adapter(
    name="vllm",
    title="vLLM",
    prefixes=("vllm:",),
    owners=("vllm",),
    version=("/version", "version"),
    means=(
        histogram(names.QUEUE, names.M_QUEUE_TIME),
        histogram(names.PREFILL, names.M_PREFILL_TIME),
        histogram(names.DECODE, names.M_DECODE_TIME, _DECODE),
    ),
    pressure={
        "running": names.M_RUNNING,
        "waiting": names.M_WAITING,
        "kv_usage": names.M_KV_USAGE,
        "preemptions": f"{names.M_PREEMPTIONS}_total",
        "cache_queries": f"{names.M_PREFIX_QUERIES}_total",
        "cache_hits": f"{names.M_PREFIX_HITS}_total",
    },
    of_spans=of_spans,
    contains={names.DECODE: _DECODE, names.INGRESS: _FRONT},
    hint="start it with --otlp-traces-endpoint http://HOST:4318/v1/traces for phases of single requests",
)
