"""SGLang: metrics ``sglang:…`` (with --enable-metrics), spans by stage (with --enable-trace).

Its attribute ``time_in_model_prefill`` runs from the dispatch and so contains the queue: the spans of the stages
(python/sglang/srt/observability/req_time_stats.py) are read instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from telemetry import names
from telemetry.adapters.adapter import Account, Adapter, Mean, Span, histogram, rest_is_front, seconds

_STAGES: Final = {
    "tokenize": names.TOKENIZE,
    "prefill_waiting": names.QUEUE,
    "prefill_forward": names.PREFILL,
    "chunked_prefill": names.PREFILL,
    "decode_forward": names.DECODE,
}
_PREFILL: Final = "of a prompt cut into chunks the waits between them are left out"
_DECODE: Final = "retracted time, and the way of the text to the client"


def of_spans(spans: Sequence[Span]) -> Account | None:
    """The stages' spans; the whole is ``gen_ai.latency.e2e``, else from the first begin to the last end."""
    stages = [span for span in spans if span["name"] in _STAGES]
    if not any(span["name"].startswith(("prefill", "chunked")) for span in stages):
        return None
    phases: Account = {}
    for span in stages:
        phase = _STAGES[span["name"]]
        phases[phase] = phases.get(phase, 0.0) + (span["end_unix_ns"] - span["start_unix_ns"]) / 1e9
    told = (seconds(span["attributes"].get(names.ATTR_LATENCY_E2E)) for span in spans)
    duration = next((value for value in told if value is not None), None)
    if duration is None:
        duration = (max(s["end_unix_ns"] for s in stages) - min(s["start_unix_ns"] for s in stages)) / 1e9
    return rest_is_front(phases, duration)


ADAPTER: Final = Adapter(
    name="sglang",
    title="SGLang",
    prefixes=("sglang:",),
    owners=("sglang",),
    version=("/get_server_info", "version"),
    means=(
        histogram(names.QUEUE, "sglang:queue_time_seconds"),
        histogram(names.PREFILL, "sglang:per_stage_req_latency_seconds", _PREFILL, stage="prefill_forward"),
        Mean(
            names.DECODE,
            "sglang:e2e_request_latency_seconds_sum",
            "sglang:e2e_request_latency_seconds_count",
            minus=histogram("", "sglang:time_to_first_token_seconds"),
            contains=_DECODE,
        ),
    ),
    pressure={
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "kv_usage": "sglang:token_usage",
        "preemptions": "sglang:num_retracted_requests_total",
    },
    of_spans=of_spans,
    contains={names.INGRESS: "what no stage tells: HTTP, dispatch, detokenising", names.PREFILL: _PREFILL},
    hint="start it with --enable-metrics, and with --enable-trace --otlp-traces-endpoint HOST:4318 for single requests",
)
