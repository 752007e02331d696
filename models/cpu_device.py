"""This machine's CPU as a device of the cost account: what it reads and computes at most, measured in half a second.

Bandwidth: all cores stream an array far larger than the caches.  FLOP/s: the best of a few large fp32 products, and
of bf16 products where the CPU has instructions for them.  Fixed cost: the fastest call of a product of one number.
What must hold: every figure is the best of several tries, since a lower bound needs ceilings.  A measurement is kept
in the cache with its time, CPU model and the load it met.  A busy machine can only make it too low: what was measured
then is measured again at the next use, and the better figures are kept.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from models.cache import cache_dir, made
from models.devices import CPU, Device
from models.errors import UserError

BUDGET_S: Final = 0.5  # for all of it, import of numpy apart
_STREAM_BYTES: Final = (
    128 << 20
)  # beyond the caches of a desktop; where it is not, weights of that size stay in them too
_PRODUCT: Final = 1024  # rows and columns: 2.1 GFLOP, large enough for the peak of a few cores
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """flops: FLOP/s, the better of fp32 and bf16.  load: the machine's load of the minute before."""

    version: int
    cpu: str
    cores: int
    bandwidth: float
    flops: float
    flops_dtype: str
    fixed_ns: int
    memory: float
    load: float
    unix_s: float

    @property
    def busy(self) -> bool:
        """Did others want the cores meanwhile, so that the figures may be too low?"""
        return self.load > 0.5 * (os.cpu_count() or 1)  # in a container, the load is still that of the whole host

    def best_with(self, other: Measurement) -> Measurement:
        """The better figures of two measurements of the same CPU, under the time and load of this one."""
        flops, dtype = max((self.flops, self.flops_dtype), (other.flops, other.flops_dtype))
        return replace(
            self,
            bandwidth=max(self.bandwidth, other.bandwidth),
            flops=flops,
            flops_dtype=dtype,
            fixed_ns=min(self.fixed_ns, other.fixed_ns),
        )

    def device(self) -> Device:
        """The measurement as a device."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.unix_s))
        busy = f", while busy (load {self.load:.1f})" if self.busy else ""
        return Device(
            CPU,
            f"{self.cores} cores of {self.cpu}",
            self.flops,
            self.bandwidth,
            self.memory,
            self.fixed_ns,
            f"measured {when} in {self.flops_dtype}{busy}",
        )


def this_cpu(*, remeasure: bool = False) -> Device:
    """This CPU, from the cache or measured now; remeasure: whatever is known of it is forgotten.

    A cache that cannot be written costs only the next measurement.
    """
    cpu, cores = cpu_model(), usable_cores()
    path = _note(cpu, cores)
    known = None if remeasure else _read(path, cpu, cores)
    if known is not None and not known.busy:
        return known.device()
    found = measure(cpu, cores)
    if known is not None:
        found = found.best_with(known)
    _write(path, found)
    return found.device()


def measure(cpu: str, cores: int) -> Measurement:
    """Measure now; about half a second."""
    start = time.perf_counter()
    load = os.getloadavg()[0]
    bandwidth = _bandwidth(cores, start + 0.5 * BUDGET_S)
    flops, dtype = _flops(start + BUDGET_S)
    return Measurement(
        _VERSION, cpu, cores, bandwidth, flops, dtype, _fixed_ns(), _memory(), round(load, 2), time.time()
    )


def cpu_model() -> str:
    """The model name that the kernel gives, else the architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else os.uname().machine


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bandwidth(cores: int, deadline: float) -> float:
    import numpy as np

    array = np.ones(_STREAM_BYTES // 4, np.int32)  # ones, not zeros: untouched zero pages would all be one page
    parts = np.array_split(array, cores)
    with ThreadPoolExecutor(cores) as pool:  # a reduction runs without the interpreter's lock

        def stream() -> None:
            list(pool.map(np.max, parts))

        return array.nbytes / _best_s(stream, deadline)


def _flops(deadline: float) -> tuple[float, str]:
    import numpy as np

    with_bf16 = _has_bf16()
    left, right = (np.full((_PRODUCT, _PRODUCT), 0.5, np.float32) for _ in range(2))
    out = np.empty_like(left)
    work = 2.0 * _PRODUCT**3
    half = (deadline - time.perf_counter()) / (2 if with_bf16 else 1)
    fp32 = work / _best_s(lambda: np.matmul(left, right, out=out), time.perf_counter() + half)
    if not with_bf16:
        return fp32, "fp32"
    import torch  # the only product in bf16 at hand; imported where such a CPU is there

    a, b = torch.from_numpy(left).bfloat16(), torch.from_numpy(right).bfloat16()
    bf16 = work / _best_s(lambda: torch.matmul(a, b), time.perf_counter() + half)
    return (bf16, "bf16") if bf16 > fp32 else (fp32, "fp32")


def _has_bf16() -> bool:
    """Products of bf16 in hardware (AVX-512 BF16, AMX or Arm's BF16)?"""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", text) is not None


def _fixed_ns() -> int:
    import numpy as np

    one = np.ones((1, 1), np.float32)
    best = math.inf
    for _ in range(200):
        start = time.perf_counter_ns()
        np.matmul(one, one)
        best = min(best, time.perf_counter_ns() - start)
    return int(best)


def _best_s(run: Callable[[], object], deadline: float) -> float:
    """Seconds of the fastest of at least three runs, and of as many as the deadline allows."""
    best, runs = math.inf, 0
    while runs < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _note(cpu: str, cores: int) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-")[:60]
    return cache_dir() / "devices" / f"{slug}-{cores}.json"


def _read(path: Path, cpu: str, cores: int) -> Measurement | None:
    """A measurement of this very CPU that makes sense, else None: then it is made anew."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = Measurement(**facts)
        figures = (found.bandwidth, found.flops, found.memory, found.unix_s)
        sound = all(math.isfinite(value) and value > 0 for value in figures) and found.fixed_ns >= 0
    except (OSError, ValueError, TypeError):
        return None
    return found if sound and (found.version, found.cpu, found.cores) == (_VERSION, cpu, cores) else None


def _write(path: Path, found: Measurement) -> None:
    try:
        made(path.parent)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except (OSError, UserError):
        return  # a read-only cache: measured again next time
