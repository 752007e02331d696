"""Cases 5 to 12 of the design: what one answer means, against a scripted server on real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telemetry import names
from tests.loadgen.judged import labels_of, on_time, policy, summary_of
from tests.loadgen.sending import Row, Source, at_once, send_all
from tests.loadgen.stub import (
    CLOSE,
    DONE,
    HANG,
    Request,
    Step,
    answer,
    chunk,
    content,
    delta,
    event,
    finish,
    role,
    sse_head,
    usage,
)

LATE = 1.0  # how much a busy machine may delay what is checked to be at once


def stream(*parts: bytes | float) -> list[Step]:
    """A chunked stream of these events and waits, with an orderly end."""
    steps: list[Step] = [sse_head(chunked=True)]
    steps += [chunk(part) if isinstance(part, bytes) else part for part in parts]
    return [*steps, chunk(b"")]


def one(folder: Path, *parts: bytes | float, **more: Any) -> Row:
    """The row of one request that is answered so."""
    rows, _ = send_all(folder, lambda request: stream(*parts), at_once(1), **more)
    return rows[0]


def test_case_5_the_role_and_an_empty_delta_are_no_first_token(tmp_path: Path) -> None:
    end = event(finish()) + event(usage(5, 1)) + DONE
    parts = (0.01, event(role()), 0.01, event(content("")), 0.18, event(content("Hi")) + end)
    row = one(tmp_path, *parts)
    first_chunk, first_token = (row[name] - row["sent_s"] for name in ("first_chunk_s", "first_token_s"))
    assert 0.008 <= first_chunk < first_token - 0.1
    assert 0.195 <= first_token < 0.2 + LATE
    assert row["first_content_s"] == row["first_token_s"] == row["last_token_s"]
    assert (row["error"], row["text"], row["tpot_s"]) == (None, "Hi", None)


@pytest.mark.parametrize("spoken", [True, False])
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_case_6_reasoning_is_the_first_token_and_content_comes_later_or_never(
    tmp_path: Path, spoken: bool, key: str
) -> None:
    thought = event(delta(**{key: "hmm"}))
    late = (0.3, event(content("So."))) if spoken else (0.3,)
    end = event(finish("stop" if spoken else "length")) + DONE
    row = one(tmp_path, event(role()), 0.05, thought, *late, end)
    first_token = row["first_token_s"] - row["sent_s"]
    assert 0.048 <= first_token < 0.05 + LATE  # a timer may ring a millisecond early
    if spoken:
        assert row["first_content_s"] - row["first_token_s"] >= 0.2
    else:
        assert row["first_content_s"] is None and row["error"] is None


class Letters:
    """A tokenizer of one token a character."""

    special_texts: frozenset[str] = frozenset()

    def encode_plain(self, text: str) -> list[int]:
        return [1] * len(text)

    def token_bytes(self, token: int) -> bytes:
        return b"A"


def test_case_7_time_per_token_counts_tokens_and_gaps_count_chunks(tmp_path: Path) -> None:
    # 4 chunks of 1, 8, 8, 8 tokens: by the usage in each.
    said = 0
    parts: list[bytes | float] = []
    for tokens in (1, 8, 8, 8):
        said += tokens
        parts += [event({**content("x" * tokens), "usage": {"prompt_tokens": 5, "completion_tokens": said}}), 0.1]
    row = one(tmp_path, *parts, event(finish()) + DONE)
    assert row["chunk_tokens"] == [1, 8, 8, 8]
    gaps = [b - a for a, b in zip(row["chunk_s"], row["chunk_s"][1:], strict=False)]
    assert len(gaps) == 3 and all(0.099 <= gap < 0.1 + LATE for gap in gaps)
    assert row["max_gap_s"] == pytest.approx(max(gaps), abs=1e-6)
    assert row["tpot_s"] == pytest.approx(sum(gaps) / 24, abs=1e-6), "12.5 ms where the gaps are 100 ms"
    row = one(tmp_path / "at once", event(content("all of it")) + event(finish()) + event(usage(5, 9)) + DONE)
    assert (row["tpot_s"], row["max_gap_s"], row["error"]) == (None, None, None)


USAGE_FORMS: dict[str, list[bytes]] = {
    "in every chunk": [
        event({**content("ab"), "usage": {"prompt_tokens": 5, "completion_tokens": 1}}),
        event({**content("cd"), "usage": {"prompt_tokens": 5, "completion_tokens": 2}}),
        event({**finish(), "usage": {"prompt_tokens": 5, "completion_tokens": 2}}),
    ],
    "only the last": [
        event(content("ab")),
        event(content("cd")),
        event({**finish(), "usage": {"prompt_tokens": 5, "completion_tokens": 2}}),
    ],
    "after the finish": [event(content("ab")), event(content("cd")), event(finish()), event(usage(5, 2))],
}


@pytest.mark.parametrize("form", USAGE_FORMS)
def test_case_8_usage_says_the_same_wherever_it_stands(tmp_path: Path, form: str) -> None:
    row = one(tmp_path, *USAGE_FORMS[form], DONE)
    told = {"prompt_tokens_reported": 5, "completion_tokens_reported": 2, "usage_estimated": False, "error": None}
    assert told.items() <= row.items()


def test_case_8_without_usage_tokens_are_counted_and_flagged_and_a_wrong_usage_stays_beside_our_count(
    tmp_path: Path,
) -> None:
    import asyncio

    from tests.loadgen.sending import Run, run, settings
    from tests.loadgen.stub import Stub

    def script(request: Request) -> list[Step]:
        told = event(usage(5, 30)) if request.json["n"] else b""
        return stream(event(content("abcdefghij")) + event(finish()) + told + DONE)

    async def work() -> list[Row]:
        async with Stub(script) as stub:
            run_ = Run(tmp_path, at_once(2), settings(stub.url), Letters())
            await run_.start()
            await asyncio.wait_for(run_.drained.wait(), 10)
            return await run_.stop()

    silent, wrong = run(work())
    assert (silent["usage_estimated"], silent["completion_tokens_reported"]) == (True, None)
    assert silent["completion_tokens_counted"] == 10
    assert (wrong["usage_estimated"], wrong["completion_tokens_reported"]) == (False, 30)
    assert wrong["completion_tokens_counted"] == 10
    summary = summary_of(tmp_path / "runs", on_time([silent, wrong]), policy())
    assert (summary.usage.estimated, summary.usage.disagreeing) == (1, 1)
    assert summary.usage.examples == (1,)


SSE = (
    b"\xef\xbb\xbf: a comment\r\nretry: 5\r\n\r\n"
    + b'id: 1\r\nevent: message\r\ndata:{"choices":[{"index":0,"delta":{"content":"Gr\xc3\xbc\xc3\x9fe "}}]}\r\n\r\n'
    + b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"\xf0\x9f\x90\x9f!"}}]}\n\n'
    + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\r\r'
    + b"data: [DONE]"
)


def test_case_9_bytes_cut_at_every_position_read_the_same(tmp_path: Path) -> None:
    def script(request: Request) -> list[Step]:
        at = request.json["n"]
        head = sse_head(chunked=True)
        return [head, *(chunk(part) for part in (SSE[:at], SSE[at:]) if part), chunk(b"")]

    rows, _ = send_all(tmp_path, script, at_once(len(SSE) + 1))
    assert len(rows) == len(SSE) + 1
    assert {(row["text"], row["error"], row["finish_reason"]) for row in rows} == {("Grüße 🐟!", None, "stop")}
    assert len({row["output_sha"] for row in rows}) == 1


CUTS: dict[str, list[Step]] = {
    "closed without a finish reason": [sse_head(chunked=True), chunk(event(content("Par"))), CLOSE],
    "a clean end without a finish reason": [sse_head(), event(content("Par")), CLOSE],
    "a whole message without a finish reason": [sse_head(chunked=True), chunk(event(content("Par"))), chunk(b"")],
    "an error after 200": [
        sse_head(chunked=True),
        chunk(event(content("Par"))),
        chunk(event({"error": {"message": "boom"}}) + DONE),
        chunk(b""),
    ],
}


@pytest.mark.parametrize("how", CUTS)
def test_case_10_a_cut_stream_is_dropped_and_its_part_is_kept(tmp_path: Path, how: str) -> None:
    rows, _ = send_all(tmp_path, lambda request: CUTS[how], at_once(1))
    assert (rows[0]["error"], rows[0]["text"]) == (names.STREAM_CUT, "Par")
    assert labels_of(on_time(rows), policy()) == [(names.DROPPED, names.STREAM_CUT)]


def test_case_10_a_length_finish_is_no_fault_by_itself(tmp_path: Path) -> None:
    row = one(tmp_path, event(content("Paris is")), event(finish("length")), DONE)
    assert (row["finish_reason"], row["truncated_by_limit"]) == ("length", True)
    assert labels_of(on_time([row]), policy()) == [(names.GOOD, None)]


def test_case_11_one_of_each_label_and_goodput_is_a_quarter(tmp_path: Path) -> None:
    def script(request: Request) -> list[Step]:
        n = request.json["n"]
        if n == 3:
            return [CLOSE]
        prompt = 5 if n != 2 else 7  # the server read another prompt than the one that was meant
        tail = event(content("Paris")) + event(finish()) + event(usage(prompt, 1)) + DONE
        return stream(0.6 if n == 1 else 0.0, tail)

    rows, _ = send_all(tmp_path, script, at_once(4))
    rows = on_time(rows)
    rule = policy(ttft_s=0.5)
    assert [label for label, _ in labels_of(rows, rule)] == [names.GOOD, names.LATE, names.WRONG, names.DROPPED]
    summary = summary_of(tmp_path / "runs", rows, rule)
    assert summary.goodput == 0.25
    assert sum(summary.labels.values()) == 4


def test_case_12_failures_make_the_tail_unbounded_which_is_a_flag_not_a_number(tmp_path: Path) -> None:
    def script(request: Request) -> list[Step]:
        return [CLOSE] if request.json["n"] % 33 == 7 else [0.2, *answer("Hi")]

    rows, _ = send_all(tmp_path, script, at_once(100))
    assert sum(row["error"] is not None for row in rows) == 3
    summary = summary_of(tmp_path / "runs", on_time(rows), policy())
    e2e = next(one for one in summary.latencies if one.measure == "e2e")
    levels = {one.p: one for one in e2e.scheduled}
    assert levels[95.0].value is not None and levels[95.0].value >= 0.2 and not levels[95.0].unbounded
    assert levels[99.0].value is None and levels[99.0].unbounded
    assert {one.p: one.value is not None for one in e2e.survivors}[99.0]
    text = json.dumps(summary.to_dict(), allow_nan=False)
    assert '"unbounded": true' in text


def test_an_answer_that_is_known_is_looked_for_in_the_text(tmp_path: Path) -> None:
    from collections.abc import Iterator
    from dataclasses import replace

    from loadgen.job import Call

    class Asked(Source):
        def __iter__(self) -> Iterator[Call]:
            for call in super().__iter__():
                yield replace(call, expected_answer="347")

    texts = ("It is 347 euros.", "It is 3470 euros.", "347")
    rows, _ = send_all(tmp_path, lambda request: answer(texts[request.json["n"]]), Asked(0.0, 0.0, 0.0))
    assert [(row["expected_answer"], row["answer_matches"]) for row in rows] == [("347", n != 1) for n in range(3)]


def test_a_server_that_hangs_is_timed_out(tmp_path: Path) -> None:
    rows, _ = send_all(tmp_path, lambda request: [HANG], at_once(1), first_token_timeout_s=0.2)
    assert rows[0]["error"] == names.TIMEOUT_FIRST_TOKEN
