"""The laws of the engine, and the books that they are about.

    received = finished + aborted + rejected + failed + live            at all times, from any thread (``Ledger``)
    pages free + cached + used = total; the counts of a page = the requests that hold it
    tokens in steps = tokens in requests                                between two steps (``Engine.integrity``)

``Laws`` remembers when the last check was, what it found, and how many violations there ever were.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field

from engine.request import ABORT, ERROR, LENGTH, STOP

log = logging.getLogger("tailspan.engine")

SHOWN = 16  # violations that are kept word by word


@dataclass(frozen=True, slots=True)
class Books:
    """One moment of the ledger.  ended: by finish reason; rejected: by reason of the refusal."""

    received: int
    live: int
    ended: dict[str, int]
    rejected: dict[str, int]

    @property
    def finished(self) -> int:
        """Answers that are complete."""
        return self.ended.get(STOP, 0) + self.ended.get(LENGTH, 0)

    @property
    def aborted(self) -> int:
        """Ended by their client or by the end of the engine."""
        return self.ended.get(ABORT, 0)

    @property
    def failed(self) -> int:
        """Ended by an error."""
        return self.ended.get(ERROR, 0)

    def violations(self) -> list[str]:
        """[] when the books balance."""
        rejected = sum(self.rejected.values())
        if self.received == self.finished + self.aborted + rejected + self.failed + self.live:
            return []
        return [
            f"received {self.received} requests, but {self.finished} finished, {self.aborted} aborted, "
            f"{rejected} were rejected, {self.failed} failed and {self.live} are live"
        ]


class Ledger:
    """Every request once: it enters, and is refused or ends.  One lock, so that a reader sees one moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received = self._live = 0
        self._ended: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def entered(self) -> None:
        """A request was taken."""
        with self._lock:
            self._received += 1
            self._live += 1

    def refused(self, reason: str) -> None:
        """A request came and was not taken."""
        with self._lock:
            self._received += 1
            self._rejected[reason] += 1

    def ended(self, reason: str) -> None:
        """A request that was taken is over."""
        with self._lock:
            self._live -= 1
            self._ended[reason] += 1

    def read(self) -> Books:
        """The books now."""
        with self._lock:
            return Books(self._received, self._live, dict(self._ended), dict(self._rejected))


@dataclass(slots=True)
class Laws:
    """What the checks found.  Written by the engine thread."""

    every: int  # steps between two checks; 0: only when idle
    checks: int = 0
    violations: int = 0
    last_step: int = 0
    last: list[str] = field(default_factory=list)  # of the last check
    first: list[str] = field(default_factory=list)  # of the first check that found something

    def due(self, step: int) -> bool:
        """Is a check due after this step?"""
        return self.every > 0 and step - self.last_step >= self.every

    def checked(self, found: list[str], step: int) -> None:
        """A check was made after so many steps."""
        self.checks += 1
        self.last_step = step
        if found and found != self.last:
            log.error("laws broken at step %d: %s", step, "; ".join(found[:SHOWN]))
        self.last = found[:SHOWN]
        if found:
            self.violations += len(found)
            self.first = self.first or self.last
