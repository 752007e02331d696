"""What the model thought of a token: its log-probability, its rank and the likeliest others, where a request asks.

They are read from the logits as the model gave them, before temperature, penalties, biases and masks.  Every row is
computed by itself, so that its bits do not depend on the batch or on how a prompt was cut into chunks.  Rows that did
not ask cost nothing.  A token's entry is released with its text: no entry tells of text that was withheld.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from engine.request import Request
    from engine.scheduler import Slice


class TokenLogprob(NamedTuple):
    """rank: 1 for the likeliest.  top: (token, logprob), likeliest first.  start: offset in the answer (characters)."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    start: int = 0


def describe(row: torch.Tensor, token: int, n: int) -> TokenLogprob:
    """The entry of ``token`` and the ``n`` likeliest.  row: logits [vocabulary], finite."""
    import torch  # the server imports this module before it may wait for torch

    total = float(torch.logsumexp(row.double(), 0))
    best = torch.topk(row, min(n, len(row))) if n else None
    top = (
        ()
        if best is None
        else tuple(zip(best.indices.tolist(), [v - total for v in best.values.tolist()], strict=True))
    )
    value = float(row[token])
    return TokenLogprob(token, value - total, int((row > value).sum()) + 1, top)


def sampled_rows(logits: torch.Tensor, slices: Sequence[Slice]) -> torch.Tensor:
    """The rows that sample.  Rows that were computed for prompt logprobs alone are noted on their requests.

    logits: [sum of slice.rows, vocabulary].  The answer of a request with a prompt row that is not finite is not
    trusted either: its row becomes NaN.
    """
    if not any(piece.all_logits for piece in slices):
        return logits
    keep: list[int] = []
    unsound: list[int] = []
    at = 0
    for piece in slices:
        end, noting = at + piece.rows, piece.all_logits  # before the noting ends it
        if noting:
            _note_prompt(piece.request, piece.start, logits[at:end])
        if piece.sample:
            if noting and not all(math.isfinite(entry.logprob) for entry in piece.request.prompt_logprobs):
                unsound.append(len(keep))
            keep.append(end - 1)
        at = end
    chosen = logits[keep]
    chosen[unsound] = float("nan")
    return chosen


def _note_prompt(request: Request, start: int, rows: torch.Tensor) -> None:
    """Row i of a chunk that begins at ``start`` speaks of the token at start + i + 1; noted once, in order."""
    n, prompt, noted = request.params.prompt_logprobs or 0, request.prompt_ids, request.prompt_logprobs
    for i in range(len(noted) - start, min(len(rows), len(prompt) - 1 - start)):
        noted.append(describe(rows[i], prompt[start + i + 1], n))


class LogprobStream:
    """Entries of one answer, held back as long as the text of their token is."""

    __slots__ = ("_decoded", "_pending", "_sent")

    def __init__(self) -> None:
        self._pending: deque[tuple[int, TokenLogprob]] = deque()
        self._decoded = 0  # characters that the tokens so far made, sent or not
        self._sent = 0

    def note(self, entry: TokenLogprob | None, text: str, decoded: int) -> tuple[TokenLogprob, ...]:
        """One more token (None: one that is no part of the answer), the text sent with it, and characters made so far.

        Returns the entries of all tokens that lie wholly in the text that was sent.
        """
        if entry is not None:
            self._pending.append((decoded, entry._replace(start=self._decoded)))
        self._decoded = decoded
        self._sent += len(text)
        released = []
        while self._pending and self._pending[0][0] <= self._sent:
            released.append(self._pending.popleft()[1])
        return tuple(released)
