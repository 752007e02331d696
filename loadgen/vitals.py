"""The sender's own health: how late its event loop is, what it costs in CPU and memory, how long collections pause it.

Owns the figures a run judges itself by.  Must always hold: a freeze counts for all the beats it swallowed, not for
one, so that the loop-lag percentiles are those of time, not of luck.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from typing import Any, Final

from loadgen.quantiles import Quantiles

BEAT_NS: Final = 20_000_000
_IDLE_COLLECT_NS: Final = 1_000_000_000  # collect this often where nothing is due soon,
_FORCED_COLLECT_NS: Final = 60_000_000_000  # and this often in any case
_FEW_LIVE: Final = 200
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4  # <sys/mman.h>; the last: not the untouched part of a mapping


class Vitals:
    """Beat it every BEAT_NS (`next_beat_ns`); ask it for figures."""

    def __init__(self) -> None:
        self.lag = Quantiles()  # start of work - intended, seconds
        self.loop_lag = Quantiles()
        self.next_beat_ns = 0
        self._began_ns = 0
        self._began_cpu = 0.0
        self._began_usage = resource.getrusage(resource.RUSAGE_SELF)
        self._last_ns = 0
        self._last_cpu = 0.0
        self._ratio = 0.0
        self._collected_ns = 0
        self._pause_began = 0
        self._pauses = 0
        self._pause_total_ns = 0
        self._pause_max_ns = 0

    def begin(self) -> None:
        """From now on collections are ours to time: everything alive is set aside and the automatic ones stop."""
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self._on_collection)
        now = time.monotonic_ns()
        self._began_ns = self._last_ns = self._collected_ns = now
        self._began_cpu = self._last_cpu = time.process_time()
        self._began_usage = resource.getrusage(resource.RUSAGE_SELF)
        self.next_beat_ns = now + BEAT_NS

    def finish(self) -> None:
        """Give the collector back."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
            gc.enable()
            gc.unfreeze()

    def beat(self, now_ns: int) -> None:
        """Count every beat that came due, each with its own lateness."""
        while self.next_beat_ns <= now_ns:
            self.loop_lag.add((now_ns - self.next_beat_ns) / 1e9)
            self.next_beat_ns += BEAT_NS

    def collect_if_wanted(self, now_ns: int, room_ns: int, live: int) -> None:
        """Collect cycles (failed connections leave some) if nothing is due for `room_ns` and few requests are live.

        A collection walks everything made since the start: some 20 us for each live request.
        """
        age = now_ns - self._collected_ns
        if age > _FORCED_COLLECT_NS or (age > _IDLE_COLLECT_NS and room_ns > 10_000_000 and live < _FEW_LIVE):
            self._collected_ns = now_ns
            gc.collect()

    def cpu_ratio_since_last(self, now_ns: int) -> float:
        """CPU seconds per second of this process since the last call of this function (at least some 200 ms)."""
        elapsed_ns = now_ns - self._last_ns
        if elapsed_ns >= 200_000_000:
            cpu = time.process_time()
            self._ratio = (cpu - self._last_cpu) * 1e9 / elapsed_ns
            self._last_ns, self._last_cpu = now_ns, cpu
        return self._ratio

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run (seconds, bytes)."""
        elapsed = (time.monotonic_ns() - self._began_ns) / 1e9 if self._began_ns else 0.0
        cpu = time.process_time() - self._began_cpu
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "lag_p50_s": self.lag.quantile(0.5),
            "lag_p99_s": self.lag.quantile(0.99),
            "lag_max_s": self.lag.maximum if self.lag.count else None,
            "loop_lag_p99_s": self.loop_lag.quantile(0.99),
            "loop_lag_max_s": self.loop_lag.maximum if self.loop_lag.count else None,
            "cpu_ratio": cpu / elapsed if elapsed > 0 else 0.0,
            "cpu_s": cpu if elapsed > 0 else 0.0,
            "rss_bytes": resident_bytes(),
            # what a late send may come from: a page read back from the disk, another process on this processor
            "major_faults": usage.ru_majflt - self._began_usage.ru_majflt,
            "preempted": usage.ru_nivcsw - self._began_usage.ru_nivcsw,
            "gc": {
                "collections": self._pauses,
                "pause_total_s": self._pause_total_ns / 1e9,
                "pause_max_s": self._pause_max_ns / 1e9,
            },
        }

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._pause_began = time.monotonic_ns()
        else:
            pause = time.monotonic_ns() - self._pause_began
            self._pauses += 1
            self._pause_total_ns += pause
            self._pause_max_ns = max(self._pause_max_ns, pause)


def resident_bytes() -> int:
    """Resident memory now (Linux), elsewhere at its highest."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read once a run, not a path of ours
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def lock_memory() -> bool:
    """Keep the pages of this process in memory from now on; False where that is not allowed (Linux: ulimit -l).

    A page of code that the kernel dropped while it was idle is read from the disk again: tens of milliseconds.
    """
    try:
        return bool(ctypes.CDLL(None).mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) == 0)
    except (OSError, AttributeError):  # no such call on this system
        return False


def raise_file_limit() -> int:
    """Lift the soft limit on open files to the hard one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # a hard limit of "unlimited" is not always grantable
            return soft
    return soft
