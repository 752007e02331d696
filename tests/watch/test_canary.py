"""Canaries at a trickle: what is asked, how it is judged, and that no customer's request is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.canaries.client import Client
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.goldens import BROKEN, SAME, Golden
from loadgen.preflight import Target
from loadgen.watch.canary import Canaries
from loadgen.watch.watch import Settings, Watch
from models.errors import UserError
from telemetry import slo
from telemetry.bundle import Bundle, list_runs
from tests.loadgen.stub import Request, StubThread, plain, unused_port
from tests.watch.traffic import ZERO, payload, request_span


def golden(name: str) -> Golden:
    return Golden(name, f"say {name}", (f"{name}a", f"{name}b"), (9.0, 9.0), (-0.01, -0.01), 5)


def recorded(count: int = 3) -> CanaryFile:
    goldens = tuple(golden(f"g{number}") for number in range(count))
    return CanaryFile("m", "http://x", 0, 2, 1e-4, goldens, (), None, (), None, "small", "", {})


def answered(tokens: list[str], prompt_tokens: int = 5) -> dict[str, Any]:
    content = [
        {
            "token": token,
            "logprob": -0.01,
            "top_logprobs": [{"token": token, "logprob": -0.01}, {"token": "z", "logprob": -9.01}],
        }
        for token in tokens
    ]
    choice = {"message": {"content": "".join(tokens)}, "finish_reason": "length", "logprobs": {"content": content}}
    return {"choices": [choice], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(tokens)}}


def honest(request: Request) -> list[bytes]:
    name = request.json["messages"][0]["content"].split()[1]
    return [plain("200 OK", answered([f"{name}a", f"{name}b"]))]


def garbled(request: Request) -> list[bytes]:
    return [plain("200 OK", answered(["z", "z"]))]


def test_goldens_are_asked_in_turn_and_right_answers_raise_no_alarm() -> None:
    with StubThread(honest) as stub:
        canaries = Canaries(Client(stub.url, "m", {}), recorded())
        rows = [canaries.ask(stub.url, 0) for _ in range(7)]
        asked = [request.json["messages"][0]["content"] for request in stub.requests]
        parents = [request.headers["traceparent"] for request in stub.requests]
    assert asked == [f"say g{number % 3}" for number in range(7)]
    assert canaries.counts[SAME] == 7 and canaries.alarm is None
    assert all(row["answer_matches"] and row["canary_kind"] == "golden" for row in rows)
    assert [f"00-{row['trace_id']}-{row['span_id']}-01" for row in rows] == parents
    assert canaries.traces == {row["trace_id"] for row in rows}


def test_wrong_answers_raise_the_alarm_and_one_golden_counts_once() -> None:
    with StubThread(garbled) as stub:
        canaries = Canaries(Client(stub.url, "m", {}), recorded(1))
        for _ in range(20):
            canaries.ask(stub.url, 0)
        assert canaries.counts[BROKEN] == 20 and canaries.alarm is None  # one golden, one piece of evidence
        canaries = Canaries(Client(stub.url, "m", {}), recorded(12))
        rows = [canaries.ask(stub.url, 0) for _ in range(12)]
    assert canaries.alarm is not None and "answered wrongly" in canaries.alarm
    assert not any(row["answer_matches"] for row in rows)


def test_a_server_that_does_not_answer_is_told_after_three() -> None:
    canaries = Canaries(Client(f"http://127.0.0.1:{unused_port()}", "m", {}, timeout_s=2.0), recorded())
    for count in range(3):
        assert canaries.alarm is None, count
        row = canaries.ask("http://x", 0)
        assert row["error"] == "refused" and row["end_s"] >= row["sent_s"]
    assert canaries.alarm is not None and "3 canaries in a row" in canaries.alarm


def test_a_file_without_goldens_is_refused() -> None:
    with pytest.raises(UserError, match="holds no golden"):
        Canaries(Client("http://x", "m", {}), recorded(0))


def test_a_watch_asks_at_its_trickle_and_calls_a_breach_when_answers_are_wrong(tmp_path: Path) -> None:
    with StubThread(garbled) as stub:
        target = Target(stub.url, True, True, ("m",), None, "here")
        settings = Settings(tmp_path / "w", period_s=1e6, look_s=20.0, judge_s=5.0, scrape_s=60.0, canary_s=5.0)
        asked: list[Any] = []

        def explain(good: Any, bad: Any) -> tuple[dict[str, Any], str]:
            asked.append((good, bad))
            return {}, "said"

        canaries = Canaries(Client(stub.url, "m", {}), recorded(30))
        watch = Watch(target, slo.load("chat"), settings, explain, canaries=canaries)
        watch.start(0.0, ZERO)
        number, second = 0, 0
        while watch.breaches.now is None and second < 200:
            second += 1
            spans = [request_span(number, float(second))]
            if canaries.traces and second % 5 == 1:  # the server's span of our own question comes too
                mine = sorted(canaries.traces)[0]
                spans.append({**request_span(0, float(second)), "number": 10_000 + second, "trace": mine})
            number += 1
            watch.receiver.take(payload(spans), "")
            watch.tick(float(second), ZERO + second * 10**9)
        assert watch.breaches.now is not None and "answered wrongly" in watch.breaches.now.reason
        assert sum(canaries.counts.values()) == pytest.approx(second / 5, abs=2)
        watch.stop(float(second))
    rows = [
        row for path in list_runs(tmp_path / "w" / "windows") for row in Bundle.open(path).table("requests").to_pylist()
    ]
    kinds = [row["canary_kind"] for row in rows]
    assert kinds.count("golden") == sum(canaries.counts.values())
    assert kinds.count(None) == number  # each customer's request once, none of ours among them
    (folder,) = (tmp_path / "w" / "breaches").iterdir()
    assert "answered wrongly" in json.loads((folder / "breach.json").read_text())["reason"]
