"""The moment of the next send, for those who would keep it waiting: a loop that reads a hundred answers in one turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

NEVER: Final = 1 << 62


class Due:
    """at_ns: CLOCK_MONOTONIC; from then on `ring` sends what is due.  Both are set by who owns the schedule."""

    __slots__ = ("at_ns", "ring")

    def __init__(self, ring: Callable[[], None] = lambda: None) -> None:
        self.at_ns = NEVER
        self.ring = ring
