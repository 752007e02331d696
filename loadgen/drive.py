"""From the start of the processes to the last answer: follows the events of a fleet until every worker has ended.

Must always hold: it ends in bounded time whatever dies (each phase has a limit of its own); a worker that ends without
its last word is lost, and a run with a lost worker is incomplete; Ctrl-C stops the run and leaves what there is, a
second one waits for no answer any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from loadgen.locust_runner import Fleet
from loadgen.progress import Progress, Totals
from telemetry.bundle import COMPLETE, INCOMPLETE, INTERRUPTED

START_LIMIT_S: Final = 120.0  # to import, connect and make the first prompts
LATE_LIMIT_S: Final = 10.0  # past the last possible answer
STOP_LIMIT_S: Final = 10.0  # past the grace of a stop
INTERRUPT_GRACE_S: Final = 3.0  # what Ctrl-C leaves to requests in flight
SENDER_LIMIT_S: Final = 6.0  # for a sender whose Locust worker died to write its last rows
POLL_S: Final = 0.2


@dataclass(slots=True)
class Worker:
    """What is known of one worker.  state: starting, ready, ended or lost."""

    name: str
    state: str = "starting"
    pid: int | None = None
    sender_pid: int | None = None
    remote: bool = False  # on another machine: its processes are not ours to watch
    message: str = ""
    clock: dict[str, Any] = field(default_factory=dict)  # its monotonic clock against the master's
    progress: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.state in ("ended", "lost")

    def to_dict(self) -> dict[str, Any]:
        """The entry of the manifest."""
        figures = {key: value for key, value in self.end.items() if key not in ("ev", "worker")}
        # neither ended nor lost: the run itself came to an end before it
        status = {"ended": "ok", "lost": "lost"}.get(self.state, "cut")
        clock = {"clock": self.clock} if self.clock else {}
        return {
            "name": self.name,
            "status": status,
            **clock,
            **({"message": self.message} if self.message else {}),
            **figures,
        }


class Interrupts:
    """Counts SIGINT and SIGTERM while it is entered, instead of an exception in the middle of something."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[Interrupts]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, seconds: float, since: int) -> None:
        """Wait so long, or until there are more signals than `since`."""
        end = time.monotonic() + seconds
        while self.count <= since and time.monotonic() < end:
            time.sleep(POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class Drive:
    """One run of a fleet.  After run(): status (of the bundle), workers, zero (ns, or None if it never started).

    on_progress: told the totals each second; returns the requests by verdict so far.
    """

    def __init__(
        self,
        fleet: Fleet,
        progress: Progress,
        interrupts: Interrupts,
        *,
        length_s: float,
        total_timeout_s: float,
        on_start: Callable[[int, int], None],
        on_progress: Callable[[Totals], Mapping[str, int]],
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._fleet = fleet
        self._progress = progress
        self._interrupts = interrupts
        self._length_s = length_s
        self._total_timeout_s = total_timeout_s
        self._on_start = on_start
        self._on_progress = on_progress
        self._deadline = time.monotonic() + start_limit_s
        self._stopping = 0  # how often a stop was sent
        self._stopped_by_user = False
        self.cut_why: str | None = None  # why `cut` was asked for
        self.zero_ns: int | None = None
        self.workers = [Worker(f"worker-{number}") for number in range(fleet.workers)]

    @property
    def status(self) -> str:
        if self._stopped_by_user:
            return INTERRUPTED
        if self.cut_why is not None:
            return INCOMPLETE
        return COMPLETE if all(worker.state == "ended" for worker in self.workers) else INCOMPLETE

    @property
    def totals(self) -> Totals:
        return Totals.of([worker.progress for worker in self.workers if worker.progress])

    def run(self) -> None:
        """Follow the run to its end."""
        shown = 0.0
        while not all(worker.over for worker in self.workers):
            event = self._fleet.next(POLL_S)
            if event is not None:
                self._take(event)
            self._heed_interrupts()
            if self.zero_ns is None and any(worker.state == "lost" for worker in self.workers):
                self._lose("ended because another worker could not start")
                break
            if time.monotonic() > self._deadline and not self._next_limit():
                break
            if time.monotonic() - shown >= 1.0 and self.zero_ns is not None:
                shown = time.monotonic()
                totals = self.totals
                self._progress.show(totals, self._on_progress(totals), "stopping" if self._stopping else "")
        for worker in self.workers:
            if worker.state == "lost" and worker.sender_pid is not None:
                end_sender(worker.sender_pid)

    def cut(self, why: str) -> None:
        """End the run now: no more is learnt from it.  What is in flight is cut."""
        if self.cut_why is None and not self._stopping:
            self.cut_why = why
            self._end(0.0, f"ending this run early: {why}")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["ev"]
        if kind == "exit":
            self._on_exit(event)
            return
        if kind == "stopping":
            if not self._stopping:
                self._stop(INTERRUPT_GRACE_S, "the run was stopped from the web page", send=False)
            return
        if kind == "started":
            self.zero_ns = int(event["zero_monotonic_ns"])
            limit_s = self._length_s + self._total_timeout_s + LATE_LIMIT_S
            self._deadline = self.zero_ns / 1e9 + limit_s
            self._on_start(self.zero_ns, int(event["zero_unix_ns"]))
            return
        worker = self.workers[event["worker"]]
        if kind == "hello":
            worker.pid, worker.sender_pid = event.get("pid"), event.get("sender_pid")
            worker.remote = bool(event.get("remote"))
        elif kind == "ready":
            worker.state = "ready"
            for warning in event.get("warnings", []):
                self._progress.say(f"{worker.name}: {warning}")
        elif kind == "clock":
            worker.clock = {key: value for key, value in event.items() if key not in ("ev", "worker")}
        elif kind == "progress":
            worker.progress = event
        elif kind == "end":
            worker.state, worker.end = "ended", event
        elif kind in ("lost", "error"):
            where = f"{event['where']}: " if event.get("where") else ""
            self._lose_one(worker, where + str(event["message"]))

    def _on_exit(self, event: dict[str, Any]) -> None:
        """A Locust process ended by itself."""
        how = f"status {event['status']}"
        if event["role"] == "master":
            self._lose(f"the Locust master ended with {how}")
            return
        known = [worker for worker in self.workers if worker.pid == event["pid"]]
        unknown = [worker for worker in self.workers if worker.pid is None and not worker.over and not worker.remote]
        for worker in (known or unknown)[:1]:
            if not worker.over:
                self._lose_one(worker, f"its Locust worker ended with {how}")

    def _lose(self, message: str) -> None:
        for worker in self.workers:
            if not worker.over:
                self._lose_one(worker, message)

    def _lose_one(self, worker: Worker, message: str) -> None:
        worker.state, worker.message = "lost", message
        self._progress.say(f"{worker.name} is lost: {message}")

    def _heed_interrupts(self) -> None:
        """First Ctrl-C: a short grace for what is in flight; second: none."""
        if self._interrupts.count and not self._stopped_by_user:
            self._stop(INTERRUPT_GRACE_S, "interrupted: ending the run (Ctrl-C again to wait for no answer)")
            if self.zero_ns is None:
                self._lose("interrupted before the start")
        elif self._interrupts.count > 1 and self._stopping == 1:
            self._stop(0.0, "interrupted again: cutting the requests in flight")

    def _stop(self, grace_s: float, message: str, *, send: bool = True) -> None:
        self._stopped_by_user = True
        self._end(grace_s, message, send=send)

    def _end(self, grace_s: float, message: str, *, send: bool = True) -> None:
        self._stopping += 1
        self._deadline = time.monotonic() + grace_s + STOP_LIMIT_S
        self._progress.say(message)
        if send:
            self._fleet.command(cmd="stop", grace_s=grace_s)

    def _next_limit(self) -> bool:
        """A limit has passed.  Cut once; False when that was done already and nothing came of it."""
        if self.zero_ns is None or self._stopping > 1:
            self._lose("no word from it in time")
            return False
        self._stopping = 2
        self._deadline = time.monotonic() + STOP_LIMIT_S
        self._progress.say("past the last time limit: cutting the requests in flight")
        self._fleet.command(cmd="stop", grace_s=0.0)
        return True


def end_sender(pid: int) -> None:
    """Wait for the sender of a lost worker to write its last rows; end it where it does not."""
    import psutil

    try:
        process = psutil.Process(pid)
        if "loadgen.sender" not in process.cmdline():
            return  # it is gone and its number is in use again
        process.wait(SENDER_LIMIT_S)
    except psutil.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    except psutil.Error:
        return
