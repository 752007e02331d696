"""The KV pool: pages of a fixed size, reference counts, and a prefix cache over full pages.

    page states      free (in no one's hands, holds nothing)      count 0, not in the index
                     cached (in no one's hands, still findable)   count 0, in the index, in LRU order
                     used (one or more requests hold it)          count >= 1

    prefix chain     root(0) --(tokens of page 0)--> chain 17 --(tokens of page 1)--> chain 42 ...

A cached page is found by (chain of the page before it, its tokens): the tokens themselves are compared, so a hash
collision cannot hand out another prompt's KV.  Chain ids are never used twice: a page whose parent was evicted can
not be reached any more and leaves by age.

Always: free + cached + used = total, and no count is negative (``violations``).  A pool that is made smaller while
pages are in use owes the rest: they are withdrawn as they are given back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

Key = tuple[int, tuple[int, ...]]
ROOT = 0


class BlockPool:
    """``total`` pages of ``size`` tokens.  Owns counts, the free list and the prefix index; knows no requests."""

    def __init__(self, total: int, size: int, *, prefix_cache: bool = True) -> None:
        self.total, self.size, self.prefix_cache = total, size, prefix_cache
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, oldest first
        self._count = [0] * total
        self._index: dict[Key, tuple[int, int]] = {}  # key -> (page, its chain id)
        self._key: dict[int, Key] = {}  # page -> key
        self._chains = ROOT
        self._withdrawn: list[int] = []  # out of service
        self._owed = 0  # pages still to be withdrawn
        self.redirect: Callable[[int], int] | None = None  # fault injection: the page that a hit is given instead

    @property
    def available(self) -> int:
        """Pages that can be handed out now: free ones and cached ones."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages in no one's hands that the prefix index still finds."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.total + self._owed - self.available

    def pages(self, tokens: int) -> int:
        """Pages needed for so many tokens."""
        return -(-tokens // self.size)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The longest cached prefix of whole pages that leaves at least one token to compute.

        Returns its pages, now held by the caller too, and the chain id of the last (ROOT for none).
        """
        pages: list[int] = []
        chain = ROOT
        if not self.prefix_cache:
            return pages, chain
        for start in range(0, (len(tokens) - 1) // self.size * self.size, self.size):
            found = self._index.get((chain, tuple(tokens[start : start + self.size])))
            if found is None:
                break
            page, chain = found
            if self.redirect is not None:
                page = self.redirect(page)
            self._hold(page)
            pages.append(page)
        return pages, chain

    def take(self, n: int) -> list[int] | None:
        """``n`` empty pages, evicting the oldest cached ones; None (and nothing taken) when there are not so many."""
        if n > self.available:
            return None
        if n <= len(self._free):
            pages = self._free[: -n - 1 : -1]
            del self._free[len(self._free) - n :]
        else:
            pages = [self._pop() for _ in range(n)]
        for page in pages:
            self._count[page] = 1
        return pages

    def register(self, page: int, chain: int, tokens: Sequence[int]) -> int:
        """Make a full, computed page findable after ``chain``; returns the chain id to go on with.

        When the same tokens are already there, that page stays the findable one and its chain is returned.
        """
        key = (chain, tuple(tokens))
        if not self.prefix_cache:
            return ROOT
        found = self._index.get(key)
        if found is not None:
            return found[1]
        self._chains += 1
        self._index[key] = (page, self._chains)
        self._key[page] = key
        return self._chains

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back; the last of a prompt first, so that what is evicted first is nobody's parent."""
        counts, keys, free = self._count, self._key, self._free
        for page in reversed(pages):
            counts[page] = left = counts[page] - 1
            if left < 0:
                raise RuntimeError(f"page {page} released more often than held")
            if left == 0:
                if page in keys:
                    self._idle[page] = None
                else:
                    free.append(page)
        if self._owed:
            self._settle()

    def resize(self, total: int) -> None:
        """Serve from ``total`` pages, 1 .. as many as there were at the start."""
        if not 1 <= total <= len(self._count):
            raise ValueError(f"a pool of {len(self._count)} pages cannot serve from {total}")
        self.total = total
        self._owed = len(self._count) - len(self._withdrawn) - total
        self._settle()

    def _settle(self) -> None:
        while self._owed > 0 and self.available:
            page = self._pop()
            self._withdrawn.append(page)
            self._owed -= 1
        while self._owed < 0:
            self._free.append(self._withdrawn.pop())
            self._owed += 1

    def forget(self) -> None:
        """Empty the prefix index: what is cached is wanted no more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._index.clear()
        self._key.clear()

    @property
    def findable(self) -> list[int]:
        """Pages in the prefix index."""
        return list(self._key)

    def _pop(self) -> int:
        """A page out of no one's hands: an empty one, else the oldest cached one, evicted."""
        if self._free:
            return self._free.pop()
        page, _none = self._idle.popitem(last=False)
        del self._index[self._key.pop(page)]
        return page

    def _hold(self, page: int) -> None:
        if self._count[page] == 0:
            del self._idle[page]
        self._count[page] += 1

    def violations(self, held: Sequence[Sequence[int]]) -> list[str]:
        """Broken laws, given the pages of every live request; [] when all hold."""
        wrong = []
        counts = [0] * len(self._count)
        for pages in held:
            for page in pages:
                counts[page] += 1
        if counts != self._count:
            bad = [page for page, count in enumerate(counts) if count != self._count[page]]
            wrong.append(f"reference counts of pages {bad[:8]} differ from what requests hold")
        if self.available + len(self._count) - self._count.count(0) != self.total + self._owed:
            wrong.append("free + cached + used pages are not the whole pool")
        if len({*self._free, *self._idle}) != len(self._free) + len(self._idle):
            wrong.append("a page is free twice")
        if len(self._index) != len(self._key):
            wrong.append("the prefix index and its pages differ")
        return wrong
