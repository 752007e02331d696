"""Cases 1 to 4, 13, 15, 16, 18 and 19 of the design: when things are sent, tried again, lost and merged."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from loadgen.arrivals import ArrivalModel
from loadgen.native_stub import NativeStub
from loadgen.patience import Patience
from telemetry import names
from telemetry.schema import REQUESTS
from tests.loadgen.judged import bundle_of, policy, summary_of
from tests.loadgen.place import WAIT_S, Place, chats, children, script, wait_for
from tests.loadgen.sending import Row, Run, Source, run, send_all, settings
from tests.loadgen.stub import HANG, Request, Step, Stub, StubThread, answer, plain


# --- the clock ---
def test_case_1_with_a_limit_in_flight_the_headline_is_from_the_schedule(tmp_path: Path) -> None:
    rows, _ = send_all(
        tmp_path, lambda request: [0.5, *answer("Hi")], Source(*[n * 0.1 for n in range(8)]), max_concurrency=1
    )
    from_send = [row["end_s"] - row["sent_s"] for row in rows]
    from_schedule = [row["end_s"] - row["intended_s"] for row in rows]
    assert min(from_send) >= 0.49
    # Request n ends 0.5 x (n + 1) s after the start and was due at 0.1 x n: 0.5 s for the first, 3.3 s for the last.
    for n, seconds in enumerate(from_schedule):
        assert seconds >= 0.49 * (n + 1) - 0.1 * n
    summary = summary_of(tmp_path / "runs", [{**row, "lag_s": 0.0} for row in rows], policy())
    e2e = next(one for one in summary.latencies if one.measure == "e2e")
    headline, beside = e2e.scheduled[-1].value, e2e.from_send[-1].value
    assert headline == pytest.approx(max(from_schedule)) and beside == pytest.approx(max(from_send))


def test_case_2_a_frozen_server_delays_no_send_and_all_it_froze_show_it(tmp_path: Path) -> None:
    async def work() -> list[Row]:
        with NativeStub(chunks=4, ttft_ms=20, chunk_ms=5, freeze="2,2") as stub:
            run_ = Run(tmp_path, Source(*[n * 0.01 for n in range(800)]), settings(stub.url))
            await run_.start()
            await run_.drained.wait()
            return await run_.stop()

    rows = run(work())
    assert len(rows) == 800 and all(row["error"] is None for row in rows), "none is skipped"
    first = rows[0]["sent_s"]  # the stub freezes 2 s after its first request
    assert sum(2.0 + first <= row["sent_s"] < 4.0 + first for row in rows) > 100, "sends go on"
    frozen = [row for row in rows if 2.15 + first <= row["intended_s"] < 3.7 + first]
    waits = np.array([row["first_token_s"] - row["intended_s"] for row in frozen])
    times = np.array([row["intended_s"] for row in frozen])
    assert waits.min() > 0.1 and waits.max() > 1.6
    slope, _ = np.polyfit(times, waits, 1)
    assert len(frozen) > 130
    assert slope == pytest.approx(-1.0, abs=0.1), "the wait falls by a second for each second of the freeze"
    assert np.quantile([row["end_s"] - row["intended_s"] for row in rows], 0.99) >= 1.7


BURNING = """
import asyncio, sys, time
from tests.loadgen.stub import Stub, answer
def script(request):
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return answer("Hi")
async def main():
    async with Stub(script) as stub:
        print(stub.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


def test_case_3_every_request_of_a_constant_rate_is_sent(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", BURNING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as server:
        assert server.stdout is not None

        async def work(url: str) -> list[Row]:
            run_ = Run(tmp_path, Source(*[n / 200 for n in range(1000)]), settings(url))
            await run_.start()
            await run_.drained.wait()
            return await run_.stop()

        rows = run(work(server.stdout.readline().strip()))
        server.kill()
    assert len(rows) == 1000
    assert all(row["sent_s"] is not None and row["sent_s"] >= row["intended_s"] for row in rows)
    late = [row["sent_s"] - row["intended_s"] for row in rows]
    # Times are absolute: the last is no later than the others (a relative sleep drifts by 9 % here).
    assert late[-1] <= np.quantile(late, 0.5) + 0.2


def kolmogorov_p(values: np.ndarray[tuple[int], np.dtype[np.float64]], rate: float) -> float:
    """p of the hypothesis that these gaps are exponential."""
    n = len(values)
    law = 1 - np.exp(-np.sort(values) * rate)
    steps = np.arange(1, n + 1) / n
    d = max(float(np.max(steps - law)), float(np.max(law - steps + 1 / n)))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * k**2 * x**2) for k in range(1, 101))


def gaps(model: str, seed: int = 1, length_s: float = 2000.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff(ArrivalModel.parse(model, "--arrivals").times(length_s, seed))


def test_case_4_constant_is_constant_poisson_is_poisson_and_gamma_is_as_asked() -> None:
    constant, poisson, gamma = gaps("constant:rate=5"), gaps("poisson:rate=5"), gaps("gamma:rate=5,cv=3")
    assert constant.std() / constant.mean() < 0.05
    assert constant.mean() == pytest.approx(0.2)
    assert 0.95 <= poisson.std() / poisson.mean() <= 1.05
    assert kolmogorov_p(poisson, 5.0) > 0.01
    assert kolmogorov_p(constant, 5.0) < 1e-6 and kolmogorov_p(gamma, 5.0) < 1e-6, "the test tells them apart"
    assert gamma.std() / gamma.mean() == pytest.approx(3.0, rel=0.08)
    assert len(gamma) == pytest.approx(10_000, rel=0.1)


# --- users ---
PATIENT = Patience(first_token_s=1.0, retries=2, backoff_s=0.1, factor=2.0, jitter=0.5, budget=0.1)


def storm(folder: Path, patience: Patience, count: int = 300, rate: float = 100.0) -> tuple[list[Row], list[Row], int]:
    """A server that takes 3 s for each of the first 60 requests and 10 ms afterwards: rows, attempts, sends."""

    async def work() -> tuple[list[Row], list[Row], int]:
        def play(request: Request) -> list[Step]:
            return [3.0 if request.number < 60 else 0.01, *answer("Hi")]

        async with Stub(play) as stub:
            run_ = Run(folder, Source(*[n / rate for n in range(count)]), settings(stub.url, patience=patience))
            await run_.start()
            await run_.drained.wait()
            rows = await run_.stop()
            return rows, run_.tried(), len(stub.requests)

    return run(work())


def test_case_13_attempts_are_linked_and_the_budget_is_never_exceeded(tmp_path: Path) -> None:
    rows, attempts, sends = storm(tmp_path / "r", PATIENT)
    assert len(rows) == 300
    assert {row["index"] for row in attempts} == set(range(300))
    retries = [row for row in attempts if row["attempt"] > 0]
    assert 0 < len(retries) <= 0.1 * 300
    for n, row in enumerate(sorted(retries, key=lambda row: row["due_s"]), start=1):
        begun = sum(one["intended_s"] <= row["due_s"] for one in rows)
        assert n <= 0.1 * begun + 1e-9, "the budget holds at every moment"
    by_index: dict[int, list[Row]] = {}
    for attempt in attempts:
        by_index.setdefault(attempt["index"], []).append(attempt)
    for row in rows:
        tried = by_index[row["index"]]
        assert [one["attempt"] for one in tried] == list(range(len(tried)))
        assert tried[-1]["error"] == row["error"]
        assert row["end_s"] == pytest.approx(tried[-1]["end_s"], abs=1e-6)
        for before, after in pairwise(tried):
            assert (before["verdict"], before["error"]) == ("retried", names.TIMEOUT_FIRST_TOKEN)
            assert 0.05 <= after["pause_s"] <= 0.1 * 2 ** (after["attempt"] - 1)
            assert after["due_s"] >= before["end_s"] + after["pause_s"] - 0.001
    again = [row for row in rows if row["error"] is None and len(by_index[row["index"]]) > 1]
    assert again, "some were answered by a retry"
    assert all(row["end_s"] - row["intended_s"] > 1.0 for row in again), "time runs from the first intended send"
    summary = summary_of(tmp_path / "runs", rows, policy(), attempts=attempts)
    assert summary.retries is not None
    assert summary.retries.amplification == pytest.approx(len(attempts) / 300)
    assert sends <= len(attempts) + 2  # a stale connection may cost a send of its own
    assert summary.retries.no_budget > 0
    assert summary.retries.recovery_s is not None and 0.25 <= summary.retries.recovery_s < 20
    assert "amplification" in summary.retries.sentence()


def test_case_13_without_a_budget_the_storm_amplifies(tmp_path: Path) -> None:
    _, attempts, _ = storm(tmp_path, Patience(first_token_s=1.0, retries=2, backoff_s=0.05, budget=10.0), count=100)
    assert len(attempts) > 1.3 * 100


def test_case_13_retry_after_is_honoured(tmp_path: Path) -> None:
    busy = plain("429 Too Many", {"error": {"message": "no"}}, "retry-after: 0.4")

    async def work() -> list[Row]:
        async with Stub(lambda request: [busy] if request.number == 0 else answer("Hi")) as stub:
            patience = Patience(retries=1, backoff_s=0.01, budget=1.0)
            run_ = Run(tmp_path, Source(0.0), settings(stub.url, patience=patience))
            await run_.start()
            await run_.drained.wait()
            assert (await run_.stop())[0]["error"] is None
            return run_.tried()

    first, second = run(work())
    assert (first["error"], first["retry_after_s"], first["verdict"]) == (names.REJECTED, 0.4, "retried")
    assert second["pause_s"] == 0.4
    assert second["sent_s"] - first["end_s"] >= 0.4
    impatient = Patience(retries=1, longest_s=0.2, budget=1.0)
    assert impatient.pause_s(0, 0, 1, 0.4) is None, "a user who waits 0.2 s does not come back after 0.4"
    assert impatient.pause_s(0, 5, 1, None) == impatient.pause_s(0, 5, 1, None)


def test_what_nobody_tries_again_ends_at_once(tmp_path: Path) -> None:
    bad = plain("400 Bad", {"error": {"message": "no"}})

    async def work() -> tuple[list[Row], list[Row]]:
        async with Stub(lambda request: [bad]) as stub:
            run_ = Run(tmp_path, Source(0.0, 0.0), settings(stub.url, patience=Patience(retries=3, budget=9.0)))
            await run_.start()
            await run_.drained.wait()
            return await run_.stop(), run_.tried()

    rows, attempts = run(work())
    assert [row["verdict"] for row in attempts] == ["not_retried"] * 2
    assert [row["attempts"] for row in rows] == [1, 1]


def test_the_end_of_the_run_ends_those_that_pause(tmp_path: Path) -> None:
    busy = plain("503 Busy", {"error": {"message": "no"}})

    async def work() -> list[Row]:
        async with Stub(lambda request: [busy]) as stub:
            patience = Patience(retries=1, backoff_s=60.0, jitter=0.0, budget=9.0)
            run_ = Run(tmp_path, Source(0.0, 0.0, 0.0), settings(stub.url, patience=patience))
            await run_.start()
            while run_.dispatcher.progress().get("pausing") != 3:
                await asyncio.sleep(0.005)
            assert not run_.dispatcher.finished
            return await run_.stop()

    assert [row["error"] for row in run(work())] == [names.REJECTED] * 3


# --- prompts of two runs ---
def test_case_15_two_runs_of_one_seed_share_no_prompt_unless_asked(place: Place, model: Path) -> None:
    from models.store import load_reference

    reference = load_reference(str(model))
    seen: list[list[str]] = []
    with StubThread(script(model)) as stub:
        for options in ([], [], ["--reuse-prompts", "one"], ["--reuse-prompts", "one"]):
            code, _, err = place.run(stub.url, "--seed", "3", "--duration", "0.5", *options, "--json")
            assert code == 0, err
            assert ("repeats the prompts" in err) == bool(options)
            assert ("prefix cache" in err) == bool(options), "the server's hit rate is printed"
            before = sum(map(len, seen))
            seen.append([request.json["messages"][0]["content"] for request in chats(stub)[before:]])
    template = reference.template.render([{"role": "user", "content": "X"}]).split("X")[0]
    assert len(reference.tokenizer.encode(template)) < 16
    ids = [[reference.tokenizer.encode(template + text) for text in texts] for texts in seen]
    for one in ids[0]:
        for other in ids[1]:
            assert common(one, other) < 16, "not one block of a prefix cache"
    assert sorted(seen[2]) == sorted(seen[3])


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# --- what is lost ---
def test_case_16_a_killed_worker_of_four_with_requests_in_flight(place: Place, model: Path) -> None:
    def play(request: Request) -> list[Step]:
        if request.path != "/v1/chat/completions":
            return script(model)(request)
        return [HANG]

    with StubThread(play) as stub:
        process = place.start(
            stub.url, "--workers", "4", "--total-timeout", "6", "--first-token-timeout", "6", "--json"
        )
        wait_for(lambda: len(chats(stub)) >= 40, "request")
        held = len(chats(stub))
        children(process, "loadgen.sender")[0].kill()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == names.EXIT_RUN_NOT_VALID, err
    summary = json.loads(out)
    assert summary["validity"]["verdict"] == names.INCOMPLETE
    assert sum(summary["labels"].values()) == 45
    lost = summary["reasons"][names.INVALID].get(names.WORKER_LOST, 0)
    assert held // 4 - 1 <= lost <= 12, "those of the dead worker, and no others"
    assert summary["labels"][names.DROPPED] == 45 - lost
    statuses = sorted(worker["status"] for worker in place.bundle().manifest["workers"])
    assert statuses == ["lost", "ok", "ok", "ok"]


def test_case_18_a_wall_clock_that_is_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_ns = time.time, time.time_ns

    def play(request: Request) -> Iterator[Step]:
        if request.json["n"] == 10:
            monkeypatch.setattr(time, "time", lambda: real() - 5)
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 5_000_000_000)
        yield from answer("Aaaa", "Bbbb", wait=0.01)

    rows, _ = send_all(tmp_path, play, Source(*[n * 0.01 for n in range(30)]))
    assert time.time() < real() - 4, "the clock was set back"
    for row in rows:
        moments = [
            row[name] for name in ("intended_s", "sent_s", "headers_s", "first_token_s", "last_token_s", "end_s")
        ]
        assert moments == sorted(moments)
        assert row["end_s"] - row["intended_s"] < 4 and row["error"] is None


def test_case_19_percentiles_of_four_workers_are_those_of_the_union(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows: list[Row] = []
    for n in range(400):
        first = n * 0.01 + float(rng.lognormal(-1 + n % 4, 0.5))  # each worker has another distribution
        given = {"index": n, "intended_s": n * 0.01, "sent_s": n * 0.01, "lag_s": 0.0, "first_token_s": first}
        given |= {"end_s": first + 0.1, "status": 200, "finish_reason": "stop", "done_marker": True, "input_tokens": 5}
        rows.append({**dict.fromkeys(REQUESTS.names), **given, "class": "default", "output_chars": 9, "worker": n % 4})
    alone, merged = summary_of(tmp_path / "1", rows, policy()), summary_of(tmp_path / "4", rows, policy(), workers=4)
    assert alone.latencies == merged.latencies
    ttft = next(one for one in merged.latencies if one.measure == "ttft")
    union = sorted(row["first_token_s"] - row["intended_s"] for row in rows)
    assert ttft.scheduled[-1].value == pytest.approx(union[math.ceil(0.99 * 400) - 1])
    assert bundle_of(tmp_path / "more", rows, workers=4).table("requests").num_rows == 400
