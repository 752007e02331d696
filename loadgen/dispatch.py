"""Open loop: every call leaves at its absolute moment, whatever the server does, and is noted when it ends.

Owns the schedule of one worker, the timeouts and the order of work on its event loop.  Must always hold:
  * a call is never skipped and its moment never moved: a late send shows as lag;
  * sending and reading come first; unpacking further calls and collecting garbage are done where nothing is due for a
    millisecond, or when calls run short (`_may_tidy`);
  * every call that was due is noted exactly once in the end, sent or not, for its row (`loadgen.spool`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from loadgen.alarm import Alarm, alarm
from loadgen.building import Frames
from loadgen.due import NEVER, Due
from loadgen.flight import Flight
from loadgen.http import Connection, Limits, Origin
from loadgen.job import Call, CallSource, SendSettings, after_ns
from loadgen.openers import Openers
from loadgen.pool import Pool
from loadgen.reads import Reads
from loadgen.retries import Retries
from loadgen.spool import Spool
from loadgen.usual import Shape
from loadgen.vitals import Vitals
from loadgen.wire import RequestHead
from models.errors import UserError
from telemetry.names import CUT_BY_END, TIMEOUT_FIRST_TOKEN, TIMEOUT_TOTAL

LOOK_AHEAD: Final = 512  # calls built before they are due
_LOOK_AHEAD_BYTES: Final = 32 << 20
_LAST_BUILD_S: Final = 2.0  # what a stop waits for calls that were due and are not built
_TURN_NS: Final = 1_000_000  # sends in a row before the answers get their turn; room that other work needs
_TIDY_NS: Final = 300_000  # of that other work in a row
_LINGER_NS: Final = 5_000_000_000  # how long a finished answer's connection may take to end its HTTP message


class Dispatcher:
    """Sends the calls of one worker.  Life: prepare, start, stop.  Everything happens on one event loop."""

    def __init__(
        self,
        settings: SendSettings,
        source: CallSource | Frames,
        spool: Spool,
        worker: int,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        """spool: where requests are noted, and the attempts of settings with patience; it stays open."""
        self.connect_timeout_s = settings.connect_timeout_s
        self.requests = len(source)
        self.vitals = Vitals()
        self._settings = settings
        self._source = source
        self._calls: Iterator[Call | None] = iter(source)
        self._spool = spool
        self._on_drained = on_drained
        limits = Limits(head=settings.line_limit, body=settings.body_limit)
        way = settings.way
        proxy = None if way.proxy is None else Origin.of_proxy(way.proxy)
        origins = [Origin.parse(url) for url in settings.targets]
        self._due = Due(self._ring)
        self._pools = [Pool(one, limits, way.tls if one.tls else None, proxy, self._due) for one in origins]
        self._reads: Reads | None = None
        self.warnings: list[str] = []  # what makes this sender slower than it could be
        self._openers = Openers(self._pools, settings.connect_timeout_s, settings.max_concurrency)
        self._heads = [RequestHead(one, settings.headers, proxy) for one in origins]
        self._shapes = [Shape() for _ in origins]
        self._first_token_s, self._total_s = settings.first_token_timeout_s, settings.total_timeout_s
        self._retries: Retries | None = None
        if settings.patience is not None:
            patience = settings.patience
            self._first_token_s = min(self._first_token_s, patience.first_token_s or self._first_token_s)
            self._total_s = min(self._total_s, patience.total_s or self._total_s)
            self._retries = Retries(patience, settings.retry_seed, spool, worker, self._again)
        self._zero_ns = 0
        self._ahead: deque[tuple[int, Call]] = deque()  # ns after zero
        self._ahead_bytes = 0
        self._exhausted = False
        self._waiting = False  # for the process that builds the calls
        self._built = asyncio.Event()  # something came from it
        self.built_late = 0  # calls that were due before they were built
        self._parked: deque[tuple[Call, Flight | None]] = deque()  # due, but held back by max_concurrency
        self._in_flight: dict[int, Flight] = {}  # both in the order of their start, which is that of their timeouts
        self._no_token_yet: dict[int, Flight] = {}
        self._lingering: deque[tuple[int, Connection, int]] = deque()
        self._flushed_ns = 0
        self._tidy_scheduled = False
        self._stopping = False
        self._empty = asyncio.Event()
        self._alarm: Alarm | None = None
        self._pulse: Alarm | None = None
        self.begun = 0
        self.sent = 0
        self.done = 0
        self.answered = 0
        self.errors: Counter[str] = Counter()

    # --- life ---
    async def prepare(self) -> None:
        """Resolve the targets and build the first calls.  Raises UserError."""
        try:
            self._reads = Reads(self._due)
        except (UserError, OSError) as problem:
            why = problem.message if isinstance(problem, UserError) else str(problem)
            self.warnings.append(f"the event loop reads the sockets, which costs more a token: {why}")
        for pool in self._pools:
            pool.reads = self._reads
            await pool.resolve()
        while self._wants_calls() or self._waiting:
            if self._waiting:
                await self._built.wait()
            self._pull()

    def start(self, zero_ns: int) -> None:
        """Begin; `zero_ns` is the run's zero on CLOCK_MONOTONIC, in the future or not."""
        self._zero_ns = zero_ns
        self._spool.start(zero_ns)
        self.vitals.begin()
        self._flushed_ns = time.monotonic_ns()
        self._openers.begin(all_seen=self._exhausted)
        self._alarm = alarm(self._ring)
        self._pulse = alarm(self._beat)
        self._pulse.set(self.vitals.next_beat_ns)
        if self._retries is not None:
            self._retries.start(zero_ns)
        self._ring()

    async def stop(self, grace_s: float) -> None:
        """Send no more; let what is in flight end within `grace_s`, then cut it.  All of it is noted."""
        if not self._stopping:
            self._stopping = True
            self._due.at_ns = NEVER
            if self._alarm is not None:
                self._alarm.close()
            for flight in self._retries.write_off() if self._retries is not None else ():
                self._count(flight)
            await self._write_off_unsent(time.monotonic_ns())
            self._ahead.clear()
            self._exhausted = True
        if self._in_flight and grace_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), grace_s)
        self._openers.close()
        self.cut()
        for pool in self._pools:
            pool.close()
        if self._pulse is not None:
            self._pulse.close()
        self._spool.flush()
        await asyncio.sleep(0)  # let the aborted transports say goodbye
        if self._reads is not None:
            self._reads.close()
        self.vitals.finish()

    def cut(self) -> None:
        """Give up everything in flight now."""
        now = time.monotonic_ns()
        for flight in list(self._in_flight.values()):
            flight.give_up(CUT_BY_END, f"cut by the end of the run: {flight.state}", now)

    @property
    def finished(self) -> bool:
        """All calls were sent and have ended."""
        pausing = self._retries is not None and self._retries.pending
        return self._exhausted and not self._ahead and not self._parked and not self._in_flight and not pausing

    def progress(self) -> dict[str, Any]:
        """The live figures; `due` counts what was built of the schedule, which is all but in a grave backlog."""
        now = time.monotonic_ns()
        overdue = len(self._parked)
        for after, _ in self._ahead:
            if self._zero_ns + after > now:
                break
            overdue += 1
        return {
            "t_s": (now - self._zero_ns) / 1e9,
            "due": self.begun + overdue,
            "sent": self.sent,
            "done": self.done,
            "inflight": len(self._in_flight),
            "answered": self.answered,
            "errors": dict(self.errors),
            "lag_p99_s": self.vitals.lag.quantile(0.99),
            "loop_lag_p99_s": self.vitals.loop_lag.quantile(0.99),
            "cpu_ratio": self.vitals.cpu_ratio_since_last(now),
            "connections": sum(len(pool) for pool in self._pools),
            "finished": self.finished,
            **(self._retries.figures() if self._retries is not None else {}),
        }

    # --- sending ---
    def _due_ns(self, call: Call) -> int:
        return self._zero_ns + after_ns(call)

    def _ring(self) -> None:
        """Launch what is due, then sleep until the next.  Called by the alarm, or in the middle of reading answers."""
        if self._stopping:
            return
        assert self._alarm is not None
        now = time.monotonic_ns()
        turn_ends = now + _TURN_NS
        due = wake = NEVER
        while self._ahead or self._pull():
            after, call = self._ahead[0]
            if self._zero_ns + after > now:
                due = wake = self._zero_ns + after
                break
            if now > turn_ends:
                due, wake = now + _TURN_NS, now  # at once, but after what the sockets have to say
                break
            self._ahead.popleft()
            self._ahead_bytes -= len(call.body)
            self._launch(call, None, now)
            now = time.monotonic_ns()
        self._due.at_ns = due
        if wake != NEVER and not self._alarm.waiting:  # else it rings too early, which costs less than to set it anew
            self._alarm.set(wake)
        if self.finished and not self.begun:
            self._on_drained()  # an empty schedule: no end of a request will say so
        self._tidy_soon()

    def _launch(self, call: Call, before: Flight | None, now: int) -> None:
        most = self._settings.max_concurrency
        if most is not None and (self._parked or len(self._in_flight) >= most):
            self._parked.append((call, before))
        else:
            self._begin(call, before, now)

    def _unpark(self) -> None:
        """Give free places to those who wait, in their order."""
        most = self._settings.max_concurrency
        while self._parked and not self._stopping and (most is None or len(self._in_flight) < most):
            self._begin(*self._parked.popleft(), time.monotonic_ns())

    def _begin(self, call: Call, before: Flight | None, now: int) -> None:
        """One attempt; before: the one that failed."""
        first = call.index if call.target is None else call.target
        where = (first + (before.attempt + 1 if before is not None else 0)) % len(self._pools)
        flight = Flight(
            self,
            call,
            self._pools[where],
            self._heads[where].request,
            now,
            self._settings.line_limit,
            before,
            self._shapes[where],
        )
        self._in_flight[call.index] = flight
        self._no_token_yet[call.index] = flight
        if before is None:
            self.begun += 1
            self.vitals.lag.add((now - self._due_ns(call)) / 1e9)
            if self._retries is not None:
                self._retries.budget.begun += 1
        flight.go()

    def _again(self, failed: Flight) -> None:
        """The pause of a retry is over."""
        self._launch(failed.call, failed, time.monotonic_ns())

    def on_sent(self, flight: Flight) -> None:
        if flight.attempt == 0:
            self.sent += 1

    def on_first_token(self, flight: Flight) -> None:
        self._no_token_yet.pop(flight.call.index, None)

    def on_end(self, flight: Flight) -> None:
        index = flight.call.index
        del self._in_flight[index]
        self._no_token_yet.pop(index, None)
        connection = flight.connection
        if connection is not None and connection.busy and connection.open:
            self._lingering.append((time.monotonic_ns() + _LINGER_NS, connection, connection.exchanges))
        retried = False
        if self._retries is not None:
            retried = self._retries.ended(flight, stopping=self._stopping)
        if not retried:
            self._count(flight)
        if self._parked:
            # In the next turn: by then the connection that has just been read may be free.
            asyncio.get_running_loop().call_soon(self._unpark)
        self._tidy_soon()
        if not self._in_flight:
            if self._stopping:
                self._empty.set()
            elif self.finished:
                self._on_drained()

    def _count(self, flight: Flight) -> None:
        self.done += 1
        if flight.answer.failure is None:
            self.answered += 1
        else:
            self.errors[flight.answer.failure.reason] += 1
        self._spool.put(flight)

    async def _write_off_unsent(self, now: int) -> None:
        """Calls that were due and never begun get a row too; those of the future are none of this run's.

        Waits _LAST_BUILD_S at most for due calls that are not built yet.
        """
        while self._parked:
            call, before = self._parked.popleft()
            if before is None:
                self._never_sent(call, now)
            else:
                self._count(before)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BUILD_S):
                while self._zero_ns and (self._ahead or self._pull() or self._waiting):
                    if not self._ahead:
                        await self._built.wait()
                    elif self._zero_ns + self._ahead[0][0] > now:
                        break
                    else:
                        self._never_sent(self._ahead.popleft()[1], now)

    def _never_sent(self, call: Call, now: int) -> None:
        where = (call.index if call.target is None else call.target) % len(self._pools)
        flight = Flight(self, call, self._pools[where], self._heads[where].request, 0, self._settings.line_limit)
        flight.ended = True
        flight.answer.give_up(CUT_BY_END, "the run ended before it was sent", now)
        self._count(flight)

    # --- building calls ahead ---
    def _wants_calls(self) -> bool:
        wanted = len(self._ahead) < LOOK_AHEAD and self._ahead_bytes < _LOOK_AHEAD_BYTES
        return wanted and not self._exhausted and not self._waiting

    def _pull(self) -> bool:
        """Take one more call from the source; False when there is none, or none yet."""
        if self._waiting:
            return False
        try:
            call = next(self._calls)
        except StopIteration:
            self._exhausted = True
            return False
        if call is None:
            assert isinstance(self._source, Frames)  # no other source is ever not ready
            self._waiting = True
            self._built.clear()
            self._source.when_ready(self._on_built)
            return False
        after = after_ns(call)
        self._ahead.append((after, call))
        self._openers.see(after)
        self._ahead_bytes += len(call.body)
        return True

    def _on_built(self) -> None:
        """More calls came from the process that builds them."""
        self._waiting = False
        self._built.set()
        if not self._ahead and self._pull() and self._zero_ns:
            self.built_late += self._zero_ns + self._ahead[0][0] < time.monotonic_ns()
        if self._alarm is not None and not self._stopping:
            self._ring()

    # --- timeouts and the pulse ---
    def _beat(self) -> None:
        assert self._pulse is not None
        now = time.monotonic_ns()
        self.vitals.beat(now)
        self._pulse.set(self.vitals.next_beat_ns)
        self._time_out(now)
        if not self._stopping:
            self._openers.open(now - self._zero_ns)
        if now - self._flushed_ns >= self._settings.flush_s * 1e9:
            self._flushed_ns = now
            self._spool.flush()
        self.vitals.collect_if_wanted(now, self._room_ns(now), len(self._in_flight))
        self._tidy_soon()

    def _time_out(self, now: int) -> None:
        self._expire(self._no_token_yet, self._first_token_s, TIMEOUT_FIRST_TOKEN, now)
        self._expire(self._in_flight, self._total_s, TIMEOUT_TOTAL, now)
        while self._lingering and self._lingering[0][0] <= now:
            _, connection, exchange = self._lingering.popleft()
            if connection.busy and connection.exchanges == exchange:
                connection.cut()

    @staticmethod
    def _expire(flights: dict[int, Flight], limit_s: float, reason: str, now: int) -> None:
        oldest_ns = now - round(limit_s * 1e9)
        while (flight := next(iter(flights.values()), None)) is not None and flight.start_ns <= oldest_ns:
            flight.give_up(reason, f"after {limit_s:g} s: {flight.state}", now)  # takes it out of `flights`

    # --- what can wait ---
    def _room_ns(self, now: int) -> int:
        """Time until the next send."""
        return self._zero_ns + self._ahead[0][0] - now if self._ahead else _TURN_NS * 1000

    def _may_tidy(self, now: int) -> bool:
        """Is there work that can wait, and either room for it before the next send or no more waiting?"""
        return self._wants_calls() and (self._room_ns(now) >= _TURN_NS or len(self._ahead) < LOOK_AHEAD // 8)

    def _tidy_soon(self) -> None:
        if not self._tidy_scheduled and self._may_tidy(time.monotonic_ns()):
            self._tidy_scheduled = True
            asyncio.get_running_loop().call_soon(self._tidy)

    def _tidy(self) -> None:
        """Some of the work that can wait; then sockets and sends get their turn before there is more."""
        self._tidy_scheduled = False
        now = time.monotonic_ns()
        turn_ends = now + _TIDY_NS
        while now < turn_ends and self._may_tidy(now):
            self._pull()
            now = time.monotonic_ns()
        self._tidy_soon()
