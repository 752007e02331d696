"""Wake the event loop at a moment of CLOCK_MONOTONIC, to some ten microseconds, asleep until then.

Owns the precision of the send times.  Event loops round their timers to milliseconds (libuv both its clock and its
waits), which by itself would cost a lag p99 of about 1 ms.  On Linux a timerfd carries the absolute moment to the
kernel's high-resolution timers.  Elsewhere the loop's own timer wakes 1.5 ms early and the rest is polled.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

_POLL_NS: Final = 1_500_000
_CLOCK_MONOTONIC: Final = 1
_TFD_NONBLOCK: Final = os.O_NONBLOCK
_TFD_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME: Final = 1


class Alarm(Protocol):
    """Calls back once at or after the moment set last; never before it.  waiting: it will."""

    @property
    def waiting(self) -> bool: ...

    def set(self, monotonic_ns: int) -> None:
        """Replace the moment; one in the past rings in the next turn of the loop."""

    def clear(self) -> None:
        """Forget the moment."""

    def close(self) -> None: ...


def alarm(callback: Callable[[], None]) -> Alarm:
    """The best alarm of this platform, on the running loop."""
    if sys.platform == "linux":
        return _TimerFd(callback)
    return _LoopTimer(callback)


class _TimerFd:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._settime = ctypes.CDLL(None, use_errno=True).timerfd_settime
        self._fd = ctypes.CDLL(None, use_errno=True).timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = (ctypes.c_long * 4)()  # struct itimerspec: interval and value, each seconds and nanoseconds
        self._ref = ctypes.byref(self._spec)
        self._at = 0  # 0: not set
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)

    @property
    def waiting(self) -> bool:
        return self._at != 0

    def set(self, monotonic_ns: int) -> None:
        self._at = at = max(1, monotonic_ns)  # 0 would disarm it
        spec = self._spec
        spec[2], spec[3] = divmod(at, 1_000_000_000)
        if self._settime(self._fd, _TFD_TIMER_ABSTIME, self._ref, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        self._at = 0
        self._spec[2] = self._spec[3] = 0
        self._settime(self._fd, 0, self._ref, None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        at = self._at
        if not at or time.monotonic_ns() < at:
            return  # set anew between the expiry and this moment, which took the expiry back
        self._at = 0
        self._callback()
        if not self._at and self._fd >= 0:
            with suppress(BlockingIOError):
                os.read(self._fd, 8)  # setting it anew would have done the same


class _LoopTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        self._at = 0

    @property
    def waiting(self) -> bool:
        return self._handle is not None

    def set(self, monotonic_ns: int) -> None:
        self.clear()
        self._at = monotonic_ns
        self._arm()

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        self.clear()

    def _arm(self) -> None:
        left = self._at - time.monotonic_ns()
        if left > _POLL_NS:
            self._handle = self._loop.call_later((left - _POLL_NS) / 1e9, self._arm)
        elif left > 0:
            self._handle = self._loop.call_soon(self._arm)
        else:
            self._handle = self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._handle = None
        self._callback()
