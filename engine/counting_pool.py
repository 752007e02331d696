"""A KV pool that only counts its pages: without a prefix cache they are all alike, and nobody can tell which is whose.

For virtual time (``engine.leaping``), where nothing is written into pages.  What must hold: numbers of free and used
pages are those of ``engine.blocks.BlockPool``, and the same takes succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.blocks import ROOT, BlockPool

PAGE: Final = 0  # stands for each of them


class CountingPool(BlockPool):
    """``total`` pages of ``size`` tokens."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size, self.prefix_cache = total, size, False
        self._most, self._held = total, 0
        self.redirect = None

    @property
    def available(self) -> int:
        """Pages that can be handed out now."""
        return max(0, self.total - self._held)

    @property
    def cached(self) -> int:
        """None: there is no prefix cache."""
        return 0

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self._held

    @property
    def findable(self) -> list[int]:
        """None."""
        return []

    def take(self, n: int) -> list[int] | None:
        """``n`` pages; None (and nothing taken) when there are not so many."""
        if n > self.available:
            return None
        self._held += n
        return [PAGE] * n

    def register(self, page: int, chain: int, tokens: Sequence[int]) -> int:
        """Nothing can be found again."""
        return ROOT

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        self._held -= len(pages)
        if self._held < 0:
            raise RuntimeError(f"{-self._held} pages released more often than held")

    def resize(self, total: int) -> None:
        """Serve from ``total`` pages, 1 .. as many as there were at the start."""
        if not 1 <= total <= self._most:
            raise ValueError(f"a pool of {self._most} pages cannot serve from {total}")
        self.total = total

    def forget(self) -> None:
        """Nothing is remembered."""

    def violations(self, held: Sequence[Sequence[int]]) -> list[str]:
        """Broken laws, given the pages of every live request; [] when all hold."""
        seen = sum(len(pages) for pages in held)
        return [] if seen == self._held else [f"{self._held} pages are counted as held, but requests hold {seen}"]
