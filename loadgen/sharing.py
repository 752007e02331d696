"""Prompts that begin alike exactly where the trace says so: block for block by its prefix ids, or turn by turn.

    tokens   0 .. P          P .. edge 1     edge 1 .. edge 2      ..   T - S .. T
             template        text of         text of                    template
                             ids[:g]         ids[g:2g]

The text of a block depends on its ids, the copy of the request and the salt alone, so two prompts share the tokens up
to an edge if and only if they share the ids up to it.  Edges lie at multiples of the block size times the length scale.
Where a scaled block is too short to tell its ids apart (it begins with salt words), g of them make one.
Without ids, the turns of a session share all whole blocks of SESSION_BLOCK tokens: a conversation that grows.
Must always hold: the whole prompt has exactly the asked number of tokens.
"""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from typing import Final

from loadgen.prompts import MIN_BODY, Prompt, PromptMaker
from loadgen.schedule import Schedule
from loadgen.traces.trace import NO_SESSION

SESSION_BLOCK: Final = 64
CACHED_TEXTS: Final = 4096


class SharedPrompts:
    """Prompts of requests whose schedule has prefix ids or sessions.  Not thread-safe."""

    def __init__(self, maker: PromptMaker, schedule: Schedule) -> None:
        self._maker = maker
        self._schedule = schedule
        self._by_ids = schedule.prefixes is not None and schedule.prefixes.block_size > 0
        block = schedule.prefixes.block_size * schedule.length_scale if self._by_ids and schedule.prefixes else 0.0
        self._block = block if self._by_ids else float(SESSION_BLOCK)
        self._before, self._after = maker.before, maker.around - maker.before
        least = self._before + maker.salt_tokens + MIN_BODY
        self.group = max(1, math.ceil(least / self._block))  # blocks that are told apart together
        self._texts: dict[tuple[int, int], str] = {}

    def make(self, index: int, tokens: int) -> Prompt | None:
        """The prompt of one request; None where the trace says nothing of what it shares."""
        keys = self._keys(index, tokens)
        if not keys:
            return None
        room = tokens - self._after
        edges = [self._before]
        for n in range(1, len(keys)):
            edge = math.floor(self._block * self.group * n + 0.5)
            if edge >= room:
                break
            edges.append(edge)
        lengths = [end - start for start, end in pairwise(edges)]
        texts = [self._text(keys[n], length, first=n == 0) for n, length in enumerate(lengths)]
        last = self._written(keys[len(texts)], room - edges[-1], first=not texts)
        return Prompt(self._exact(texts, sum(lengths[1:]), last, tokens), tokens)

    def _keys(self, index: int, tokens: int) -> list[int]:
        """One number for each group of blocks of a request."""
        schedule = self._schedule
        copy = int(schedule.copy[index])
        if self._by_ids:
            assert schedule.prefixes is not None
            ids = schedule.prefixes.of(int(schedule.source[index]))
            groups = [ids[at : at + self.group] for at in range(0, len(ids), self.group)]
            return [_number(group.tobytes(), copy) for group in groups]
        session = NO_SESSION if schedule.session is None else int(schedule.session[index])
        if session == NO_SESSION:
            return []
        count = math.ceil(tokens / (self._block * self.group))
        return [_number(b"%d:%d" % (session, place), copy) for place in range(count)]

    def _text(self, key: int, tokens: int, *, first: bool) -> str:
        """A whole block, from the cache."""
        found = self._texts.get((key, tokens))
        if found is None:
            count = self._count_first if first else self._maker.count
            found = self._maker.exact(self._written(key, tokens, first=first), tokens, count)
            if len(self._texts) >= CACHED_TEXTS:
                del self._texts[next(iter(self._texts))]
            self._texts[key, tokens] = found
        return found

    def _count_first(self, text: str) -> int:
        return self._maker.count_text(text) - self._maker.around

    def _written(self, key: int, tokens: int, *, first: bool) -> str:
        """Salt words of the key, then sentences that it chooses."""
        maker = self._maker
        if tokens < maker.salt_tokens:
            return maker.fill(tokens, key)
        return ("" if first else " ") + maker.salt_words(key) + maker.fill(tokens - maker.salt_tokens, key >> 16)

    def _exact(self, texts: list[str], middle_tokens: int, last: str, tokens: int) -> str:
        """All blocks and the last one, which is brought to the exact count of the whole.

        Where the tokenizer is additive over words, the blocks in the middle are known by their own counts.
        """
        maker = self._maker
        if maker.additive and len(texts) > 1:
            head, middle = texts[0], "".join(texts[1:])
            end = maker.exact(last, tokens, lambda end: maker.count_text(head + end) + middle_tokens)
            return head + middle + end
        lead = "".join(texts)
        return lead + maker.exact(last, tokens, lambda end: maker.count_text(lead + end))


def _number(content: bytes, copy: int) -> int:
    return int.from_bytes(hashlib.blake2b(content + b"/%d" % copy, digest_size=12).digest(), "big")
