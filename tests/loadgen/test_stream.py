"""One answer read: what is a token, what is complete, what the row says.  Times are virtual: stamps are given."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.failure import retry_after_s
from loadgen.job import Call
from loadgen.rows import request_row
from loadgen.stream import Answer
from loadgen.textfacts import leak_counter, text_facts
from telemetry import names
from telemetry.part_writer import PartWriter
from telemetry.schema import REQUESTS
from tests.loadgen.stub import DONE, content, delta, event, finish, role, usage

MS = 1_000_000
ZERO = 1_000_000_000_000
STREAM = {b"content-type": b"text/event-stream; charset=utf-8"}


class Words:
    """A tokenizer of one token per four bytes (the last may be shorter)."""

    special_texts = frozenset({"<|end|>"})

    def encode_plain(self, text: str) -> list[int]:
        return [len(text.encode()[at : at + 4]) for at in range(0, len(text.encode()), 4)]

    def count_plain(self, text: str, /) -> int:
        return len(self.encode_plain(text))

    def token_bytes(self, token_id: int, /) -> bytes:
        return b"x" * token_id


def call(**more: Any) -> Call:
    fields: dict[str, Any] = {
        "index": 3,
        "trace_row": 9,
        "klass": "chat",
        "intended_s": 1.0,
        "body": b"{}",
        "path": "/v1/chat/completions",
        "input_tokens": 5,
        "expected_output_tokens": 4,
        "prompt_tokens_expected": 5,
        "sampled": True,
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
    }
    return Call(**fields | more)


def at(ms: float) -> int:
    """The stamp `ms` after the call's intended moment."""
    return ZERO + 1_000_000_000 + round(ms * MS)


def stream(*reads: tuple[float, bytes], end: float | None = None, broken: str | None = None) -> Answer:
    """An answer of these reads (ms, bytes); the HTTP message ends at `end`, by default with the last read."""
    answer = Answer()
    answer.head(200, STREAM, at(reads[0][0]))
    for ms, data in reads:
        answer.feed(data, at(ms))
    answer.end(at(end if end is not None else reads[-1][0]), broken)
    return answer


def row(answer: Answer, encoder: Words | None = None) -> dict[str, Any]:
    facts = text_facts(answer.text, leak_counter(Words.special_texts), encoder)
    return request_row(call(), answer, ZERO, facts, encoder, keep_text=True)


END = event(finish()) + event(usage(5, 4)) + DONE


def test_case_5_the_role_chunk_and_empty_content_are_no_token() -> None:
    found = row(
        stream((10, event(role())), (20, event(content(""))), (200, event(content("Hi"))), (210, END)),
    )
    assert found["first_chunk_s"] == pytest.approx(1.010)
    assert found["first_token_s"] == found["first_content_s"] == found["last_token_s"] == pytest.approx(1.200)
    assert found["end_s"] == pytest.approx(1.210)
    assert (found["error"], found["finish_reason"], found["done_marker"], found["text"]) == (None, "stop", True, "Hi")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_case_6_reasoning_is_the_first_token_but_not_content(key: str) -> None:
    thought = (50.0, event(delta(**{key: "hm"})))
    both = row(stream(thought, (900, event(content("Yes"))), (910, END)))
    assert both["first_token_s"] == pytest.approx(1.050)
    assert both["first_content_s"] == pytest.approx(1.900)
    never = row(stream(thought, (910, END)))
    assert never["first_token_s"] == pytest.approx(1.050)
    assert never["first_content_s"] is None
    assert never["error"] is None


def test_tool_calls_refusals_and_completion_texts_are_tokens() -> None:
    parts = (
        [{"index": 0, "function": {"name": "find", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": "{}"}}],
    )
    tools = stream((1, event(delta(tool_calls=parts[0]))), (2, event(delta(tool_calls=parts[1]))), (3, END))
    assert (tools.pieces, tools.first_content_ns) == (["find", "{}"], at(1))
    assert stream((1, event(delta(refusal="No."))), (2, END)).text == "No."
    texts = [event({"object": "text_completion", "choices": [{"index": 0, "text": text}]}) for text in ("a", "b", "")]
    assert stream(*enumerate(texts, 1), (9, END)).pieces == ["a", "b"]


def chunks_100_ms_apart() -> list[tuple[float, bytes]]:
    texts = ["Aaaa", "Bbbb" * 8, "Cccc" * 8, "Dddd" * 8]
    return [(100.0 * n, event(content(text))) for n, text in enumerate(texts)]


@pytest.mark.parametrize("encoder", [Words(), None])
def test_case_7_time_per_token_counts_tokens_not_chunks(encoder: Words | None) -> None:
    found = row(stream(*chunks_100_ms_apart(), (300, event(finish()) + event(usage(5, 25)) + DONE)), encoder)
    assert found["tpot_s"] == pytest.approx(0.0125)
    assert found["max_gap_s"] == pytest.approx(0.1)
    assert found["chunk_s"] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert found["chunk_tokens"] == ([1, 8, 8, 8] if encoder else [1, 1, 1, 1])


def test_case_7_usage_in_every_chunk_says_the_tokens_of_each() -> None:
    counts = [1, 9, 17, 25]
    reads = [
        (100.0 * n, event(delta(content="x", usage={"prompt_tokens": 5, "completion_tokens": count})))
        for n, count in enumerate(counts)
    ]
    found = row(stream(*reads, (300, event(finish()) + event(usage(5, 25)) + DONE)))
    assert found["chunk_tokens"] == [1, 8, 8, 8]
    assert found["tpot_s"] == pytest.approx(0.0125)


def test_case_7_all_tokens_at_once_have_no_time_per_token() -> None:
    one = row(stream((50, event(content("a b c"))), (60, event(finish()) + event(usage(5, 3)) + DONE)))
    assert (one["tpot_s"], one["max_gap_s"], one["error"]) == (None, None, None)
    read_together = row(stream((50, event(content("a")) + event(content("b"))), (60, END)))
    assert read_together["tpot_s"] is None
    assert len(read_together["chunk_s"]) == 2


def test_an_end_token_that_nobody_sees_does_not_shorten_the_time_per_token() -> None:
    reads = [(100.0 * n, event(content("Aaaa"))) for n in range(4)]
    found = row(stream(*reads, (350, event(finish()) + event(usage(5, 5)) + DONE)), Words())
    assert found["tpot_s"] == pytest.approx(0.1)
    assert found["completion_tokens_counted"] == 4


def with_usage(finish_usage: bool, after: bool, every: bool) -> Answer:
    reads = []
    for n, text in enumerate(["Aaaa", "Bbbb", "Cccc"], 1):
        counts = {"prompt_tokens": 5, "completion_tokens": n}
        reads.append((10.0 * n, event(delta(content=text, usage=counts if every else None))))
    last = delta(finish="stop", usage={"prompt_tokens": 5, "completion_tokens": 3} if finish_usage else None)
    return stream(*reads, (40, event(last) + (event(usage(5, 3)) if after else b"") + DONE))


@pytest.mark.parametrize("where", [(True, False, False), (False, True, False), (True, True, True)])
def test_case_8_usage_gives_the_same_totals_wherever_it_comes(where: tuple[bool, bool, bool]) -> None:
    found = row(with_usage(*where), Words())
    keys = ("prompt_tokens_reported", "completion_tokens_reported", "usage_estimated", "completion_tokens_counted")
    assert [found[key] for key in keys] == [5, 3, False, 3]


def test_case_8_without_usage_our_count_is_flagged_as_estimated() -> None:
    found = row(with_usage(False, False, False), Words())
    keys = ("prompt_tokens_reported", "completion_tokens_reported", "usage_estimated", "completion_tokens_counted")
    assert [found[key] for key in keys] == [None, None, True, 3]
    assert found["tpot_s"] == pytest.approx(0.01)


@pytest.mark.parametrize("bad", [-1, 1.5, "7", True, 1 << 40, None, [], {}])
def test_absurd_usage_is_not_kept(bad: Any) -> None:
    counts = {"choices": [], "usage": {"prompt_tokens": bad, "completion_tokens": bad}}
    answer = stream((1, event(content("a")) + event(finish()) + event(counts) + DONE))
    assert (answer.prompt_tokens, answer.completion_tokens, answer.failure) == (None, None, None)


CASE_9 = (
    ": comment\r\n\r\n" + f"data:{json.dumps(role())}\r\n\r\n" + f"id: 4\ndata: {json.dumps(content('Grüße '))}\n\n"
    f"event: message\rdata: {json.dumps(content('an 世界 🎉'), ensure_ascii=False)}\r\r"
    + "\n".join("data: " + line for line in json.dumps(content("!"), indent=1).split("\n"))
    + f"\n\ndata:{json.dumps(finish())}\n\ndata: [DONE]"
).encode()


def test_case_9_the_text_is_the_same_for_every_split_and_without_a_last_blank_line() -> None:
    for cut in range(len(CASE_9) + 1):
        answer = stream((1, CASE_9[:cut]), (2, CASE_9[cut:]))
        assert answer.text == "Grüße an 世界 🎉!", cut
        assert (answer.failure, answer.done_marker, answer.finish_reason) == (None, True, "stop"), cut


def test_case_9_a_last_event_cut_in_the_middle_is_not_taken() -> None:
    answer = stream((1, event(content("Hi")) + event(finish())[:-12]))
    assert answer.failure is not None and answer.failure.reason == names.STREAM_CUT
    assert answer.text == "Hi"


@pytest.mark.parametrize(
    ("tail", "broken", "says"),
    [
        (b"", "connection closed by the server", "no finish reason: connection closed by the server"),
        (b"", None, "no finish reason: the stream ended in order"),
        (DONE, None, "no finish reason: the stream ended with [DONE]"),
        (
            event({"error": {"message": "boom", "type": "server_error", "code": 500}}) + DONE,
            None,
            "server_error 500: boom",
        ),
        (event({"object": "error", "message": "boom", "code": 500}), None, "500: boom"),
        (event({"error": "boom"}), None, "boom"),
        (event(finish()), "connection closed by the server", "after the finish reason, before [DONE]"),
        (event("{nonsense"), None, "not JSON"),
        (event("[1]"), None, "not an object"),
        (event("[" * 100_000), None, "not JSON"),
        (b"data: " + b"x" * (2 << 20) + b"\n\n", None, "unreadable stream"),
    ],
)
def test_case_10_a_stream_that_breaks_off_is_cut_and_its_text_kept(tail: bytes, broken: str | None, says: str) -> None:
    found = row(stream((10, event(content("Par"))), (20, tail), broken=broken))
    assert found["error"] == names.STREAM_CUT
    assert says in found["error_detail"]
    assert (found["text"], found["output_chars"]) == ("Par", 3)
    assert found["first_token_s"] == pytest.approx(1.010)


def test_case_10_an_error_in_the_stream_that_names_its_cause() -> None:
    answer = stream((10, event({"error": {"message": "KV cache exhausted", "code": "kv_oom"}})))
    assert answer.failure is not None and answer.failure.reason == names.KV_OOM


def test_case_10_a_length_finish_is_complete() -> None:
    found = row(stream((10, event(content("Par")) + event(finish("length")) + DONE)))
    assert (found["error"], found["finish_reason"]) == (None, "length")


def test_a_stream_without_done_but_with_a_finish_reason_and_a_clean_end_is_complete() -> None:
    found = row(stream((10, event(content("Par")) + event(finish())), end=30))
    assert (found["error"], found["done_marker"], found["end_s"]) == (None, False, pytest.approx(1.030))


def test_neither_usage_nor_done_moves_the_last_token_and_nothing_counts_after_done() -> None:
    found = row(stream((10, event(content("a"))), (90, END), (95, event(content("b")))))
    assert found["last_token_s"] == pytest.approx(1.010)
    assert found["end_s"] == pytest.approx(1.090)
    assert found["text"] == "a"


ACCOUNT = {
    "request_id": "req-7",
    "duration_ns": 900,
    "phases": dict.fromkeys(names.PHASES, 100),
    "prefill_wait_ns": 5,
    "prefill_chunks": 2,
    "preemptions": 1,
    "cached_tokens": 16,
    "queue_depth_at_arrival": 3,
    "queue_tokens_ahead": 80,
    "decode_max_gap_ns": 7,
    "batch_size_mean": 2.5,
    "step_first": 10,
    "step_last": 14,
}


def test_the_servers_account_fills_its_columns_and_is_no_token() -> None:
    phases = event({"tailspan": ACCOUNT}, names.PHASES_EVENT)
    found = row(stream((10, event(content("a"))), (20, event(finish()) + event(usage(5, 1)) + phases + DONE)))
    assert sum(found[f"phase_{name}_s"] for name in names.PHASES) == pytest.approx(found["server_duration_s"])
    assert found["server_duration_s"] == pytest.approx(900e-9)
    keys = ("server_request_id", "prefill_chunks", "preemptions", "cached_tokens", "queue_depth_at_arrival")
    assert [found[key] for key in keys] == ["req-7", 2, 1, 16, 3]
    keys = ("queue_tokens_ahead", "batch_size_mean", "step_first", "step_last")
    assert [found[key] for key in keys] == [80, 2.5, 10, 14]
    assert found["text"] == "a"


def plain(status: int, body: Any, headers: dict[bytes, bytes] | None = None) -> Answer:
    answer = Answer()
    answer.head(status, {b"content-type": b"application/json", **(headers or {})}, at(5))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer.feed(data[:7], at(6))
    answer.feed(data[7:], at(7))
    answer.end(at(8))
    return answer


def test_an_answer_that_is_no_stream() -> None:
    message = {"role": "assistant", "content": "Paris."}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    body = {"model": "m", "choices": choices, "usage": usage(5, 2)["usage"], "tailspan": ACCOUNT}
    found = row(plain(200, body, {names.REPLICA_HEADER.encode(): b"r1"}))
    assert (found["text"], found["error"], found["completion_tokens_reported"], found["model"]) == (
        "Paris.",
        None,
        2,
        "m",
    )
    assert found["first_token_s"] == found["end_s"] == pytest.approx(1.008)
    assert found["headers_s"] == pytest.approx(1.005)
    assert (found["tpot_s"], found["server_duration_s"]) == (None, pytest.approx(900e-9))


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (429, {"error": {"message": "slow down"}}, names.REJECTED),
        (503, b"busy", names.REJECTED),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, names.CONTEXT_OVERFLOW),
        (400, {"object": "error", "message": "maximum context length is 8192 tokens"}, names.CONTEXT_OVERFLOW),
        (400, {"error": {"message": "max_tokens must be positive", "type": "BadRequestError"}}, names.BAD_REQUEST),
        (400, {"error": {"message": "needs 900 of 40 blocks", "code": "kv_oom"}}, names.KV_OOM),
        (401, {"error": {"message": "no key"}}, names.BAD_REQUEST),
        (404, {"detail": "Not Found"}, names.BAD_REQUEST),
        (413, b"", names.BAD_REQUEST),
        (422, {"error": {"message": "bad field"}}, names.BAD_REQUEST),
        (302, b"", names.BAD_REQUEST),
        (408, b"", names.SERVER_ERROR),
        (500, {"error": {"message": "boom"}}, names.SERVER_ERROR),
        (500, {"error": {"message": "CUDA out of memory"}}, names.KV_OOM),
        (507, {"error": {"message": "the KV cache is full"}}, names.KV_OOM),
        (502, b"<html>\n" + b"x" * 300_000, names.SERVER_ERROR),
        (200, b"<html>", names.SERVER_ERROR),
        (200, b"[]", names.SERVER_ERROR),
        (200, {"choices": []}, names.STREAM_CUT),
        (200, {"error": {"message": "boom"}}, names.STREAM_CUT),
    ],
)
def test_every_other_answer_has_its_reason(status: int, body: Any, reason: str) -> None:
    found = row(plain(status, body, {b"retry-after": b"2.5"}))
    assert (found["error"], found["status"], found["retry_after_s"]) == (reason, status, 2.5)
    assert len(found["error_detail"]) <= 500


def test_retry_after_in_all_its_forms() -> None:
    assert retry_after_s(b" 120 ") == 120.0
    assert retry_after_s(b"Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = retry_after_s(b"Thu, 31 Dec 2048 23:59:59 GMT")
    assert later is not None and 3600 < later < 1e9
    assert retry_after_s(b"-5") == 0.0
    for nonsense in (b"soon", b"", b"nan", b"inf", b"Thu, 99 Dec 2048 23:59:59 GMT"):
        assert retry_after_s(nonsense) is None


def test_giving_up_keeps_what_came_and_what_the_server_said_first() -> None:
    answer = Answer()
    answer.head(200, STREAM, at(1))
    answer.feed(event(content("Par")), at(2))
    answer.give_up(names.TIMEOUT_TOTAL, "after 5 s", at(5000))
    assert (row(answer)["error"], row(answer)["text"], row(answer)["end_s"]) == (names.TIMEOUT_TOTAL, "Par", 6.0)
    told = Answer()
    told.head(200, STREAM, at(1))
    told.feed(event({"error": {"message": "boom"}}), at(2))
    told.give_up(names.TIMEOUT_TOTAL, "after 5 s", at(5000))
    assert row(told)["error"] == names.STREAM_CUT


texts = st.lists(
    st.text(st.sampled_from('ab "\\\n\t\u00a0\u2028é世🎉{}:,\x7f') | st.characters(exclude_categories=()), max_size=6),
    max_size=8,
)


@given(texts, st.booleans(), st.sampled_from(["chat", "text"]), st.booleans())
def test_events_that_are_not_parsed_anew_say_what_parsing_would_say(
    pieces: list[str], ascii_only: bool, kind: str, compact: bool
) -> None:
    def one(text: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text}} if kind == "chat" else {"index": 0, "text": text}
        value = {"id": 'odd "content": id', "choices": [{**choice, "finish_reason": None}], "usage": None}
        separators = (",", ":") if compact else None
        data = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
        return b"data: " + data.encode("utf-8", "surrogatepass") + b"\n\n"

    chunks = [one(text) for text in pieces]
    quick = stream(*((10.0 * n, data) for n, data in enumerate(chunks, 1)), (999, END))
    plainly = [stream((1, data), (2, END)).text for data in chunks]  # a fresh reader has learned nothing
    assert quick.pieces == [text for text in plainly if text]
    assert quick.failure is None
    assert quick.response_id == ('odd "content": id' if pieces else "c1")


@settings(deadline=None)  # a loaded machine is slow at times
@given(
    st.lists(st.sampled_from(["a", " b", "é", 'q"', "\\", "世", ""]), min_size=2, max_size=8),
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=8, max_size=8),
    st.lists(
        st.sampled_from([b"", b": x\n", b"event: ping\n", b"id: 7\n", b"data: 1\n\n", b"\n"]), min_size=8, max_size=8
    ),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_where_whole_events_meet_the_reads_changes_nothing(
    pieces: list[str], ends: list[bytes], between: list[bytes], cuts: list[int]
) -> None:
    parts = []
    for text, end, before in zip(pieces, ends, between, strict=False):
        parts += [before, event(content(text)).rstrip(b"\n") + end * 2]
    whole = b"".join(parts)
    by_event, by_byte, by_cut = Answer(), Answer(), Answer()
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    for answer, reads in (
        (by_event, parts),
        (by_byte, [whole[n : n + 1] for n in range(len(whole))]),
        (by_cut, [whole[start:stop] for start, stop in pairwise(edges)]),
    ):
        answer.head(200, STREAM, at(0))
        for data in reads:
            answer.feed(data, at(1))
        answer.end(at(2))
    assert by_event.pieces == by_byte.pieces == by_cut.pieces
    assert by_event.failure == by_byte.failure == by_cut.failure


def test_what_differs_in_more_than_its_text_is_parsed() -> None:
    last = delta(finish="stop", content="c")
    noisy = delta(content="b", usage={"prompt_tokens": 5, "completion_tokens": 2})
    answer = stream((1, event(content("a"))), (2, event(noisy)), (3, event(last)), (4, DONE))
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == ("abc", "stop", 2)


def test_no_answer_makes_a_row_that_cannot_be_written(tmp_path: Any) -> None:
    odd = {"model": "m\ud800", "id": "\udfff", "choices": [{"index": 0, "delta": {"content": "\ud83d"}}]}
    account = {"tailspan": {**ACCOUNT, "request_id": "\ud800", "preemptions": 1 << 70, "step_first": -3}}
    reads = (
        event(odd)
        + event(account, names.PHASES_EVENT)
        + event(finish("\udfff"))
        + event({"error": {"message": "\ud800"}})
    )
    with PartWriter(tmp_path, REQUESTS, "w") as writer:
        writer.append(row(stream((1, reads)), Words()))
        writer.append(row(plain(500, b"\xff\xfe\0"), Words()))
        assert writer.flush()
        assert writer.rows_written == 2
