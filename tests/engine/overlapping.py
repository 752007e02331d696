"""Runners that compute while the engine goes on: torch's on a thread of its own, and the simulated one in its time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.config import EngineConfig
from engine.flight import Drawn, Read
from engine.request import Request
from engine.runner_cpu import CpuRunner
from engine.sampling import plain, sample
from engine.scheduler import Slice
from engine.simulated import SimulatedRunner
from engine.step_load import load_of
from models.store import LoadedModel

WAIT_S = 60.0


def on_device(slices: Sequence[Slice]) -> bool:
    """Can every token of the step be drawn without the host?"""
    return not any(one.all_logits for one in slices) and all(
        plain(one.request, one.end) for one in slices if one.sample
    )


def frozen(one: Slice, fed: int | None) -> Slice:
    """The slice with what the device knows when its turn comes: pages as they are now, and the token of the step
    before."""
    request = copy.copy(one.request)
    request.tokens = [*one.request.tokens[: one.end], *([] if fed is None else [fed])]
    request.blocks = list(one.request.blocks)
    return Slice(request, one.start, one.n, one.sample, one.decode)


class Threaded:
    """The torch runner as a device: steps queue up, one thread computes them in order, tokens are fed there.

    before: called by the thread before it computes step k (0 for the first).
    """

    name, has_logits, feeds = "threaded", True, True

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.inner = CpuRunner(model, config)
        self.kv_blocks, self.max_context, self.feeds = self.inner.kv_blocks, self.inner.max_context, config.overlap
        self.launched = self.ahead = self.unread = 0
        self.before: Callable[[int], None] = lambda k: None
        self._thread = ThreadPoolExecutor(1)
        self._drawn: dict[Request, int] = {}  # the thread's: tokens of the last step

    def launch(self, slices: Sequence[Slice]) -> Read | None:
        if not on_device(slices):
            return None
        k, self.launched = self.launched, self.launched + 1
        self.ahead += self.unread
        self.unread += 1
        # what the host may change from here on is taken now; what the step before draws is taken by the thread
        taken = [(one.request, frozen(one, None), not one.request.tokens[one.start : one.end]) for one in slices]
        future: Future[Drawn] = self._thread.submit(self._work, k, taken)

        def read() -> Drawn:
            self.unread -= 1
            return future.result(WAIT_S)

        return read

    def _work(self, k: int, taken: list[tuple[Request, Slice, bool]]) -> Drawn:
        self.before(k)
        for request, one, unknown in taken:
            if unknown:
                one.request.tokens.append(self._drawn[request])
        logits = self.inner.forward([one for _, one, _ in taken])
        sampling = [(request, one.request) for request, one, _ in taken if one.sample]
        tokens, finite = sample(logits, [mine for _, mine in sampling], frozenset()) if sampling else ([], [])
        self._drawn = {request: token for (request, _), token in zip(sampling, tokens, strict=True)}
        return tokens, finite

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        def work() -> torch.Tensor:
            taken = [frozen(one, None if one.request.tokens[one.start : one.end] else self._drawn[one.request])
                     for one in slices]  # fmt: skip
            return self.inner.forward(taken)

        return self._thread.submit(work).result(WAIT_S)


class Simulated(SimulatedRunner):
    """Steps take their modelled time on a device that works them off in order; the host takes ``host_ns`` a launch."""

    feeds = True
    host_ns = 100_000
    _free_ns = 0  # when the device is done with what it has

    def launch(self, slices: Sequence[Slice]) -> Read:
        self._clock.wait_until(self._clock() + self.host_ns)
        self._free_ns = max(self._free_ns, self._clock()) + self.times.next_ns(load_of(slices))
        ready = self._free_ns
        sampling = []
        for one in slices:
            if one.sample:
                sampling.append(frozen(one, None).request)
                sampling[-1].tokens += [0] * (one.end - len(sampling[-1].tokens))
        tokens: list[int] = self.draw(sampling).tolist() if sampling else []

        def read() -> Drawn:
            self._clock.wait_until(ready)
            return tokens, [True] * len(tokens)

        return read
