"""Connections for calls of one moment, opened shortly before it: else each would wait for those before it to connect.

Owns which moments those are, and the tasks that connect.  Such a moment is a burst of calls that a trace stamps alike,
and the beginning of the run: the users of a service have connections already when a window of its trace begins.  Must
always hold: no other calls of a high rate are helped, since their connecting is part of what a user waits for; what
cannot be opened is left to the call, which meets the fault itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from loadgen.pool import ConnectError, Pool

MOMENT_NS: Final = 100_000  # calls this near to each other are of one moment; no sender holds such a rate
BURST: Final = 3  # of so many calls on
AHEAD_NS: Final = 1_000_000_000  # servers close idle connections after some seconds
MOST: Final = 256  # connections for one burst
BEGIN_NS: Final = 250_000_000  # of the run: hardly an answer ends sooner, so these calls need a connection each
MOST_AT_BEGIN: Final = 2_000
WIDTH: Final = 16  # opened at once: servers accept from a queue of limited length, often 128


class Openers:
    """Show it every call ahead, in order; ask it to open what is due soon.  Moments are ns after the run's zero."""

    def __init__(self, pools: Sequence[Pool], timeout_s: float, most: int | None) -> None:
        """most: connections in use at once; None: any number."""
        self._pools = pools
        self._timeout_s = timeout_s
        self._most = most
        self._early = 0  # calls of the first BEGIN_NS that were shown
        self._last_ns = 0
        self._moment = [-MOMENT_NS, 0]  # of its first call, and how many calls
        self._bursts: deque[list[int]] = deque()
        self._opening: Counter[Pool] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def see(self, after_ns: int) -> None:
        """A call that will be due at this moment."""
        self._last_ns = after_ns
        self._early += after_ns < BEGIN_NS
        moment = self._moment
        if after_ns - moment[0] < MOMENT_NS:
            moment[1] += 1
            if moment[1] == BURST:
                self._bursts.append(moment)
        else:
            self._moment = [after_ns, 1]

    def begin(self, *, all_seen: bool) -> None:
        """Begin to open what the calls of the first BEGIN_NS need; shortly before the run's zero.

        all_seen: there are no calls but those shown.  Else those beyond come at the rate of those shown.
        """
        calls = self._early
        if calls >= BURST and self._last_ns < BEGIN_NS and not all_seen:
            calls = round(calls * BEGIN_NS / max(self._last_ns, MOMENT_NS))
        if calls >= BURST:
            self._want(calls, MOST_AT_BEGIN)

    def open(self, now_ns: int) -> None:
        """Begin to open what the bursts that are due within AHEAD_NS of now lack.  Calls go to the pools in turn."""
        while self._bursts and self._bursts[0][0] <= now_ns + AHEAD_NS:
            due_ns, calls = self._bursts.popleft()
            if due_ns <= now_ns:
                continue  # they have helped themselves
            self._want(calls, MOST)

    def close(self) -> None:
        """Open no more."""
        self._bursts.clear()
        for task in self._tasks:
            task.cancel()

    def _want(self, calls: int, most: int) -> None:
        """Open what these calls lack, which go to the pools in turn."""
        each = min(-(-calls // len(self._pools)), most if self._most is None else min(most, self._most))
        for pool in self._pools:
            lack = each - pool.idle - self._opening[pool]
            if lack > 0:
                self._opening[pool] += lack
                places = iter(range(lack))  # shared: whoever is done takes the next
                for _ in range(min(lack, WIDTH)):
                    task = asyncio.get_running_loop().create_task(self._open(pool, places))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _open(self, pool: Pool, places: Iterator[int]) -> None:
        for _ in places:
            try:
                with suppress(ConnectError):
                    pool.keep(await pool.connect(self._timeout_s))
            finally:
                self._opening[pool] -= 1
