"""n-gram speculation: guess the next tokens of a greedy request from its own text, and check the guesses in one step.

A request's last ``_NGRAM`` tokens are looked up in what it has so far; the tokens that followed the latest earlier
occurrence are the drafts (prompt lookup, Saxena 2023).  Each draft is one more row of the step, a decode of its own
over the same pages: its row attends to the drafts before it, whose K and V the same step writes.  The rows of the
drafts are kept; when the engine asks for the next token and it is the draft, the row is there already and that
request costs nothing in that step.  So a draft can only save time: the logits are those of a decode, bit for bit
(``paged_decode`` is invariant), and the sampled tokens with them.

What must hold: a kept row is used only for the very token at the very position that it was computed with, while the
page its K and V went to is the request's and nothing was preempted in between; drafts never leave the pages that the
request holds, so the scheduler need not know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from engine.device_batch import Piece
from engine.request import GREEDY_BELOW, Request
from engine.scheduler import Slice

_NGRAM = 3
_WINDOW = 4096  # tokens looked through, so that a long context does not cost the host milliseconds a step


@dataclass(slots=True)
class _Ahead:
    """Rows of the tokens ``tokens`` at ``position`` ..; rows: [len(tokens), vocabulary]."""

    position: int
    tokens: list[int]
    rows: torch.Tensor
    blocks: list[int]


class Lookahead:
    """``most`` drafts a request and step.  drafted, accepted: counters since the start, in tokens."""

    def __init__(self, most: int, page: int) -> None:
        self.most, self.page = most, page
        self.drafted = self.accepted = 0
        self._ahead: WeakKeyDictionary[Request, _Ahead] = WeakKeyDictionary()

    def known(self, piece: Slice) -> torch.Tensor | None:
        """The row of this slice, [1, vocabulary], if an earlier step computed it."""
        request = piece.request
        ahead = self._ahead.get(request)
        if ahead is None:
            return None
        at = piece.start - ahead.position
        good = (
            piece.decode
            and not piece.all_logits
            and request.lost == 0
            and 0 <= at < len(ahead.tokens)
            and request.tokens[ahead.position : piece.start + 1] == ahead.tokens[: at + 1]
            and request.blocks[: len(ahead.blocks)] == ahead.blocks
        )
        if not good:
            del self._ahead[request]
            return None
        self.accepted += 1
        request.clock.facts.drafts_accepted += 1
        return ahead.rows[at : at + 1]

    def drafts(self, piece: Slice) -> list[int]:
        """Tokens that may follow the slice, [] where none are guessed."""
        request = piece.request
        if not piece.decode or piece.all_logits or request.params.temperature >= GREEDY_BELOW:
            return []
        room = len(request.blocks) * self.page - (piece.start + 1)
        wanted = min(self.most, room, request.params.max_tokens - request.generated - 1)
        return continuation(request.tokens, wanted) if wanted > 0 else []

    def pieces(self, piece: Slice, drafts: Sequence[int]) -> list[Piece]:
        """A decode row for each draft, behind the slice's own."""
        self.drafted += len(drafts)
        start = piece.start + 1
        return [Piece([token], start + i, piece.request.blocks, (0,), True) for i, token in enumerate(drafts)]

    def keep(self, piece: Slice, drafts: list[int], rows: torch.Tensor) -> None:
        """The drafts' rows, for the steps to come."""
        self._ahead[piece.request] = _Ahead(piece.start + 1, drafts, rows, list(piece.request.blocks))


def continuation(tokens: Sequence[int], most: int) -> list[int]:
    """What followed the latest earlier occurrence of the last tokens; [] if they are new."""
    if len(tokens) <= _NGRAM:
        return []
    tail = list(tokens[-_NGRAM:])
    for at in range(len(tokens) - _NGRAM - 1, max(0, len(tokens) - _WINDOW) - 1, -1):
        if tokens[at] == tail[0] and list(tokens[at : at + _NGRAM]) == tail:
            return list(tokens[at + _NGRAM : at + _NGRAM + most])
    return []
