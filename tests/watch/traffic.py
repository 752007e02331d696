"""Spans of requests that a server answered, as an exporter would send them, at times of our choosing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from telemetry import names

ZERO = 1_800_000_000 * 10**9  # unix ns at which the tests' clocks stand at 0


def request_span(
    number: int, at_s: float, *, queue_s: float = 0.01, prefill_s: float = 0.1, decode_s: float = 1.0, **told: Any
) -> dict[str, Any]:
    """One answered request that began at ``at_s`` on the tests' clock; told: attributes that differ."""
    phases = dict.fromkeys(names.PHASES, 0) | {
        names.QUEUE: round(queue_s * 1e9),
        names.PREFILL: round(prefill_s * 1e9),
        names.DECODE: round(decode_s * 1e9),
    }
    duration = sum(phases.values())
    attributes = {
        names.ATTR_HTTP_STATUS: 200,
        names.ATTR_FINISH_REASONS: ["stop"],
        names.ATTR_INPUT_TOKENS: 100,
        names.ATTR_OUTPUT_TOKENS: 21,
        names.ATTR_LATENCY_TTFT: queue_s + prefill_s,
        names.ATTR_LATENCY_E2E: duration / 1e9,
        **{names.ATTR_PHASE_PREFIX + name: value for name, value in phases.items()},
        **told,
    }
    start = ZERO + round(at_s * 1e9)
    return {"number": number, "start": start, "end": start + duration, "attributes": attributes}


def payload(spans: Iterable[dict[str, Any]]) -> bytes:
    """OTLP/HTTP protobuf."""
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    service = resource.resource.attributes.add()
    service.key, service.value.string_value = "service.name", names.ENGINE_SERVICE
    scope = resource.scope_spans.add()
    for one in spans:
        span = scope.spans.add()
        span.trace_id = bytes.fromhex(one["trace"]) if "trace" in one else (one["number"] + 1).to_bytes(16, "big")
        span.span_id = (one["number"] + 1).to_bytes(8, "big")
        span.name, span.kind = names.SERVER_SPAN, 2
        span.start_time_unix_nano, span.end_time_unix_nano = one["start"], one["end"]
        if "error" in one:
            span.status.code = 2
        for key, value in one["attributes"].items():
            if value is None:
                continue
            pair = span.attributes.add()
            pair.key = key
            if isinstance(value, list):
                for item in value:
                    pair.value.array_value.values.add().string_value = item
            elif isinstance(value, int):
                pair.value.int_value = value
            elif isinstance(value, float):
                pair.value.double_value = value
            else:
                pair.value.string_value = value
    return message.SerializeToString()
