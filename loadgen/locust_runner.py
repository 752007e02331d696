"""The processes of one run: a Locust master, its workers, and through them the senders.

Owns starting, commanding and ending them.  Must always hold: none outlives this process (each ends at the end of file
on its stdin, whose other end only this process holds); Ctrl-C in the terminal reaches this process alone (they run in a
session of their own); close() returns within CLOSE_S however broken they are.
Events come as dictionaries from the master, see control/locustfile.py; a worker process that dies is found here.
"""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from models.addresses import is_host
from models.errors import UserError

LOCUSTFILE: Final = Path(__file__).parent / "control" / "locustfile.py"
ROOT: Final = Path(__file__).parent.parent  # where our packages lie
HOST: Final = "127.0.0.1"
CLOSE_S: Final = 10.0


def free_port() -> int:
    """A loopback port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def address_of(text: str, where: str) -> tuple[str, int]:
    """HOST:PORT.  Raises UserError."""
    host, colon, port = text.rpartition(":")
    if not colon or not is_host(host) or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{text!r} is no HOST:PORT", where=where, remedy="write for example 10.0.0.1:5557")
    return host, int(port)


def checked_network(host: str, where: str, unencrypted: bool) -> None:
    """Raises UserError for an address beyond this machine where nobody said that plain text may go there."""
    try:
        near = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        near = False
    if not near and not unencrypted:
        raise UserError(
            f"{host} is reached over a network, where plan, prompts and rows would go unencrypted, to anyone who asks",
            where=where,
            remedy="use 127.0.0.1 and a tunnel (ssh -N -L 5557:127.0.0.1:5557 MASTER_HOST on the worker's machine), "
            "or add --unencrypted in a network that you trust",
        )


class Fleet:
    """Master and workers of one run.  logs go to <bundle>/logs.  Not thread-safe, but next() may block elsewhere."""

    def __init__(
        self,
        bundle: Path,
        plan: Path,
        workers: int,
        *,
        grace_s: float,
        web_port: int | None = None,
        metrics_port: int | None = None,
        listen: str = HOST,
        remote_workers: int = 0,
        bind: tuple[str, int] | None = None,
    ) -> None:
        """metrics_port, listen: where the master serves /metrics.  remote_workers: of `workers`, those that come by
        themselves, to `bind` (host and port that the master listens on)."""
        self.metrics_port = metrics_port
        self._listen = listen
        self.workers = workers
        self._remote = remote_workers
        self._bind = bind
        self.web_port = web_port
        self._bundle, self._plan, self._grace_s = bundle, plan, grace_s
        self._logs = bundle / "logs"
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: list[subprocess.Popen[bytes]] = []
        self._reported: set[int] = set()

    def start(self) -> None:
        """Start all processes; they connect to each other and prepare by themselves."""
        self._logs.mkdir(parents=True, exist_ok=True)
        host, port = self._bind or (HOST, free_port())
        read_fd, write_fd = os.pipe()
        web = ["--headless"]
        if self.web_port is not None:
            web = ["--autostart", "--web-host", HOST, "--web-port", str(self.web_port)]
        users = ["-u", str(self.workers), "-r", str(self.workers), "--expect-workers", str(self.workers)]
        bind = ["--master-bind-host", host, "--master-bind-port", str(port)]
        stop = ["--stop-timeout", str(int(self._grace_s) + 5)]
        try:
            self._master = self._popen("master", ["--master", *web, *users, *bind, *stop], (write_fd,))
        finally:
            os.close(write_fd)
        near = HOST if host in ("0.0.0.0", "*") else host
        connect = ["--headless", "--master-host", near, "--master-port", str(port)]
        for number in range(self.workers - self._remote):
            self._workers.append(
                self._popen(f"worker-{number}", ["--worker", *connect], (), TAILSPAN_WORKER=str(number))
            )
        threading.Thread(target=self._read, args=(read_fd,), name="fleet-events", daemon=True).start()

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next event, None when there was none in time.  {"ev": "exit", "pid", "role", "status"} for a process."""
        self._find_dead()
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def command(self, **words: Any) -> None:
        """Tell the master; one that is gone is reported by next()."""
        if self._master is None or self._master.stdin is None:
            return
        try:
            self._master.stdin.write(json.dumps(words).encode() + b"\n")
            self._master.stdin.flush()
        except OSError:
            return

    def log_tail(self, lines: int = 6) -> str:
        """The last lines of all logs, for a run that could not start."""
        tail = []
        for path in sorted(self._logs.glob("*.log")):
            text = path.read_text(encoding="utf-8", errors="replace").splitlines()
            tail += [f"{path.name}: {line}" for line in text[-lines:]]
        return "\n".join(tail)

    def close(self, *, quickly: bool = False) -> None:
        """End all processes: by the quit command, then by closing their stdin, then by SIGKILL."""
        processes = [process for process in (self._master, *self._workers) if process is not None]
        if not quickly:
            self.command(cmd="quit")
            wait_all(processes, CLOSE_S * 0.4)
        for process in processes:
            if process.stdin is not None:
                close_quietly(process.stdin)
        wait_all(processes, CLOSE_S * 0.6)
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _popen(self, name: str, arguments: Sequence[str], fds: tuple[int, ...], **more: str) -> subprocess.Popen[bytes]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_")} | more
        path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",  # a user's folder named engine does not shadow ours
            "PYTHONUNBUFFERED": "1",
            "TAILSPAN_BUNDLE": str(self._bundle.resolve()),
            "TAILSPAN_PLAN": str(self._plan.resolve()),
            "TAILSPAN_WORKERS": str(self.workers),
            "TAILSPAN_GRACE_S": str(self._grace_s),
        }
        if self.metrics_port is not None:
            environment["TAILSPAN_METRICS"] = f"{self._listen}:{self.metrics_port}"
        if fds:
            environment["TAILSPAN_EVENTS_FD"] = str(fds[0])
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--only-summary"]
        if cache := environment.get("TAILSPAN_CACHE"):
            environment["TAILSPAN_CACHE"] = str(Path(cache).expanduser().resolve())
        with (self._logs / f"locust-{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._logs,  # where no user's locust.conf or pyproject.toml lies
                start_new_session=True,
                pass_fds=fds,
            )

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as lines:
            for line in lines:
                self._events.put(json.loads(line))

    def _find_dead(self) -> None:
        for role, process in [("master", self._master), *(("worker", worker) for worker in self._workers)]:
            if process is not None and process.pid not in self._reported and process.poll() is not None:
                self._reported.add(process.pid)
                self._events.put({"ev": "exit", "role": role, "pid": process.pid, "status": process.returncode})


def wait_all(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Wait until all have ended or the time is up."""
    end = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def close_quietly(pipe: IO[bytes]) -> None:
    """Close a pipe whose reader may be gone."""
    try:
        pipe.close()
    except OSError:
        return
