"""The one door through which kernels are started: run, recorded for compilation ahead of time, or timed.

``launch`` runs a kernel; inside ``recording`` it only notes what would run (tensors may be on the meta device);
inside ``profiling`` it times each kernel.  The first start of each configuration is timed always, since it compiles:
``compile_seconds`` is what warm-up took, by kernel.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
import triton.language as tl

#: Kernels run on CPU tensors, slowly and serially, in Triton's interpreter.  Read by triton when it is imported.
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"

Argument = torch.Tensor | int | float


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a kernel: arguments in the order of its parameters, then its constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


@dataclass(slots=True)
class Profile:
    """Seconds by kernel, in order of first start.  On a GPU read from events, once the device is done."""

    seconds: dict[str, float] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Do the work and count its time under a name."""
        self.starts[name] = self.starts.get(name, 0) + 1
        if torch.cuda.is_available():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            done = work()
            end.record()
            self._events.append((name, begin, end))
            return done
        start = time.perf_counter()
        done = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return done

    def settle(self) -> Profile:
        """Wait for the device and add up what its events say."""
        if self._events:
            torch.cuda.synchronize()
            for name, begin, end in self._events:
                self.seconds[name] = self.seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
            self._events.clear()
        return self


compile_seconds: dict[str, float] = defaultdict(float)
_started: set[tuple[object, ...]] = set()
_recorded: list[Launch] | None = None
_architecture: int | None = None  # that launches are recorded for
_profile: Profile | None = None


@contextmanager
def recording(architecture: int) -> Iterator[list[Launch]]:
    """Nothing runs inside; what would have run on sm_``architecture`` is in the list."""
    global _recorded, _architecture
    before = _recorded, _architecture
    _recorded, _architecture = [], architecture
    try:
        yield _recorded
    finally:
        _recorded, _architecture = before


@cache
def _here() -> int:
    if not torch.cuda.is_available():
        return 90  # the interpreter takes the tiles of the GPU that matters most
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def architecture() -> int:
    """80 for sm_80 and so on: what tilings are chosen for."""
    return _here() if _architecture is None else _architecture


@contextmanager
def profiling(profile: Profile) -> Iterator[None]:
    """Time every kernel, and what ``timed`` is given, inside."""
    global _profile
    before, _profile = _profile, profile
    try:
        yield
    finally:
        _profile = before


def timed(name: str, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Work that is no kernel of ours (a product by the vendor's library), under a name of the profile."""
    result: torch.Tensor = work() if _profile is None else _profile.time(name, work)
    return result


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Argument, warps: int, stages: int = 2, **constants: Any
) -> None:
    """Start ``kernel`` on ``grid``.  An empty grid starts nothing."""
    if 0 in grid:
        return
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, arguments, constants, warps, stages))
        return

    def start() -> None:
        # the default of fp fusion flips between versions of triton, and the last bits with it: always said
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True)

    name = kernel.fn.__name__.strip("_")
    kinds = tuple(one.dtype if isinstance(one, torch.Tensor) else type(one) for one in arguments)
    key = (name, kinds, tuple(constants.items()), warps, stages)
    if key not in _started:
        begin = time.perf_counter()
        start()
        compile_seconds[name] += time.perf_counter() - begin
        _started.add(key)
    elif _profile is not None:
        _profile.time(name, start)
    else:
        start()


def product_type(dtype: torch.dtype) -> Any:
    """What operands of tl.dot are cast to: the stored type, but fp32 in the interpreter, whose bf16 is wrong."""
    if INTERPRETED:
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
