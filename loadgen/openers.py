"""Connections for calls of one moment, opened shortly before it: else each would wait for those before it to connect.

Owns which moments those are, and the tasks that connect.  Must always hold: only calls that traces stamp alike are a
burst, never the calls of a high rate, whose connecting is part of what a user waits for; what cannot be opened is left
to the call, which meets the fault itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from loadgen.http import ConnectError, Pool

MOMENT_NS: Final = 100_000  # calls this near to each other are of one moment; no sender holds such a rate
BURST: Final = 3  # of so many calls on
AHEAD_NS: Final = 1_000_000_000  # servers close idle connections after some seconds
MOST: Final = 256  # connections for one burst


class Openers:
    """Show it every call ahead, in order; ask it to open what is due soon.  Moments are ns after the run's zero."""

    def __init__(self, pools: Sequence[Pool], timeout_s: float, most: int | None) -> None:
        """most: connections in use at once; None: any number."""
        self._pools = pools
        self._timeout_s = timeout_s
        self._most = MOST if most is None else min(most, MOST)
        self._moment = [-MOMENT_NS, 0]  # of its first call, and how many calls
        self._bursts: deque[list[int]] = deque()
        self._opening: Counter[Pool] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def see(self, after_ns: int) -> None:
        """A call that will be due at this moment."""
        moment = self._moment
        if after_ns - moment[0] < MOMENT_NS:
            moment[1] += 1
            if moment[1] == BURST:
                self._bursts.append(moment)
        else:
            self._moment = [after_ns, 1]

    def open(self, now_ns: int) -> None:
        """Begin to open what the bursts that are due within AHEAD_NS of now lack.  Calls go to the pools in turn."""
        while self._bursts and self._bursts[0][0] <= now_ns + AHEAD_NS:
            due_ns, calls = self._bursts.popleft()
            if due_ns <= now_ns:
                continue  # they have helped themselves
            for pool in self._pools:
                wanted = min(-(-calls // len(self._pools)), self._most)
                for _ in range(wanted - pool.idle - self._opening[pool]):
                    self._opening[pool] += 1
                    task = asyncio.get_running_loop().create_task(self._open(pool))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Open no more."""
        self._bursts.clear()
        for task in self._tasks:
            task.cancel()

    async def _open(self, pool: Pool) -> None:
        try:
            with suppress(ConnectError):
                pool.keep(await pool.connect(self._timeout_s))
        finally:
            self._opening[pool] -= 1
