"""The row of one request: facts only, in the columns of telemetry.schema.REQUESTS.

Owns how stamps become seconds and chunks become token counts.  Must always hold: moments are seconds after the run's
zero, durations and `chunk_s` come from the same stamps; nothing a server says can make a row unwritable (numbers out
of range and text that is no Unicode are dropped or replaced, never the row).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from itertools import accumulate, pairwise
from operator import sub
from typing import Any, Final, Protocol

from loadgen.clean import clean
from loadgen.job import Call
from loadgen.stream import Answer
from loadgen.textfacts import TextFacts, matches
from telemetry.names import PHASES
from telemetry.schema import REQUESTS

_INT16_MAX: Final = (1 << 15) - 1
_INT32_MAX: Final = (1 << 31) - 1
_INT64_MAX: Final = (1 << 63) - 1


#: A row of which nothing is known.  All columns in their order: such a row is written with the least work.
_EMPTY: Final[dict[str, Any]] = dict.fromkeys(REQUESTS.names)


class Encoder(Protocol):
    """What is needed of a tokenizer (models.tokenizer.Tokenizer has it)."""

    def encode_plain(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


def tokens_per_chunk(answer: Answer, counted: int | None, encoder: Encoder | None) -> tuple[list[int], bool]:
    """Tokens in each token chunk, and whether that is known rather than assumed (one each).

    By the usage of the chunks themselves where every one carries it; else one each where the total agrees; else the
    text is encoded as a whole and each token counts for the chunk that holds its last byte, at least one a chunk.
    """
    chunks = len(answer.pieces)
    marks = answer.usage_marks
    if marks and marks[0] >= 1 and all(a < b for a, b in pairwise(marks)):
        return [marks[0], *(b - a for a, b in pairwise(marks))], True
    if chunks in (answer.completion_tokens, counted):
        return [1] * chunks, True
    if encoder is None or not chunks:
        return [1] * chunks, False
    ends = list(accumulate(len(clean(piece).encode("utf-8")) for piece in answer.pieces))
    found = [0] * chunks
    at = 0
    for token in encoder.encode_plain(clean(answer.text)):
        at += len(encoder.token_bytes(token))
        found[min(bisect_left(ends, at), chunks - 1)] += 1
    return [max(1, tokens) for tokens in found], True


def time_per_token_s(answer: Answer, tokens: list[int], known: bool) -> float | None:
    """(last token - first token) / (n - tokens in the first chunk), seconds; None where all tokens came at once.

    n counts the tokens within those two stamps: an end token, which a server may count but shows to no one, is not
    one of them.  Where the server's count and ours differ by more than that, the server's holds.
    """
    if len(tokens) < 2:
        return None
    n = sum(tokens)
    reported = answer.completion_tokens
    if reported and (not known or not 0 <= reported - n <= 1):
        n = reported
    elapsed_ns = answer.stamps[-1] - answer.stamps[0]
    return elapsed_ns / 1e9 / (n - tokens[0]) if elapsed_ns > 0 and n > tokens[0] else None


def request_row(
    call: Call, answer: Answer, zero_ns: int, facts: TextFacts | None, encoder: Encoder | None, keep_text: bool
) -> dict[str, Any]:
    """All columns of one request: schedule, answer, tokens, quality; the sender adds what concerns the sending."""
    stamps = answer.stamps
    text = answer.text
    failure = answer.failure
    intended_ns = zero_ns + round(call.intended_s * 1e9)
    row = _EMPTY.copy()
    row["index"] = call.index
    row["trace_row"] = call.trace_row
    row["class"] = call.klass
    row["intended_s"] = call.intended_s
    row["input_tokens"] = call.input_tokens
    row["expected_output_tokens"] = call.expected_output_tokens
    row["prompt_tokens_expected"] = call.prompt_tokens_expected
    row["canary_kind"] = call.canary_kind
    row["canary_id"] = call.canary_id
    row["canary_place"] = call.canary_place
    if answer.logprobs:
        row["logprobs"] = json.dumps(answer.logprobs)
    row["expected_answer"] = call.expected_answer
    row["input_script"] = call.input_script
    row["input_sketch"] = call.input_sketch
    row["trace_id"] = call.trace_id
    row["span_id"] = call.span_id
    row["sampled"] = call.sampled
    row["headers_s"] = _after(zero_ns, answer.headers_ns)
    row["first_chunk_s"] = _after(zero_ns, answer.first_chunk_ns)
    row["first_content_s"] = _after(zero_ns, answer.first_content_ns)
    if stamps:
        row["first_token_s"] = (stamps[0] - zero_ns) / 1e9
        row["last_token_s"] = (stamps[-1] - zero_ns) / 1e9
    row["end_s"] = _after(zero_ns, answer.end_ns)
    row["chunk_s"] = [(stamp - intended_ns) / 1e9 for stamp in stamps]
    if len(stamps) > 1:
        row["max_gap_s"] = max(map(sub, stamps[1:], stamps)) / 1e9
    row["status"] = answer.status
    if failure is not None:
        row["error"] = failure.reason
        row["error_detail"] = clean(failure.detail)
    row["retry_after_s"] = answer.retry_after_s
    row["finish_reason"] = _text(answer.finish_reason)
    if answer.finish_reason is not None:
        row["truncated_by_limit"] = answer.finish_reason == "length"
    row["done_marker"] = answer.done_marker
    row["model"] = _text(answer.model)
    row["fingerprint"] = _text(answer.fingerprint)
    if answer.streamed and not answer.reasoning_tokens:
        row["chunks"] = len(answer.pieces)
    row["prompt_tokens_reported"] = answer.prompt_tokens
    row["completion_tokens_reported"] = answer.completion_tokens
    row["cached_tokens"] = answer.cached_tokens
    row["usage_estimated"] = answer.completion_tokens is None and bool(answer.pieces)
    row["server_request_id"] = _text(answer.request_id or answer.response_id)
    counted = facts.tokens if facts else None
    tokens, known = tokens_per_chunk(answer, counted, encoder)
    large = tokens and max(tokens) > _INT16_MAX
    row["chunk_tokens"] = [min(count, _INT16_MAX) for count in tokens] if large else tokens
    row["tpot_s"] = time_per_token_s(answer, tokens, known)
    if facts is not None:
        row["completion_tokens_counted"] = counted
        row["output_sha"] = facts.sha
        row["output_chars"] = facts.chars
        row["replacement_chars"] = facts.replacement_chars
        row["special_leaks"] = facts.special_leaks
        row["repeat_share"] = facts.repeat_share
        row["dominance"] = facts.dominance
        row["foreign_letters"] = facts.foreign_letters
        row["output_script"] = facts.script
        row["output_sketch"] = facts.sketch
        if call.expected_answer is not None:
            row["answer_matches"] = matches(text, call.expected_answer)
        if keep_text:
            row["text"] = clean(text)
    if answer.account is not None:
        row.update(server_columns(answer.account))
    return row


def server_columns(account: dict[str, Any]) -> dict[str, Any]:
    """The columns of a server's own account of a request (names.PHASES_EVENT); the missing and the absurd left out."""
    found: dict[str, Any] = {"server_duration_s": _seconds(account.get("duration_ns"))}
    phases = account.get("phases")
    if isinstance(phases, dict):
        found.update({f"phase_{name}_s": _seconds(phases.get(name)) for name in PHASES})
    found["prefill_wait_s"] = _seconds(account.get("prefill_wait_ns"))
    for name in ("decode_max_gap", "floor_ttft", "floor_tpot"):
        found[f"{name}_s"] = _seconds(account.get(f"{name}_ns"))
    for name in ("prefill_chunks", "preemptions", "queue_depth_at_arrival", "queue_tokens_ahead", "cached_tokens"):
        found[name] = _whole(account.get(name), _INT32_MAX)
    for name in ("step_first", "step_last"):
        found[name] = _whole(account.get(name), _INT64_MAX)
    mean = account.get("batch_size_mean")
    found["batch_size_mean"] = mean if _is_number(mean) else None
    if isinstance(account.get("request_id"), str):
        found["server_request_id"] = clean(account["request_id"])
    return {name: value for name, value in found.items() if value is not None}


def _after(zero_ns: int, stamp_ns: int | None) -> float | None:
    return None if stamp_ns is None else (stamp_ns - zero_ns) / 1e9


def _text(value: str | None) -> str | None:
    return clean(value) if value else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e18


def _seconds(value: Any) -> float | None:
    return value / 1e9 if _is_number(value) and value >= 0 else None


def _whole(value: Any, most: int) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None
