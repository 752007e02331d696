"""Time by kernel of some steps, each joined to its step in the log.

A ``Profiler`` stands before the runner for so many steps and then leaves.  Under it steps run without CUDA graphs,
whose kernels cannot be told apart: a profiled step is slower by its launches, which is said in the answer.  A runner
without kernels of ours is timed as one, ``forward``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.scheduler import Slice

if TYPE_CHECKING:
    import torch

    from engine.core import Engine
    from engine.runner import Runner


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of one kernel in one step, over all its starts."""

    kernel: str
    seconds: float
    starts: int


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """step: its number in the step log.  seconds: of the forward on the host, from its start to the device's end."""

    step: int
    seconds: float
    kernels: tuple[KernelTime, ...]


class Profiler:
    """In the runner's place for ``steps`` steps; ``done`` then has them.  Made and used on the engine thread."""

    launch = None  # a step is timed alone, not beside another

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine, self._inner, self._left = engine, engine.runner, steps
        self._steps: list[ProfiledStep] = []
        self.done: Future[list[ProfiledStep]] = Future()
        self.name, self.has_logits = self._inner.name, self._inner.has_logits
        self.kv_blocks, self.max_context = self._inner.kv_blocks, self._inner.max_context
        engine.runner = self

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """The runner's method, timed."""
        if self._left <= 0:  # it has its steps, but something else stands before it
            return self._inner.forward(slices)
        before = getattr(self._inner, "use_graphs", None)
        if before is not None:
            self._inner.use_graphs = False  # type: ignore[attr-defined]
        start = time.perf_counter()
        try:
            logits, kernels = _timed(self._inner, slices)
        finally:
            if before is not None:
                self._inner.use_graphs = before  # type: ignore[attr-defined]
        number = self._engine.counts.steps
        self._steps.append(ProfiledStep(number, time.perf_counter() - start, kernels))
        self._left -= 1
        if self._left <= 0:
            self.leave()
        return logits

    def leave(self) -> None:
        """Give the runner its place back, with what there is."""
        if self._engine.runner is self:
            self._engine.runner = self._inner
        if not self.done.done():
            self.done.set_result(self._steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _timed(runner: Runner, slices: Sequence[Slice]) -> tuple[torch.Tensor, tuple[KernelTime, ...]]:
    if runner.name != "triton":
        start = time.perf_counter()
        logits = runner.forward(slices)
        return logits, (KernelTime("forward", time.perf_counter() - start, 1),)
    from engine.kernels.launch import Profile, profiling

    profile = Profile()
    with profiling(profile):
        logits = runner.forward(slices)
    profile.settle()
    times = (KernelTime(name, seconds, profile.starts[name]) for name, seconds in profile.seconds.items())
    return logits, tuple(sorted(times, key=lambda one: -one.seconds))
