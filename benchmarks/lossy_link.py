"""Two network namespaces on one machine, joined by a link that delays and loses packets (Linux, as root).

Owns the namespaces and the link: a TUN device in each, and a thread that carries every IP packet from one to the other
after a delay, or drops it.  So TCP meets real loss, whether or not the kernel has netem.  Must always hold: packets of
one direction keep their order; all of it is gone when the block ends.  Nothing else on the machine is touched.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from types import TracebackType
from typing import Final

from models.errors import UserError

NEAR_HOST: Final = "10.77.0.1"  # addresses that exist in the two namespaces alone
FAR_HOST: Final = "10.77.0.2"
_DEVICE: Final = "lossy0"
_CLONE_NEWNET: Final = 0x40000000  # <sched.h>
_TUNSETIFF: Final = 0x400454CA  # <linux/if_tun.h>
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000
_MTU: Final = 1500


class LossyLink:
    """delay_s, jitter_s: one way, the jitter evenly drawn on top.  loss: share of packets dropped, 0..1.

    outage: (start, length) in seconds after the first packet during which every packet is lost, or None.
    carried, lost: packets so far.
    """

    def __init__(
        self,
        *,
        delay_s: float,
        jitter_s: float,
        loss: float,
        outage: tuple[float, float] | None = None,
        seed: int = 0,
    ) -> None:
        self._delay_s, self._jitter_s, self._loss, self._outage = delay_s, jitter_s, loss, outage
        self._draw = random.Random(seed)
        self.near, self.far = (f"tailspan-{side}-{os.getpid()}" for side in ("near", "far"))
        self._fds: list[int] = []
        self._stop_fd, self._wake_fd = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="lossy-link", daemon=True)
        self.carried = 0
        self.lost = 0

    @staticmethod
    def inside(namespace: str, command: list[str]) -> list[str]:
        """The command as it runs in one of the namespaces."""
        return ["ip", "netns", "exec", namespace, *command]

    def __enter__(self) -> LossyLink:
        try:
            for namespace, host in ((self.near, NEAR_HOST), (self.far, FAR_HOST)):
                _ip("netns", "add", namespace)
                self._fds.append(_tun_in(namespace))
                _ip("-n", namespace, "addr", "add", f"{host}/30", "dev", _DEVICE)
                _ip("-n", namespace, "link", "set", _DEVICE, "mtu", str(_MTU), "up")
                _ip("-n", namespace, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._wake_fd)  # the thread reads the end of the pipe
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for fd in self._fds:
            os.close(fd)
        for namespace in (self.near, self.far):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def _carry(self) -> None:
        other = {self._fds[0]: self._fds[1], self._fds[1]: self._fds[0]}
        latest = dict.fromkeys(self._fds, 0.0)  # of each direction: the packet before
        waiting: list[tuple[float, int, int, bytes]] = []  # due, number, where to, packet
        began: float | None = None
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, fd, packet = heapq.heappop(waiting)
                os.write(fd, packet)
                self.carried += 1
            timeout = max(0.0, waiting[0][0] - now) if waiting else None
            ready, _, _ = select.select([*self._fds, self._stop_fd], [], [], timeout)
            if self._stop_fd in ready:
                return
            now = time.monotonic()
            for fd in ready:
                packet = os.read(fd, 65536)
                began = now if began is None else began
                out = self._outage is not None and 0 <= now - began - self._outage[0] < self._outage[1]
                if out or self._draw.random() < self._loss:
                    self.lost += 1
                    continue
                latest[fd] = max(latest[fd], now + self._delay_s + self._draw.random() * self._jitter_s)
                heapq.heappush(waiting, (latest[fd], self.carried + len(waiting), other[fd], packet))


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"ip {' '.join(words)}: {done.stderr.strip()}",
            where="network namespaces",
            remedy="run as root on Linux with iproute2",
        )


def _tun_in(namespace: str) -> int:
    """A file descriptor of a new TUN device in the namespace.  A thread enters it, so that this process does not."""
    found: list[int | OSError] = []

    def enter() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{namespace}", "rb") as file:  # noqa: PTH123 - no file, a handle of the kernel's
                if libc.setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN_NO_PI))
            found.append(fd)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise UserError(f"no TUN device: {found[0]}", where=namespace, remedy="run as root where /dev/net/tun is")
    return found[0]
