"""Tokens drawn where the logits lie, and brought to the host behind the step that makes them.

A row whose token follows from logits, temperature and seed alone (``engine.sampling.plain``) is drawn by the kernel,
with the very token that ``engine.sampling`` draws; the others are sampled there, from their rows on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.flight import Drawn
from engine.kernels.sample import sample_rows
from engine.request import GREEDY_BELOW, Request
from engine.sampling import plain, sample

_MASK = 0xFFFFFFFFFFFFFFFF


def draw(logits: torch.Tensor, rows: Sequence[tuple[Request, int]]) -> torch.Tensor:
    """Token and whether the logits were finite, [2, rows] int64 on the device; waits for nothing.

    logits: [rows, vocabulary].  rows: each one's request, and the tokens before the one that is drawn.
    """
    heat = [one.params.temperature if one.params.temperature >= GREEDY_BELOW else 0.0 for one, _ in rows]
    whole = np.array([[one.seed & _MASK for one, _ in rows], [before for _, before in rows]], np.uint64).view(np.int64)
    numbers, hot = torch.from_numpy(whole), torch.tensor(heat)
    if logits.device.type == "cuda":
        numbers, hot = numbers.pin_memory(), hot.pin_memory()
    numbers, hot = (one.to(logits.device, non_blocking=True) for one in (numbers, hot))
    token, finite = sample_rows(logits, hot, numbers[0], numbers[1])
    return torch.stack((token, finite.long()))


def draw_and_read(logits: torch.Tensor, requests: Sequence[Request], eos: frozenset[int]) -> Drawn:
    """As ``engine.sampling.sample``, with the same tokens; rows that are not plain go there."""
    special = [row for row, request in enumerate(requests) if not plain(request, len(request.tokens))]
    tokens, sound = draw(logits, [(one, len(one.tokens)) for one in requests]).tolist()  # waits for the device
    finite = [bool(one) for one in sound]
    if special:
        chosen, good = sample(logits[special].cpu(), [requests[row] for row in special], eos)
        for row, one, ok in zip(special, chosen, good, strict=True):
            tokens[row], finite[row] = one, ok
    return tokens, finite


class Reader:
    """Brings ``draw``'s numbers to the host behind the step that makes them."""

    def __init__(self, drawn: torch.Tensor) -> None:
        gpu = drawn.device.type == "cuda"
        self._host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=gpu)
        self._host.copy_(drawn, non_blocking=True)
        self._done = torch.cuda.Event() if gpu else None  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done.record()

    def read(self) -> Drawn:
        """Wait for the step: its one synchronisation."""
        if self._done is not None:
            self._done.synchronize()
        tokens, sound = self._host.tolist()
        return tokens, [bool(one) for one in sound]
