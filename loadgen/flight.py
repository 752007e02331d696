"""One call on its way: from the moment work on it starts until it has an answer or a reason.

Owns one attempt at a call: the connection it uses, the one retry after a stale kept connection, and which reason a
broken connection means.  Must always hold: a flight ends once; after that nothing of the connection reaches it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from loadgen.http import CLOSED, Connection
from loadgen.job import Call
from loadgen.pool import ConnectError, Pool
from loadgen.stream import Answer
from loadgen.usual import Shape, Usual
from telemetry.names import RESET, SERVER_ERROR

#: A kept connection that the server closes within this time of our request, without a byte, was stale: the close and
#: the request crossed.  Later it is the server's failure.
STALE_NS: Final = 1_000_000_000


class Ground(Protocol):
    """Who sends flights off and hears of their moments."""

    connect_timeout_s: float

    def on_sent(self, flight: Flight) -> None: ...
    def on_first_token(self, flight: Flight) -> None: ...
    def on_end(self, flight: Flight) -> None: ...


class Flight:
    """Stamps are CLOCK_MONOTONIC ns; None: did not happen.  `answer` holds what came back."""

    __slots__ = (
        "_connecting",
        "_connection",
        "_ground",
        "_heard_first",
        "_request",
        "_sends",
        "answer",
        "attempt",
        "attempts",
        "call",
        "connect_ns",
        "due_ns",
        "ended",
        "first_start_ns",
        "next_due_ns",
        "next_pause_s",
        "pause_s",
        "peer",
        "pool",
        "reused",
        "sent_ns",
        "start_ns",
    )

    def __init__(
        self,
        ground: Ground,
        call: Call,
        pool: Pool,
        request: Callable[[Call], bytes],
        start_ns: int,
        line_limit: int,
        before: Flight | None = None,
        shape: Shape | None = None,
    ) -> None:
        """before: the attempt that failed, where this one is a retry.  shape: of the events of this server."""
        self.call = call
        self.pool = pool
        self.answer = Answer(line_limit, shape)
        self.start_ns = start_ns
        self.sent_ns: int | None = None
        self.connect_ns: int | None = None
        self.reused: bool | None = None
        self.attempts: int = 0 if before is None else before.attempts  # sends, those of earlier attempts included
        self.attempt: int = 0 if before is None else before.attempt + 1
        self.first_start_ns: int = start_ns if before is None else before.first_start_ns
        self.due_ns = None if before is None else before.next_due_ns  # of a retry: the end of its pause
        self.pause_s = None if before is None else before.next_pause_s
        self.next_due_ns: int | None = None
        self.next_pause_s: float | None = None
        self._sends = 0  # of this attempt alone
        self.peer = ""
        self.ended = False
        self._ground = ground
        self._request = request
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._heard_first = False

    @property
    def target(self) -> str:
        """The URL that it goes to, as it was given."""
        return self.pool.origin.url

    @property
    def replica(self) -> str | None:
        """Who answered: as it named itself, else its address."""
        return self.answer.replica or self.peer or None

    def go(self) -> None:
        """Send on a kept connection, or connect first."""
        connection = self.pool.take()
        if connection is not None:
            self.connect_ns = 0
            self._write(connection, reused=True)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def give_up(self, reason: str, detail: str, now_ns: int) -> None:
        """Stop here: drop the connection, keep what came."""
        if self.ended:
            return
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.cut()
        self.answer.give_up(reason, detail, now_ns)
        self._end()

    @property
    def state(self) -> str:
        """Where a flight is, for the detail of a timeout."""
        if self.sent_ns is None:
            return "connecting"
        if self.answer.status is None:
            return "waiting for the answer's head"
        if self._connection is not None:
            self._connection.collect()
        return f"{len(self.answer.stamps)} token chunks read" if self.answer.stamps else "waiting for the first token"

    @property
    def connection(self) -> Connection | None:
        """The connection that it is using, until it ends."""
        return self._connection

    async def _connect(self) -> None:
        began = time.monotonic_ns()
        try:
            connection = await self.pool.connect(self._ground.connect_timeout_s)
        except ConnectError as error:
            now = time.monotonic_ns()
            self._connecting = None
            self.connect_ns = (self.connect_ns or 0) + now - began
            detail = error.detail if self._sends == 0 else f"after a stale connection: {error.detail}"
            self._sends += 1
            self.attempts += 1
            self.answer.give_up(error.reason, detail, now)
            self._end()
            return
        self._connecting = None
        self.connect_ns = (self.connect_ns or 0) + time.monotonic_ns() - began
        if self.ended:
            self.pool.keep(connection)
        elif connection.open:
            self._write(connection, reused=False)
        else:
            self._sends += 1
            self.attempts += 1
            self.answer.give_up(RESET, "closed by the server as soon as it was open", time.monotonic_ns())
            self._end()

    def _write(self, connection: Connection, reused: bool) -> None:
        self._connection = connection
        self.reused = reused
        self.peer = connection.peer
        self._sends += 1
        self.attempts += 1
        data = self._request(self.call)
        first = self.sent_ns is None
        self.sent_ns = time.monotonic_ns()
        connection.request(data, self)
        if first:
            self._ground.on_sent(self)

    def _end(self) -> None:
        self.ended = True
        self._ground.on_end(self)
        self._connection = None

    # --- Listener ---
    def on_head(self, status: int, headers: dict[bytes, bytes], now_ns: int) -> None:
        self.answer.head(status, headers, now_ns)

    def on_body(self, data: bytes, now_ns: int) -> None:
        answer = self.answer
        answer.feed(data, now_ns)
        if not self._heard_first and answer.stamps:
            self._heard_first = True
            self._ground.on_first_token(self)
        if answer.done_marker:
            # The answer is complete; a late end of the HTTP message belongs to the connection alone.
            if self._connection is not None:
                self._connection.release()
            answer.end(now_ns)
            self._end()

    def usual(self) -> Usual | None:
        return self.answer.usual()

    def on_complete(self, now_ns: int) -> None:
        self.answer.end(now_ns)
        self._end()

    def on_failure(self, kind: str, detail: str, now_ns: int) -> None:
        connection, self._connection = self._connection, None
        answer = self.answer
        if answer.status is not None:
            answer.end(now_ns, broken=detail)
        elif kind != CLOSED:
            answer.give_up(SERVER_ERROR, detail, now_ns)
        elif connection is not None and self._was_stale(connection, now_ns):
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            return
        else:
            answer.give_up(RESET, detail, now_ns)
        self._end()

    def _was_stale(self, connection: Connection, now_ns: int) -> bool:
        assert self.sent_ns is not None
        return bool(self.reused) and self._sends == 1 and not connection.heard and now_ns - self.sent_ns < STALE_NS
