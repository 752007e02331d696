"""Sending open loop: the dispatcher on real sockets, what can go wrong, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadgen import flight as flight_module
from loadgen.dispatch import LOOK_AHEAD
from loadgen.http import Limits, Origin
from loadgen.openers import MOMENT_NS, MOST, WIDTH, Openers
from loadgen.pool import Pool
from loadgen.quantiles import Quantiles
from loadgen.sender import connection_warnings
from telemetry import names
from tests.loadgen.sending import Row, Run, Source, at_once, run, send_all, settings
from tests.loadgen.stub import (
    CLOSE,
    DONE,
    HANG,
    RESET,
    Request,
    Script,
    Step,
    Stub,
    answer,
    chunk,
    content,
    event,
    finish,
    plain,
    sse_head,
    unused_port,
)


# --- the schedule ---
def test_every_call_leaves_at_its_moment_and_has_one_row(tmp_path: Path) -> None:
    async def work() -> None:
        async with Stub(lambda request: answer("Aaaa", "Bbbb", wait=0.01)) as stub:
            source = Source(*[n * 0.01 for n in range(30)])
            run_ = Run(tmp_path, source, settings(stub.url))
            await run_.start(ahead_s=0.05)
            await run_.drained.wait()
            progress = run_.dispatcher.progress()
            rows = await run_.stop()
            assert [row["index"] for row in rows] == list(range(30))
            requests = sorted(stub.requests, key=lambda request: request.json["n"])
            assert [request.json["n"] for request in requests] == list(range(30))
            for row, request in zip(rows, requests, strict=True):
                assert row["lag_s"] >= 0
                assert row["sent_s"] >= row["intended_s"]
                assert request.t_ns >= run_.zero_ns + row["intended_s"] * 1e9
                assert request.headers["traceparent"].startswith(f"00-{row['trace_id']}-{row['span_id']}-")
                assert row["first_token_s"] - row["sent_s"] >= 0.009
                assert row["end_s"] >= row["last_token_s"] > row["first_token_s"] > row["first_chunk_s"]
            facts = {"error": None, "text": "AaaaBbbb", "finish_reason": "stop", "worker": 2, "trace_row": 107}
            schedule = {"class": "chat", "intended_s": 0.07, "attempts": 1, "target": stub.url, "status": 200}
            assert (facts | schedule).items() <= rows[7].items()
            counts = {"due": 30, "sent": 30, "done": 30, "answered": 30, "inflight": 0, "errors": {}, "finished": True}
            assert counts.items() <= progress.items()

    run(work())


def test_the_loop_is_open_a_server_that_freezes_does_not_delay_a_send(tmp_path: Path) -> None:
    async def work() -> list[Row]:
        async with Stub(lambda request: [0.6, *answer("Aaaa")]) as stub:
            run_ = Run(tmp_path, Source(*[n * 0.01 for n in range(40)]), settings(stub.url))
            await run_.start()
            while len(stub.requests) < 40:  # all are there before the first answer
                await asyncio.sleep(0.005)
                assert run_.dispatcher.done == 0
            await run_.drained.wait()
            return await run_.stop()

    rows = run(work())
    assert {row["error"] for row in rows} == {None}
    assert all(row["first_token_s"] - row["intended_s"] >= 0.59 for row in rows)


def test_a_late_start_skips_nothing_and_shows_as_lag(tmp_path: Path) -> None:
    async def work() -> list[Row]:
        async with Stub(lambda request: answer("Aaaa")) as stub:
            run_ = Run(tmp_path, Source(0.0, 0.1, 0.2, 0.55), settings(stub.url))
            await run_.start(ahead_s=-0.5)  # the run's zero is half a second ago
            await run_.drained.wait()
            return await run_.stop()

    rows = run(work())
    for row, least in zip(rows, (0.5, 0.4, 0.3, 0.0), strict=True):
        assert row["lag_s"] >= least
        assert row["first_token_s"] - row["intended_s"] >= least
    assert [row["intended_s"] for row in rows] == [0.0, 0.1, 0.2, 0.55]


def test_case_1_with_a_concurrency_limit_time_still_counts_from_the_schedule(tmp_path: Path) -> None:
    busy, most = 0, 0

    def script(request: Request) -> Iterator[Step]:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        yield 0.1
        busy -= 1
        yield from answer("Aaaa")

    rows, _ = send_all(tmp_path, script, Source(*[n * 0.02 for n in range(8)]), max_concurrency=1)
    assert most == 1
    from_send = [row["end_s"] - row["sent_s"] for row in rows]
    from_schedule = [row["end_s"] - row["intended_s"] for row in rows]
    assert all(seconds > 0.09 for seconds in from_send)
    # Request n is served n x 0.1 s after the first, but was due n x 0.02 s after it.
    assert all(seconds >= 0.1 * (n + 1) - 0.02 * n - 0.01 for n, seconds in enumerate(from_schedule))
    assert sum(from_schedule) > 2 * sum(from_send)
    assert [row["index"] for row in sorted(rows, key=lambda row: row["sent_s"])] == list(range(8))


def test_calls_are_built_a_little_ahead_not_all_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        source = Source(*[60.0 + n for n in range(5 * LOOK_AHEAD)])
        run_ = Run(tmp_path, source, settings(f"http://127.0.0.1:{unused_port()}"))
        await run_.start()
        assert source.built == LOOK_AHEAD
        assert await run_.stop() == []  # nothing was due

    run(work())


# --- what can go wrong ---
def test_nobody_listens(tmp_path: Path) -> None:
    async def work() -> list[Row]:
        run_ = Run(tmp_path, at_once(5), settings(f"http://127.0.0.1:{unused_port()}"))
        await run_.start()
        await run_.drained.wait()
        assert run_.dispatcher.progress()["errors"] == {names.REFUSED: 5}
        return await run_.stop()

    for row in run(work()):
        assert (row["error"], row["sent_s"], row["attempts"], row["status"]) == (names.REFUSED, None, 1, None)
        assert row["end_s"] >= row["lag_s"] >= 0


OUTCOMES: list[tuple[list[Step], dict[str, Any]]] = [
    ([CLOSE], {"error": names.RESET, "status": None}),
    ([RESET], {"error": names.RESET, "status": None}),
    ([b"HTTP/1.1 2"], {"error": names.TIMEOUT_FIRST_TOKEN, "status": None}),
    ([HANG], {"error": names.TIMEOUT_FIRST_TOKEN, "status": None}),
    ([sse_head(chunked=True), HANG], {"error": names.TIMEOUT_FIRST_TOKEN, "status": 200}),
    ([sse_head(chunked=True), chunk(event(content("Par"))), HANG], {"error": names.TIMEOUT_TOTAL, "text": "Par"}),
    ([sse_head(chunked=True), chunk(event(content("Par"))), CLOSE], {"error": names.STREAM_CUT, "text": "Par"}),
    ([sse_head(), event(content("Par")), CLOSE], {"error": names.STREAM_CUT, "text": "Par"}),
    ([sse_head(), event({"error": {"message": "boom"}}), CLOSE], {"error": names.STREAM_CUT}),
    ([b"hello\r\n"], {"error": names.SERVER_ERROR, "status": None}),
    ([plain("429 Too Many", {"error": {"message": "no"}}, "retry-after: 3")], {"error": names.REJECTED, "status": 429}),
    ([plain("400 Bad", {"error": {"message": "no"}})], {"error": names.BAD_REQUEST, "status": 400}),
    ([plain("500 Oops", b"oops")], {"error": names.SERVER_ERROR, "status": 500}),
    (answer("Paris"), {"error": None, "text": "Paris"}),
]


def test_every_outcome_has_its_reason_and_none_disturbs_the_others(tmp_path: Path) -> None:
    def script(request: Request) -> list[Step]:
        return OUTCOMES[request.json["n"]][0]

    source = at_once(len(OUTCOMES))  # all at once, so each has a connection of its own
    rows, _ = send_all(tmp_path, script, source, first_token_timeout_s=0.5, total_timeout_s=1.0)
    for row, (_, expected) in zip(rows, OUTCOMES, strict=True):
        assert expected.items() <= row.items(), row
        assert row["attempts"] == 1
        if row["error"] == names.TIMEOUT_FIRST_TOKEN:
            assert row["end_s"] - row["sent_s"] >= 0.45
        if row["error"] == names.TIMEOUT_TOTAL:
            assert row["end_s"] - row["sent_s"] >= 0.95
    assert rows[10]["retry_after_s"] == 3.0


GOOD: list[Step] = [
    plain("200 OK", {"choices": [{"index": 0, "message": {"content": "Aaaa"}, "finish_reason": "stop"}]})
]


def one_after_another(folder: Path, script: Script) -> tuple[list[Row], Stub]:
    """Two calls, the second of which goes out on the connection that the first left."""
    return send_all(folder, script, at_once(2), max_concurrency=1)


def test_a_stale_connection_is_retried_once_on_a_new_one(tmp_path: Path) -> None:
    rows, stub = one_after_another(tmp_path, lambda request: [CLOSE] if request.number == 1 else GOOD)
    assert [row["error"] for row in rows] == [None, None]
    assert [row["attempts"] for row in rows] == [1, 2]
    assert [row["connection_reused"] for row in rows] == [False, False]
    assert rows[1]["connect_s"] > 0
    assert stub.connections == 2 and len(stub.requests) == 3


def test_a_stale_connection_is_not_retried_twice_nor_after_a_byte(tmp_path: Path) -> None:
    rows, _ = one_after_another(tmp_path / "a", lambda request: [CLOSE] if request.number else GOOD)
    assert (rows[1]["error"], rows[1]["attempts"]) == (names.RESET, 2)
    rows, _ = one_after_another(tmp_path / "b", lambda request: [b"HTTP", CLOSE] if request.number else GOOD)
    assert (rows[1]["error"], rows[1]["attempts"], rows[1]["connection_reused"]) == (names.RESET, 1, True)


def test_a_server_that_closes_after_a_while_did_not_cross_our_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_module, "STALE_NS", 20_000_000)
    rows, _ = one_after_another(tmp_path, lambda request: [0.1, CLOSE] if request.number else GOOD)
    assert (rows[1]["error"], rows[1]["attempts"]) == (names.RESET, 1)


def test_done_ends_the_answer_and_the_connection_is_kept(tmp_path: Path) -> None:
    def script(request: Request) -> list[Step]:
        whole = event(content("Aaaa")) + event(finish()) + DONE
        return [sse_head(chunked=True), chunk(whole), 0.1, chunk(b"")]

    rows, stub = send_all(tmp_path, script, Source(0.0, 4.0))  # far apart: the machine may be busy
    assert [row["connection_reused"] for row in rows] == [False, True]
    assert rows[1]["connect_s"] == 0.0
    assert all(row["end_s"] == row["last_token_s"] for row in rows)
    assert stub.connections == 1


def test_targets_take_turns_and_replicas_name_themselves(tmp_path: Path) -> None:
    async def work() -> None:
        named = [sse_head("x-tailspan-replica: west"), event(content("a")), event(finish()), DONE, CLOSE]
        async with Stub(lambda request: named) as one, Stub(lambda request: answer("b")) as two:
            run_ = Run(tmp_path, at_once(6), settings(one.url, two.url))
            await run_.start()
            await run_.drained.wait()
            rows = await run_.stop()
            assert [row["target"] for row in rows] == [one.url, two.url] * 3
            assert [row["replica"] for row in rows] == ["west", two.url.removeprefix("http://")] * 3

    run(work())


def test_text_is_not_kept_when_none_is_asked_for(tmp_path: Path) -> None:
    rows, _ = send_all(tmp_path, lambda request: answer("Aaaa"), at_once(1), keep_text="none")
    assert (rows[0]["text"], rows[0]["output_chars"]) == (None, 4)


# --- the end ---
def test_stop_lets_some_finish_cuts_the_rest_and_writes_off_what_was_due(tmp_path: Path) -> None:
    def script(request: Request) -> list[Step]:
        start: list[Step] = [sse_head(chunked=True), chunk(event(content("Par")))]
        return [*start, HANG] if request.json["n"] else [*start, 0.3, chunk(event(finish()) + DONE), chunk(b"")]

    async def work() -> list[Row]:
        async with Stub(script) as stub:
            run_ = Run(tmp_path, Source(0.0, 0.0, 0.01, 0.01, 60.0, 61.0), settings(stub.url, max_concurrency=2))
            await run_.start()
            while len(stub.requests) < 2:
                await asyncio.sleep(0.005)
            rows = await run_.stop(grace_s=0.6)
            assert len(stub.requests) == 2  # a place that fell free was not taken
            progress = run_.dispatcher.progress()
            assert (progress["sent"], progress["done"], progress["inflight"]) == (2, 4, 0)
            return rows

    rows = run(work())
    assert [row["index"] for row in rows] == [0, 1, 2, 3]  # those of the future are none of this run's
    assert [row["error"] for row in rows] == [None, *[names.CUT_BY_END] * 3]
    assert rows[1]["text"] == "Par" and rows[1]["sent_s"] is not None
    assert [(row["sent_s"], row["lag_s"], row["attempts"]) for row in rows[2:]] == [(None, None, 0)] * 2
    assert all(row["end_s"] is not None for row in rows)


def test_stop_while_connecting(tmp_path: Path) -> None:
    async def work() -> list[Row]:
        async with Stub(lambda request: answer("Aaaa")) as stub:
            run_ = Run(tmp_path, at_once(3), settings(stub.url))
            await run_.start()  # connections are under way; no turn of the loop since
            return await run_.stop()

    assert [(row["error"], row["sent_s"]) for row in run(work())] == [(names.CUT_BY_END, None)] * 3


def test_rows_reach_the_disk_each_flush_though_others_are_still_open(tmp_path: Path) -> None:
    async def work() -> None:
        async with Stub(lambda request: [HANG] if request.json["n"] == 0 else answer("Aaaa")) as stub:
            run_ = Run(tmp_path, at_once(4), settings(stub.url))
            await run_.start()
            while len(run_.written()) < 3:
                await asyncio.sleep(0.02)
            assert run_.dispatcher.progress()["inflight"] == 1
            assert len(await run_.stop()) == 4

    run(work())


def test_quantiles_are_never_below_the_truth_and_close_to_it() -> None:
    found = Quantiles()
    assert found.quantile(0.99) is None
    values = [n * 1e-4 for n in range(1, 1001)]
    for value in values:
        found.add(value)
    for q in (0.01, 0.5, 0.99, 1.0):
        exact = values[max(0, round(q * 1000) - 1)]
        measured = found.quantile(q)
        assert measured is not None and exact * 0.999 <= measured <= exact * 1.021
    assert found.maximum == pytest.approx(0.1)


def test_limits_that_the_schedule_could_reach_are_named() -> None:
    assert connection_warnings(settings("http://a"), 100, 1024) == []
    files, *_ = connection_warnings(settings("http://a"), 5000, 1024)
    assert "5000" in files and "1024" in files and "ulimit -n" in files
    assert connection_warnings(settings("http://a", max_concurrency=8), 5000, 1024) == []


def test_calls_of_one_moment_find_their_connections_open(tmp_path: Path) -> None:
    rows, stub = send_all(tmp_path, lambda request: [0.3, *GOOD], Source(*[0.0] * 2, *[1.5] * 9))
    assert [row["connection_reused"] for row in rows] == [False] * 2 + [True] * 9
    assert [row["connect_s"] for row in rows[2:]] == [0.0] * 9
    assert 9 <= stub.connections <= 11, "those of the first two, where they are free by then, and what lacks"


@asynccontextmanager
async def opening(moments_ns: list[int], most: int | None) -> AsyncIterator[tuple[Openers, Pool]]:
    """Openers that have been shown calls of these moments, and their pool, before a server."""
    async with Stub(lambda request: GOOD) as stub:
        pool = Pool(Origin.parse(stub.url), Limits())
        await pool.resolve()
        openers = Openers([pool], 10.0, most)
        for moment in moments_ns:
            openers.see(moment)
        yield openers, pool
        pool.close()


@pytest.mark.parametrize(
    ("moments_ns", "now_ns", "most", "opened"),
    [
        ([0, 0, 0, 50_000], -1, None, 4),
        ([0, 0], -1, None, 0),  # two are no burst
        ([0, 0, 0], 0, None, 0),  # too late
        ([2_000_000_000] * 3, 0, None, 0),  # too early
        ([n * MOMENT_NS for n in range(50)], -1, None, 0),  # a high rate is no burst
        ([0] * 9, -1, 4, 4),  # no more than may be in use at once
        ([0] * 1000, -1, None, MOST),
    ],
)
def test_only_bursts_that_come_soon_have_their_connections_opened(
    moments_ns: list[int], now_ns: int, most: int | None, opened: int
) -> None:
    async def work() -> None:
        async with opening(moments_ns, most) as (openers, pool):
            openers.open(now_ns)
            await asyncio.gather(*openers._tasks)
            assert len(pool) == pool.idle == opened

    run(work())


@pytest.mark.parametrize(
    ("moments_ns", "all_seen", "most", "opened"),
    [
        ([0, 40_000_000, 200_000_000, 300_000_000], False, None, 3),
        ([0, 40_000_000], True, None, 0),  # two find no queue of those that connect
        ([300_000_000] * 9, True, None, 0),  # not of the beginning
        ([n * 10_000_000 for n in range(6)], True, None, 6),  # there are no more
        ([n * 10_000_000 for n in range(6)], False, None, 30),  # 6 in 50 ms go on at this rate
        ([n * 10_000_000 for n in range(6)], False, 8, 8),  # no more than may be in use at once
    ],
)
def test_calls_of_the_first_moments_have_their_connections_opened_few_at_a_time(
    moments_ns: list[int], all_seen: bool, most: int | None, opened: int
) -> None:
    async def work() -> None:
        async with opening(moments_ns, most) as (openers, pool):
            openers.begin(all_seen=all_seen)
            assert len(openers._tasks) == min(opened, WIDTH)
            await asyncio.gather(*openers._tasks)
            assert len(pool) == pool.idle == opened
            openers.begin(all_seen=all_seen)
            assert not openers._tasks, "those that are open are enough"

    run(work())
