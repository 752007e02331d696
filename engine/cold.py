"""A runner whose kernels are not compiled yet: the first step of each shape takes longer.

In virtual time only: the step that compiles waits on the clock that the engine's steps wait on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.runner import Runner
from engine.scheduler import Slice
from engine.simulated import Clock


class ColdRunner:
    """Stands before another runner.  at_ns: when the caches were lost.  compile_s: seconds for each new shape.

    A shape is what CUDA graphs and tiles are chosen by: the powers of two above its decodes and its prompt tokens.
    """

    def __init__(self, inner: Runner, clock: Clock, at_ns: int, compile_s: float) -> None:
        self._inner, self._clock = inner, clock
        self._at_ns, self._compile_ns = at_ns, round(compile_s * 1e9)
        self._seen: set[tuple[int, int]] = set()
        self.name, self.has_logits = inner.name, inner.has_logits
        self.kv_blocks, self.max_context = inner.kv_blocks, inner.max_context

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """The runner's method."""
        decodes = sum(piece.decode for piece in slices)
        prompts = sum(piece.n for piece in slices if not piece.decode)
        shape = (decodes.bit_length(), prompts.bit_length())
        if self._clock() >= self._at_ns and shape not in self._seen:
            self._seen.add(shape)
            self._clock.wait_until(self._clock() + self._compile_ns)
        return self._inner.forward(slices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
