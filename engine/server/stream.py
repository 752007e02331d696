"""From the engine thread to the event loop: outputs in order, one wake-up for all outputs of a step.

What must hold: the engine thread never waits for a client.  It appends to a queue and wakes the loop at most once
until the loop has emptied it; each request's outputs then wait in its own mailbox, so that a slow reader holds up
its own handler and nothing else.  A mailbox is bounded by the request's max_tokens, and in bytes where it is told so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.request import Output


class Hop:
    """The one queue between the engine thread (``push``) and the event loop (which empties it into mailboxes)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Mailbox, Output]] = deque()
        self._armed = False
        self._closed = False

    def push(self, mailbox: Mailbox, output: Output) -> None:
        """Engine thread: hand one output over."""
        self._items.append((mailbox, output))
        if not self._armed and not self._closed:
            self._armed = True
            self._loop.call_soon_threadsafe(self.empty)

    def empty(self) -> None:
        """Event loop: deliver everything."""
        self._armed = False  # before the queue is read: what comes after the last look wakes us again
        while self._items:
            mailbox, output = self._items.popleft()
            mailbox.deliver(output)

    def close(self) -> None:
        """Event loop: deliver what is there and wake the loop no more (it is about to end)."""
        self._closed = True
        self.empty()


class Mailbox:
    """Outputs of one request's ``parts`` (choices), each in order; belongs to the event loop, but for ``emit``.

    ``over`` once the last output (with a finish reason) of every part arrived; ``on_over`` is called then.  ``bound``
    sets how many bytes may wait here, and what is done, once, when there are more.
    """

    __slots__ = ("_frame", "_held", "_hop", "_limit", "_on_full", "_open", "_outputs", "_waiter", "on_over", "over")

    def __init__(self, hop: Hop, parts: int = 1) -> None:
        self._hop, self._open = hop, parts
        self._outputs: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.on_over: Callable[[], None] | None = None
        self.over = False
        self._limit = self._held = self._frame = 0
        self._on_full: Callable[[], None] | None = None

    def bound(self, limit: int, frame: int, on_full: Callable[[], None]) -> None:
        """limit: bytes that may wait; frame: bytes that an output takes beside its text."""
        self._limit, self._frame, self._on_full = limit, frame, on_full

    def emit(self, output: Output) -> None:
        """Engine thread: the request's ``emit``."""
        self._hop.push(self, output)

    def deliver(self, output: Output) -> None:
        """Event loop: one more output."""
        self._outputs.append(output)
        if self._on_full is not None:
            self._held += self._frame + len(output.text)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if output.finish_reason is not None:
            self._open -= 1
            self.over = self._open == 0
            if self.over and self.on_over is not None:
                self.on_over()
        if self._on_full is not None and self._held > self._limit:
            on_full, self._on_full = self._on_full, None
            on_full()

    def rest(self) -> list[Output]:
        """What came and was not taken."""
        self._held = 0
        taken = list(self._outputs)
        self._outputs.clear()
        return taken

    async def take(self) -> list[Output]:
        """All outputs that came since the last call; waits for the first.  One reader."""
        if not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.rest()
