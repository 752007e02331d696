"""A row of a request that is not ours, from the span of the server that answered it.

What a client saw is not known: its times begin when the server had read the head, there is no network in them, and
what was expected is what came.  So truncated answers cannot be seen here (canaries see them), nor can a dead server.
A client that went away is nobody's failure: such a request is left out of the SLO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from telemetry import names
from telemetry.adapters.adapter import DURATION, seconds
from telemetry.adapters.vllm import of_spans

_TOO_MANY: Final = (429, 503)
#: vLLM's names of the token counts, where the semantic conventions' are missing.
_PROMPT: Final = (names.ATTR_INPUT_TOKENS, "gen_ai.usage.prompt_tokens")
_COMPLETION: Final = (names.ATTR_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens")


def is_request(span: Mapping[str, Any]) -> bool:
    """Is it the span of a whole request (ours or vLLM's)?"""
    return bool(span["name"] == names.SERVER_SPAN)


def row_of(span: Mapping[str, Any], index: int, target: str, zero_unix_ns: int) -> dict[str, Any]:
    """A row of telemetry.schema.REQUESTS.  span: of schema SPANS, its attributes parsed."""
    told: Mapping[str, Any] = span["attributes"]
    start = (span["start_unix_ns"] - zero_unix_ns) / 1e9
    duration = (span["end_unix_ns"] - span["start_unix_ns"]) / 1e9
    ttft = seconds(told.get(names.ATTR_LATENCY_TTFT))
    tokens = _whole(told, _COMPLETION)
    prompt = _whole(told, _PROMPT)
    error, detail = _failure(span, told)
    reasons = told.get(names.ATTR_FINISH_REASONS)
    finish = str(reasons[0]) if isinstance(reasons, list) and reasons else None
    answered = error is None
    end = start + duration
    send = told.get(names.ATTR_PHASE_PREFIX + names.SEND)
    last = end - (send / 1e9 if type(send) is int else 0.0)
    first = None if ttft is None else start + ttft
    tpot = (last - first) / (tokens - 1) if answered and first is not None and tokens and tokens > 1 else None
    row: dict[str, Any] = {
        "index": index,
        "class": "production",
        "target": target,
        "replica": told.get(names.ATTR_REPLICA) or span.get("service"),
        "model": told.get(names.ATTR_RESPONSE_MODEL) or told.get(names.ATTR_REQUEST_MODEL),
        "intended_s": start,
        "sent_s": start,
        "lag_s": 0.0,
        "headers_s": first,
        "first_chunk_s": first,
        "first_token_s": first,
        "first_content_s": first,
        "last_token_s": last if answered and first is not None else None,
        "end_s": end,
        "tpot_s": tpot,
        "status": told.get(names.ATTR_HTTP_STATUS) or (200 if answered else None),
        "error": error,
        "error_detail": detail,
        # vLLM's span names none, and it is made for finished requests alone
        "finish_reason": (finish or "stop") if answered else None,
        "truncated_by_limit": finish == "length" if answered else None,
        "done_marker": answered,
        "attempts": 1,
        "input_tokens": prompt,
        "expected_output_tokens": tokens,
        "prompt_tokens_reported": prompt,
        "completion_tokens_reported": tokens if answered else None,
        "cached_tokens": _whole(told, (names.ATTR_CACHED_TOKENS,)),
        "usage_estimated": False,
        "output_chars": max(1, tokens or 1) if answered else None,  # it is not empty; its text is not known
        "server_request_id": told.get(names.ATTR_RESPONSE_ID),
        "preemptions": _whole(told, (names.ATTR_PREEMPTIONS,)),
        "queue_depth_at_arrival": _whole(told, (names.ATTR_QUEUE_DEPTH,)),
        "queue_tokens_ahead": _whole(told, (names.ATTR_QUEUE_TOKENS,)),
        "prefill_chunks": _whole(told, (names.ATTR_PREFILL_CHUNKS,)),
        "decode_max_gap_s": seconds(told.get(names.ATTR_DECODE_MAX_GAP)),
        "max_gap_s": seconds(told.get(names.ATTR_DECODE_MAX_GAP)),
        "batch_size_mean": seconds(told.get(names.ATTR_BATCH_MEAN)),
        "step_first": _whole(told, (names.ATTR_STEP_FIRST,)),
        "step_last": _whole(told, (names.ATTR_STEP_LAST,)),
        "floor_ttft_s": seconds(told.get(names.ATTR_FLOOR_TTFT)),
        "floor_tpot_s": seconds(told.get(names.ATTR_FLOOR_TPOT)),
        "trace_id": span["trace_id"],
        "span_id": span["parent_span_id"] or span["span_id"],
        "sampled": False,  # there is no client span of it
    }
    return row | _phases(span, told)


def _phases(span: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: told.get(names.ATTR_PHASE_PREFIX + name) for name in names.PHASES}
    if all(type(value) is int for value in own.values()):
        parts = {name: float(value) / 1e9 for name, value in own.items() if value is not None}
    else:
        account = of_spans([span])
        if account is None:
            return {}
        parts = {name: account.get(name, 0.0) for name in names.PHASES if name != DURATION}
    return {f"phase_{name}_s": value for name, value in parts.items()} | {"server_duration_s": sum(parts.values())}


def _failure(span: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Reason code and what was told of it; (None, None): a complete answer."""
    kind, status = told.get(names.ATTR_ERROR_TYPE), told.get(names.ATTR_HTTP_STATUS)
    if kind is None and span["status"] != "ERROR" and (status is None or status < 400):
        return None, None
    detail = str(kind or status or "error")
    if status in _TOO_MANY:
        return names.REJECTED, detail
    if kind in names.DROP_REASONS:
        return str(kind), detail
    if status is None:
        return names.CUT_BY_END, detail  # the client went away
    return (names.SERVER_ERROR if status >= 500 or status < 400 else names.BAD_REQUEST), detail


def _whole(told: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = told.get(key)
        if type(value) is int and 0 <= value < 1 << 31:
            return value
    return None
