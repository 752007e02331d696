"""The client's own roofline, and the long checks of the load generator, each for a moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.load_clients import BARE, Seen, send
from loadgen import roofline
from loadgen.native_stub import NativeStub
from loadgen.roofline import CHUNKS, EVENTS, Step, measure, search
from loadgen.sse import Event, SseReader


def test_one_rate_is_sent_read_and_accounted_for(model: Path) -> None:
    step = measure(40.0, 1.0, str(model), workers=2)
    assert (step.sent, step.scheduled, step.errors, step.workers) == (40, 40, 0, 2)
    assert step.ttft_p50_s >= 0.049
    assert 0 < step.lag_p50_s <= step.lag_p99_s and step.cpu_per_request_s > 0
    assert step.to_dict()["events_per_s"] == 40 * EVENTS


GOOD = Step(100.0, 1, 100, 100, 0, 0.0001, 0.001, 0.0503, 0.1, 0.0002, 0.0)


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
    assert (seen.requests, seen.done) == (100, 100)
    assert seen.cpu_s > 0
    assert Seen(50.0, 150, 150, (10, 50, 49, 50, 1), 1.0, 3.0).held
    assert not Seen(50.0, 150, 150, (10, 50, 40, 50, 1), 1.0, 3.0).held


@pytest.mark.parametrize("format", ["sse", *fuzz.SEEDS])
def test_broken_input_for_a_moment(tmp_path: Path, format: str) -> None:
    check = fuzz.check_sse if format == "sse" else fuzz.trace_check(format, tmp_path)
    seeds = [b"data: a\n\nid: 1\ndata: b\r\n\r\n"] if format == "sse" else fuzz.SEEDS[format]
    assert fuzz.fuzz(format, seeds, check, 0.01, seed=1)


def test_the_fuzzer_finds_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "FOUND", tmp_path / "found")
    feed = SseReader.feed

    def broken(self: SseReader, data: bytes) -> list[Event]:
        return [event._replace(data=event.data.strip()) for event in feed(self, data)][:1]

    monkeypatch.setattr(SseReader, "feed", broken)
    assert not fuzz.fuzz("sse", [b"data: a\n\ndata: b\n\n"], fuzz.check_sse, 0.2, seed=1)
    assert (tmp_path / "found" / "sse.bin").exists()
