"""The client's own roofline, and the long checks of the load generator, each for a moment."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fuzz
from benchmarks.load_clients import (
    BARE,
    LOCUST,
    OTHERS,
    TOKENIZER,
    Seen,
    per_second,
    python_for,
    send,
    tokenizer_cache,
    told,
)
from loadgen import roofline
from loadgen.native_stub import NativeStub
from loadgen.roofline import CHUNKS, EVENTS, Step, measure, search
from loadgen.sse import Event, SseReader


def test_one_rate_is_sent_read_and_accounted_for(model: Path) -> None:
    step = measure(40.0, 1.0, str(model), workers=2)
    assert (step.sent, step.scheduled, step.errors, step.workers) == (40, 40, 0, 2)
    assert step.ttft_p50_s >= 0.049
    assert 0 < step.lag_p50_s <= step.lag_p99_s and step.cpu_per_request_s > 0
    assert step.rows_cpu_per_request_s > 0
    assert step.to_dict()["events_per_s"] == 40 * EVENTS


GOOD = Step(100.0, 1, 100, 100, 0, 0.0001, 0.001, 0.0503, 0.1, 0.0002, 0.0001, 0.0)


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({}, True),
        ({"lag_p99_s": 0.006}, False),
        ({"sent": 98}, False),
        ({"errors": 1}, False),
        ({"ttft_p50_s": 0.0512}, False),
    ],
)
def test_a_rate_is_held_when_nothing_of_it_was_late(change: dict[str, float], held: bool) -> None:
    assert replace(GOOD, **change).held is held  # type: ignore[arg-type]


def test_the_search_ends_near_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(rate: float, seconds: float, reference: str, **_: object) -> Step:
        return replace(GOOD, rate=rate, lag_p99_s=0.001 if rate <= 3300 else 0.02)

    monkeypatch.setattr(roofline, "measure", fake)
    seen: list[Step] = []
    best, steps = search("x", 1.0, 60.0, seen.append)
    assert best is not None and 3300 * 0.9 < best.rate <= 3300
    assert seen == steps and len(steps) < 12
    monkeypatch.setattr(roofline, "measure", lambda rate, *_, **__: replace(GOOD, rate=rate, errors=1))
    assert search("x", 1.0, 60.0, seen.append)[0] is None


def test_the_stub_gives_an_account_of_itself() -> None:
    with NativeStub(chunks=CHUNKS) as stub:
        assert stub.url.startswith("http://127.0.0.1:")
    assert stub.report["requests"] == 0


def test_the_bare_loop_is_a_client_that_the_stub_can_judge(tmp_path: Path) -> None:
    seen = send(BARE, 50.0, 2.0, tmp_path, None)
    assert seen.requests == 100 and sum(seen.per_second) <= 100
    assert seen.cpu_s > 0 and seen.lag_p99_s is not None and seen.ttft_p50_s is not None and seen.ttft_p50_s > 0.049


@pytest.mark.parametrize(
    ("seen", "held"),
    [
        (Seen(50.0, 160, (10, 50, 49, 50, 1), 1.0), True),
        (Seen(50.0, 160, (10, 50, 40, 50, 1), 1.0), False),
        (Seen(50.0, 160, (50, 1), 1.0), False),
        (Seen(50.0, 160, (10, 50, 50, 50, 1), 1.0, lag_p99_s=0.004, ttft_p50_s=0.0504), True),
        (Seen(50.0, 160, (10, 50, 50, 50, 1), 1.0, lag_p99_s=0.006, ttft_p50_s=0.0504), False),
        (Seen(50.0, 160, (10, 50, 50, 50, 1), 1.0, lag_p99_s=0.004, ttft_p50_s=0.0520), False),
        (Seen(400.0, 1900, (10, 380, 425, 391, 1), 1.0, exponential=True), True),
        (Seen(400.0, 1900, (10, 380, 325, 350, 1), 1.0, exponential=True), False),
    ],
)
def test_a_peer_holds_a_rate_that_the_stub_saw_in_every_second(seen: Seen, held: bool) -> None:
    assert seen.held is held
    assert seen.delivered <= seen.rate


def test_arrivals_are_counted_back_from_the_last() -> None:
    stamps = np.array([0, 5_000, *(5_000_000_000 + n * 250_000_000 for n in range(12))], dtype=np.int64)
    assert per_second(stamps, 3.0) == (4, 4, 4)
    assert per_second(stamps, 4.0) == (0, 4, 4, 4)


def test_the_tokenizer_lies_where_the_hub_would_have_put_it(tmp_path: Path) -> None:
    cache = tokenizer_cache(tmp_path)
    repository = cache / f"models--{TOKENIZER.replace('/', '--')}"
    revision = (repository / "refs" / "main").read_text(encoding="ascii")
    assert (repository / "snapshots" / revision / "tokenizer.json").is_file()
    assert tokenizer_cache(tmp_path) == cache


def test_a_python_that_is_new_enough_or_the_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_for((3, 11)) == sys.executable
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match=r"needs Python 3\.99 or newer"):
        python_for((3, 99))


@pytest.mark.parametrize("format", ["sse", "answer", *fuzz.SEEDS])
def test_broken_input_for_a_moment(tmp_path: Path, format: str) -> None:
    streams = {"sse": [b"data: a\n\nid: 1\ndata: b\r\n\r\n"], "answer": [fuzz.ANSWER]}
    checks = {"sse": fuzz.check_sse, "answer": fuzz.check_answer}
    check = checks.get(format) or fuzz.trace_check(format, tmp_path)
    assert fuzz.fuzz(format, streams.get(format) or fuzz.SEEDS[format], check, 0.01, seed=1)


def test_the_fuzzer_finds_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "FOUND", tmp_path / "found")
    feed = SseReader.feed

    def broken(self: SseReader, data: bytes) -> list[Event]:
        return [event._replace(data=event.data.strip()) for event in feed(self, data)][:1]

    monkeypatch.setattr(SseReader, "feed", broken)
    assert not fuzz.fuzz("sse", [b"data: a\n\ndata: b\n\n"], fuzz.check_sse, 0.2, seed=1)
    assert (tmp_path / "found" / "sse.bin").exists()


def test_the_locust_script_tells_its_own_lag_and_ttft(tmp_path: Path) -> None:
    seen = send(LOCUST, 10.0, 3.0, tmp_path, None)
    assert seen.requests >= 10
    assert seen.lag_p99_s is not None and seen.lag_p99_s >= 0
    assert seen.ttft_p50_s is not None and seen.ttft_p50_s >= 0.049


def test_a_client_that_should_tell_and_does_not_is_no_measurement() -> None:
    assert told(BARE, ["noise", '{"lag_p99_s": 0.001, "ttft_p50_s": 0.05}']) == {"lag_p99_s": 0.001, "ttft_p50_s": 0.05}
    assert told(OTHERS[0], []) == {}
    for said in ([], ["no JSON"], ["[1]"], ['{"lag_p99_s": null, "ttft_p50_s": 0.05}'], ['{"lag_p99_s": 0.001}']):
        with pytest.raises(RuntimeError, match="tells no lag"):
            told(LOCUST, said)
