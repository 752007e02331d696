"""What Locust loads on the master and on every worker: it starts, stops and watches; it sends no request itself.

Worker: one sender process (`python -m loadgen.sender`, free of gevent's patches) and one control user, which sets it
to work, passes commands of the master on to it and its events back.  Master: sends one zero for all once every sender
is ready, and writes every event as a JSON line to the parent.  Must always hold: a worker starts one sender in its
life, however often Locust spawns its user; when the parent goes (end of file on stdin) every process here ends by
itself, so that nothing is left behind.

    parent -> master   stdin: {"cmd": "stop", "grace_s": x} | {"cmd": "quit"} |
                       {"cmd": "live", "text": /metrics, "rows": [...]}
    master -> parent   the pipe TAILSPAN_EVENTS_FD: {"ev": "hello" | "ready" | "started" | "progress" | "end" | "lost" |
                       "error" | "stopping" | "clock", "worker": i, ...}

The clocks of master and workers are compared by PINGS messages there and back, of which the fastest counts.  On one
machine they are the same clock; for a worker on another the zero is sent in its own time.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import gevent
import gevent.os
from gevent.event import AsyncResult
from gevent.pywsgi import WSGIServer
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.rpc.protocol import Message
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from loadgen.control.remote import REMOTE_VARIABLE, PartShipper, PartStore, PlanReceiver, described, trace_piece

EVENT: Final = "tailspan_event"  # worker -> master
COMMAND: Final = "tailspan_command"  # master -> workers
START_MARGIN_NS: Final = 1_000_000_000  # between choosing the zero and the zero: every worker must have heard of it
LAST_WORDS_S: Final = 5.0  # what a sender may take to write its rows once its parent is gone
STAT: Final = ("POST", "chat")  # how our requests are called in Locust's own table
PINGS: Final = 9
LOST_S: Final = 8.0  # without a heartbeat, after the three that Locust waits for
SHIP_S: Final = 1.0  # how often a worker on another machine sends its new rows
TAB: Final = "tailspan"
COLUMNS: Final = ("outcome", "reason", "class", "replica", "requests")


class Sender:
    """The sender process of this worker, seen from gevent: its pipes are read cooperatively."""

    def __init__(self, runner: WorkerRunner) -> None:
        self.runner = runner
        self.worker: int | None = None  # known once the master has spawned our user
        self.ended = False
        self.stopped = False
        self._counted = 0
        self._failures: dict[str, int] = {}
        self._bundle = Path(os.environ["TAILSPAN_BUNDLE"])
        self.plan = Path(os.environ["TAILSPAN_PLAN"])
        self.workers = int(os.environ.get("TAILSPAN_WORKERS", "0"))
        self._shipper = PartShipper(self._bundle) if REMOTE_VARIABLE in os.environ else None
        self._receiver = PlanReceiver(self._bundle)
        self._planned = AsyncResult()
        log = (self._bundle / "logs" / f"sender-{os.environ['TAILSPAN_WORKER']}.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "loadgen.sender"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._commands, self._events = self.process.stdin, self.process.stdout

    def prepare(self, worker: int) -> None:
        """Build this worker's part of the schedule."""
        self.worker = worker
        own = {"pid": os.getpid(), "sender_pid": self.process.pid}
        self.tell_master(ev="hello", remote=self._shipper is not None, **(own if self._shipper is None else {}))
        if self._shipper is not None:
            self.tell_master(ev="need_plan")
            fault = self._planned.get()
            if fault is not None:
                self.tell_master(ev="error", message=fault, where="worker")
                self.ended = True
                return
            self.plan, self.workers = self._receiver.plan, self._receiver.workers
            gevent.spawn(self._ship_always)
        self.command(cmd="prepare", plan=str(self.plan), worker=worker, workers=self.workers, bundle=str(self._bundle))

    def hear_of_plan(self, told: dict[str, Any]) -> None:
        """A remote worker: the plan, then the trace piece by piece."""
        fault = None
        if told["cmd"] == "plan":
            self._receiver.take_plan(told)
        else:
            fault = self._receiver.take_piece(told["offset"], told["data"])
        if fault is not None or self._receiver.wants is None:
            self._planned.set(fault)
        else:
            self.tell_master(ev="need_trace", offset=self._receiver.wants)

    def _ship_always(self) -> None:
        while not self.ended:
            gevent.sleep(SHIP_S)
            self._ship()

    def _ship(self) -> None:
        for piece in self._shipper.new_pieces() if self._shipper is not None else ():
            self.tell_master(ev="part", **piece)

    def command(self, **words: Any) -> None:
        """Send one command; a sender that is gone is noticed by relay()."""
        try:
            self._commands.write(json.dumps(words).encode() + b"\n")
            self._commands.flush()
        except (OSError, ValueError):
            return

    def stop(self, grace_s: float) -> None:
        self.stopped = True
        self.command(cmd="stop", grace_s=grace_s)

    def relay(self) -> None:
        """Pass the sender's events on until it ends; a sender that dies without a word is reported as lost."""
        requests = None
        last: dict[str, Any] | None = None
        for line in self._events:
            event = json.loads(line)
            if event["ev"] == "ready":
                requests = event["requests"]
            elif event["ev"] == "progress":
                self._count(event)
                if event["done"] == requests and not self.stopped:
                    self.stop(0.0)
            if event["ev"] == "end" and self._shipper is not None:
                last = event  # its last word comes after its last row
                continue
            self.ended = self.ended or event["ev"] in ("end", "error")
            self.tell_master(**{**event, "worker": self.worker})
        status = self.process.wait()
        if self._shipper is not None:  # what a sender that died had noted would stay here
            subprocess.run([sys.executable, "-m", "loadgen.recover", str(self._bundle)], check=False)
        self._ship()
        if last is not None:
            self.ended = True
            self.tell_master(**{**last, "worker": self.worker})
        if not self.ended:
            self.ended = True
            self.tell_master(ev="lost", message=f"the sender ended with status {status}")

    def tell_master(self, **event: Any) -> None:
        self.runner.send_message(EVENT, {"worker": self.worker, **event})

    def hang_up(self) -> None:
        """The parent is gone: close the sender's stdin, which means stop now, and wait for its last rows."""
        self._commands.close()
        try:
            self.process.wait(timeout=LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _count(self, progress: dict[str, Any]) -> None:
        """Bring Locust's own counts up to date, for its web page; its times are not used."""
        stats = self.runner.stats
        for _ in range(progress["done"] - self._counted):
            stats.log_request(*STAT, None, 0)  # type: ignore[arg-type]  # None: no time of its own
        self._counted = progress["done"]
        for reason, count in progress["errors"].items():
            for _ in range(count - self._failures.get(reason, 0)):
                stats.log_error(*STAT, reason)
            self._failures[reason] = count


_sender: Sender | None = None


class Control(User):
    """The one user of a worker."""

    @task
    def drive(self) -> None:
        runner = self.environment.runner
        beyond = 0 < int(os.environ.get("TAILSPAN_WORKERS", "0")) <= runner.worker_index
        if _sender is None or _sender.worker is not None or beyond:
            raise StopUser  # Locust spawns again when it rebalances: that would send everything twice
        _sender.prepare(runner.worker_index)
        if not _sender.ended:
            _sender.relay()
        raise StopUser


class Master:
    """The master's side: who is ready, the common zero, and the pipe to the parent."""

    def __init__(self, environment: Environment, runner: MasterRunner) -> None:
        self.environment = environment
        self.runner = runner
        self.events_fd = int(os.environ["TAILSPAN_EVENTS_FD"])
        self.workers = int(os.environ["TAILSPAN_WORKERS"])
        self.grace_s = float(os.environ["TAILSPAN_GRACE_S"])
        self.ready: set[int] = set()
        self.quitting = False
        self.nodes: dict[int, str] = {}  # worker -> its name in Locust
        self.pings: dict[int, list[dict[str, Any]]] = {}
        self.clocks: dict[int, int] = {}  # worker -> ns to add to the master's time
        self.plan = Path(os.environ["TAILSPAN_PLAN"])
        self.store = PartStore(Path(os.environ["TAILSPAN_BUNDLE"]))
        self.remote: set[int] = set()  # workers on other machines that are not over
        self.metrics = b""
        self.rows: list[dict[str, Any]] = []
        runner.register_message(EVENT, self.on_event)
        self.extend_page()
        if place := os.environ.get("TAILSPAN_METRICS"):
            host, _, port = place.rpartition(":")
            server = WSGIServer((host, int(port)), self.serve_metrics, log=None)
            gevent.spawn(server.serve_forever)
        gevent.spawn(self.watch_workers)
        environment.events.test_stopping.add_listener(self.on_stopping)  # type: ignore[no-untyped-call]

    def tell_parent(self, **event: Any) -> None:
        """One JSON line; a parent that is gone is noticed on stdin."""
        try:
            os.write(self.events_fd, json.dumps(event).encode() + b"\n")
        except OSError:
            return

    def on_event(self, environment: Environment, msg: Message) -> None:
        event = msg.data
        if event["ev"] in ("pong", "need_plan", "need_trace", "part"):
            self.on_internal(event, msg.node_id)
            return
        self.tell_parent(**event)
        if event["ev"] == "hello":
            self.nodes[event["worker"]] = msg.node_id
            if event["remote"]:
                self.remote.add(event["worker"])
        elif event["ev"] in ("end", "error", "lost"):
            self.remote.discard(event["worker"])
        if event["ev"] == "ready":
            self.pings[event["worker"]] = []
            self.ping(event["worker"])

    def on_internal(self, event: dict[str, Any], node: str) -> None:
        """What the parent does not hear of: clocks, and what goes to and from workers without our disk."""
        match event["ev"]:
            case "pong":
                self.on_pong(event)
            case "need_plan":
                self.runner.send_message(COMMAND, {"cmd": "plan", **described(self.plan, self.workers)}, node)
            case "need_trace":
                data = trace_piece(self.plan, event["offset"])
                self.runner.send_message(COMMAND, {"cmd": "trace", "offset": event["offset"], "data": data}, node)
            case "part":
                self.store.take(event)

    def watch_workers(self) -> None:
        """Greenlet: a worker on another machine whose heartbeat stopped for LOST_S is lost; nothing else would tell."""
        since: dict[int, float] = {}
        while True:
            gevent.sleep(1.0)
            for worker in self.remote:
                client = self.runner.clients.get(self.nodes[worker])
                if client is not None and client.state != STATE_MISSING:
                    since.pop(worker, None)
                elif time.monotonic() - since.setdefault(worker, time.monotonic()) > LOST_S:
                    self.remote.discard(worker)
                    self.tell_parent(ev="lost", worker=worker, message=f"no heartbeat for {LOST_S:g} s")
                    break

    def ping(self, worker: int) -> None:
        self.runner.send_message(COMMAND, {"cmd": "ping", "sent_ns": time.monotonic_ns()}, self.nodes[worker])

    def on_pong(self, event: dict[str, Any]) -> None:
        """One comparison of clocks; after the last the worker is ready, and after the last worker the run starts."""
        now = time.monotonic_ns()
        worker, trip = event["worker"], now - event["sent_ns"]
        offset = event["at_ns"] - (event["sent_ns"] + trip // 2)
        self.pings[worker].append({"offset_ns": offset, "round_trip_ns": trip})
        if len(self.pings[worker]) < PINGS:
            self.ping(worker)
            return
        best = min(self.pings[worker], key=lambda one: one["round_trip_ns"])
        same = event["boot"] == boot_id()
        self.clocks[worker] = 0 if same else best["offset_ns"]
        self.tell_parent(ev="clock", worker=worker, same_machine=same, **best)
        self.ready.add(worker)
        if len(self.ready) == self.workers:
            self.start()

    def start(self) -> None:
        """One zero for all, to each in the time of its own clock."""
        zero = time.monotonic_ns() + START_MARGIN_NS
        self.tell_parent(ev="started", zero_monotonic_ns=zero, zero_unix_ns=time.time_ns() + zero - time.monotonic_ns())
        for worker, node in self.nodes.items():
            command = {"cmd": "start", "zero_monotonic_ns": zero + self.clocks[worker]}
            self.runner.send_message(COMMAND, command, node)

    def serve_metrics(self, environ: dict[str, Any], respond: Any) -> list[bytes]:
        """/metrics, as the parent counts it."""
        if environ.get("PATH_INFO") != "/metrics":
            respond("404 Not Found", [("Content-Type", "text/plain")])
            return [b"the metrics are at /metrics\n"]
        respond("200 OK", [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])
        return [self.metrics]

    def extend_page(self) -> None:
        """A tab of our own on Locust's page: requests by outcome, reason, class and replica."""
        page = self.environment.web_ui
        if page is None or page.app is None:
            return
        structure = [{"key": key, "title": key.capitalize()} for key in COLUMNS]
        page.template_args |= {
            "extended_tabs": [{"title": TAB, "key": TAB}],
            "extended_tables": [{"key": TAB, "structure": structure}],
        }

        @page.app.after_request
        def extend(response: Any) -> Any:
            from flask import request

            if request.path == "/stats/requests":
                rows = [{**row, "safeName": str(place)} for place, row in enumerate(self.rows)]
                response.set_data(json.dumps({**response.json, "extended_stats": [{"key": TAB, "data": rows}]}))
            return response

    def on_stopping(self, environment: Environment) -> None:
        """The stop button of the web page."""
        if not self.quitting:
            self.tell_parent(ev="stopping")
            self.runner.send_message(COMMAND, {"cmd": "stop", "grace_s": self.grace_s})

    def obey_parent(self) -> None:
        """Greenlet: commands of the parent until it says quit or is gone."""
        rest = b""
        while True:
            data = gevent.os.nb_read(0, 65536)
            if not data:
                os._exit(1)  # the parent is gone and its workers see the same: nothing is left to write here
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if command["cmd"] == "quit":
                    self.quitting = True
                    if self.environment.web_ui is None:
                        self.runner.greenlet.kill(block=False)  # Locust's way out follows, which tells the workers
                    else:
                        self.runner.quit()
                elif command["cmd"] == "live":
                    self.metrics, self.rows = command["text"].encode(), command["rows"]
                else:
                    self.runner.send_message(COMMAND, command)


def boot_id() -> str:
    """The same for all processes that share a monotonic clock; the name of the machine where Linux does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def watch_parent() -> None:
    """Greenlet of a worker: end with the parent, whatever else goes on."""
    while gevent.os.nb_read(0, 4096):
        continue
    if _sender is not None and not _sender.ended:
        _sender.hang_up()
    os._exit(1)  # Locust's own way out waits for a master that may be gone as well


def on_command(environment: Environment, msg: Message) -> None:
    """A worker hears the master's command for its sender."""
    if _sender is None:
        return
    if msg.data["cmd"] in ("plan", "trace"):
        _sender.hear_of_plan(msg.data)
    elif msg.data["cmd"] == "ping":
        answer = {"ev": "pong", "sent_ns": msg.data["sent_ns"], "at_ns": time.monotonic_ns(), "boot": boot_id()}
        _sender.tell_master(**answer)
    elif msg.data["cmd"] == "stop":
        _sender.stop(msg.data["grace_s"])
    else:
        _sender.command(**msg.data)


@events.init.add_listener  # type: ignore[untyped-decorator]
def on_init(environment: Environment, runner: Any, **_: Any) -> None:
    """Set up this process by its role; a worker's sender starts at once, so that it loads while Locust connects."""
    global _sender
    gevent.os.make_nonblocking(0)
    if isinstance(runner, MasterRunner):
        gevent.spawn(Master(environment, runner).obey_parent)
    elif isinstance(runner, WorkerRunner):
        runner.register_message(COMMAND, on_command)
        _sender = Sender(runner)
        gevent.spawn(watch_parent)
