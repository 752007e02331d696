"""Times on the device, and the ceilings that they are held against; on a CPU (dry runs) the wall clock.

Each figure is the median of ``repeats`` rounds with the range beside it.  Between two runs the L2 cache is filled with
something else, so that weights and KV come from memory as they do in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU of today


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one run: median, least and most of the rounds."""

    median: float
    least: float
    most: float


class Clock:
    """rounds of ``inner`` runs each, all after one that is not counted."""

    def __init__(self, device: torch.device, *, repeats: int = 5, inner: int = 5) -> None:
        self.device, self.repeats, self.inner = device, repeats, inner
        self._gpu = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if self._gpu else None

    def time(self, work: Callable[[], object], *, flush: bool = True) -> Timed:
        """Seconds that ``work`` takes on the device."""
        work()
        rounds = [self._round(work, flush=flush) for _ in range(self.repeats)]
        return Timed(statistics.median(rounds), min(rounds), max(rounds))

    def _round(self, work: Callable[[], object], *, flush: bool) -> float:
        if not self._gpu:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        events = []
        for _ in range(self.inner):
            if flush and self._flush is not None:
                self._flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in events) / 1e3 / self.inner


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bytes/s of a copy from device memory to device memory (both directions counted), FLOP/s of a large product."""

    bandwidth: float
    flops: float


def ceilings(clock: Clock, *, dry: bool) -> Ceilings:
    """Measured here."""
    size, edge = (1 << 16, 64) if dry else (1 << 30, 8192)
    source = torch.empty(size, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    copied = clock.time(lambda: target.copy_(source), flush=False)
    dtype = torch.float32 if dry else torch.bfloat16
    a, b = (torch.randn(edge, edge, device=clock.device).to(dtype) for _ in range(2))
    multiplied = clock.time(lambda: a @ b, flush=False)
    return Ceilings(2 * size / copied.median, 2 * edge**3 / multiplied.median)
