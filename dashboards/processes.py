"""The child processes of one command: started together, watched together, ended together.

What must always hold: no child outlives the command.  On the way out (return, error, Ctrl-C, SIGTERM, SIGHUP) every
child is asked to end, given its grace, then killed with its whole process group, last started first.  When the command
itself is killed with SIGKILL the kernel kills each child (PR_SET_PDEATHSIG, Linux).  A child is reaped only after its
group is gone, so that its group id cannot have passed to a stranger.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

from models.errors import UserError

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_POLL_S: Final = 0.05
_NO_PROXY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never behind a proxy


class Terminated(BaseException):
    """SIGTERM or SIGHUP reached the command.  Not an Exception: nothing but the way out may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass(slots=True)
class Child:
    """One started process, leader of its own session, so that Ctrl-C reaches the command alone and it ends the rest."""

    name: str
    argv: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path | None
    end_signal: signal.Signals
    grace_s: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_status(self) -> int | None:
        """Exit code (negative: the signal that ended it), or None while it runs.  Does not reap."""
        if self.process.returncode is not None:
            return self.process.returncode
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end without reaping; None when ``timeout_s`` passed first."""
        until = time.monotonic() + timeout_s
        while (status := self.exit_status()) is None:
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)
        return status

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log, for an error message."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the child and all it started (those that stayed in its group)."""
        if self.process.returncode is None:  # reaped: the group id may belong to somebody else
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return  # it and its group ended in between: nothing left to signal


@dataclass(slots=True)
class Children:
    """The children of one command.  Use as a context manager, from the main thread; leaving it ends them all.

    logs: folder for one ``<name>.log`` per child.
    """

    logs: Path
    running: list[Child] = field(default_factory=list)
    _handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _terminate)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.end()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: bool = True,
        end_signal: signal.Signals = signal.SIGTERM,
        grace_s: float = 10.0,
    ) -> Child:
        """Start ``argv``.  ``env`` is added to ours.  ``log=False``: it writes to our own stdout and stderr.

        Raises UserError when the program cannot be started.
        """
        path = self.logs / f"{name}.log" if log else None
        out = path.open("ab") if path else None
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        except OSError as error:
            remedy = f"check that {argv[0]} exists and is executable"
            raise UserError(f"cannot start {name}: {error.strerror}", where=argv[0], remedy=remedy) from error
        finally:
            if out is not None:
                out.close()
        child = Child(name, tuple(argv), process, path, end_signal, grace_s)
        self.running.append(child)
        return child

    def wait_ready(self, child: Child, ready: Callable[[], bool], timeout_s: float) -> float:
        """Wait until ``ready()``; returns the seconds it took.  UserError when the child ends first or time is up."""
        started = time.monotonic()
        while not ready():
            status = child.exit_status()
            if status is not None:
                raise UserError(f"{child.name} ended before it was ready ({describe(status)})\n{child.tail()}".rstrip())
            if time.monotonic() - started > timeout_s:
                raise UserError(f"{child.name} was not ready after {timeout_s:.0f} s\n{child.tail()}".rstrip())
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def run_to_end(self, child: Child) -> int:
        """Wait for its end however long it takes, end what it left in its group, and forget it; its exit status."""
        while (status := child.exit_status()) is None:
            time.sleep(_POLL_S)
        child.signal_group(signal.SIGKILL)
        child.process.wait()
        self.running.remove(child)
        return status

    def wait_any(self) -> Child:
        """Wait until one of the children ends, and return it."""
        while True:
            for child in self.running:
                if child.exit_status() is not None:
                    return child
            time.sleep(_POLL_S * 4)

    def end(self) -> None:
        """End all, one after the other, last started first: end signal, grace, SIGKILL to the group.

        In this order a load that is still running never sees its server go.  A second Ctrl-C kills all at once.
        """
        try:
            for child in reversed(self.running):
                if child.exit_status() is None:
                    child.signal_group(child.end_signal)
                    child.wait(child.grace_s)
        finally:
            for child in reversed(self.running):
                child.signal_group(signal.SIGKILL)
                child.process.wait()
            self.running.clear()


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough; the way out must not be cut short by a repetition
    raise Terminated(number)


def _die_with(parent: int) -> Callable[[], None]:
    """What the child does between fork and exec: ask the kernel to kill it when the thread that forked it ends."""

    def arm() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:  # the parent died before the kernel knew
                os._exit(1)

    return arm


def describe(status: int) -> str:
    """An exit status in words: ``exit code 3`` or ``SIGKILL``."""
    return f"exit code {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free to a server
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def choose_port(asked: int, what: str, option: str) -> int:
    """``asked`` if it is free, any free one for 0.  UserError that names port, option and remedy when it is taken."""
    if asked == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    if not port_is_free(asked):
        remedy = f"end the program that listens there (ss -ltnp 'sport = :{asked}'), or choose another: {option} 0"
        raise UserError(f"port {asked} for {what} is taken", where=option, remedy=remedy)
    return asked


def answers(url: str) -> bool:
    """Whether a GET of ``url`` gives status 200 within a second."""
    try:
        with _NO_PROXY.open(url, timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):  # URLError is an OSError
        return False
