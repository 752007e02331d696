"""The sender process: sends one worker's calls, free of gevent, steered by JSON lines (`python -m loadgen.sender`).

    stdin   {"cmd":"prepare","plan":PATH,"worker":i,"workers":n,"bundle":FOLDER}
            {"cmd":"start","zero_monotonic_ns":N}
            {"cmd":"stop","grace_s":x}          again, with no grace: hurry.  End of file: stop now.
    stdout  {"ev":"ready",...}  {"ev":"progress",...} each second and when all is done  {"ev":"end",...}
            {"ev":"error","message":...,"where":...,"remedy":...} and exit status 1

Owns the protocol.  Must always hold: nothing else ever reaches stdout (a stray print goes to stderr); a parent that
died, or reads no more, never keeps this process from writing its rows and ending.  Ctrl-C in a terminal reaches the
whole group: the parent decides what it means, so SIGINT is ignored here; SIGTERM is a stop without grace.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import uvloop

from loadgen.building import Builder, Frames
from loadgen.dispatch import Dispatcher
from loadgen.job import CallSource, SendSettings
from loadgen.vitals import lock_memory, raise_file_limit
from models.errors import UserError
from telemetry.part_thread import ThreadedPart
from telemetry.schema import ATTEMPTS, REQUESTS

Loader = Callable[[Path, int, int], tuple[SendSettings, CallSource | Frames]]

_SPARE_FILES: Final = 64  # descriptors that are not connections
_COMMAND_LIMIT: Final = 1 << 20


class Output:
    """JSON lines to the real stdout, written by a thread: a parent that does not read cannot stop the event loop."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def emit(self, event: str, **fields: Any) -> None:
        """Queue one event; figures that are no numbers become null."""
        self._lines.put(json.dumps({"ev": event, **fields}).encode() + b"\n")

    def close(self) -> None:
        """Wait until the parent has taken everything, for two seconds at most."""
        self._lines.put(None)
        self._thread.join(2.0)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                return  # nobody listens; the end of stdin says so too


class Sender:
    """One process's life: prepare, start, stop; see the module."""

    def __init__(self, load: Loader, output: Output) -> None:
        self._load = load
        self._output = output
        self._commands: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._dispatcher: Dispatcher | None = None
        self._builder: Frames | None = None
        self._writer: ThreadedPart | None = None
        self._attempts: ThreadedPart | None = None
        self._worker = 0
        self._started = False
        self._locked = False
        self._fault: BaseException | None = None

    async def run(self) -> int:
        """Serve until stopped; returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_fault)
        loop.add_signal_handler(signal.SIGTERM, self._commands.put_nowait, None)
        threading.Thread(target=self._read, args=(loop,), name="input", daemon=True).start()
        progress: asyncio.Task[None] | None = None
        try:
            while (command := await self._commands.get()) is not None and command.get("cmd") != "stop":
                await self._obey(command)
                if self._started and progress is None:
                    progress = loop.create_task(self._report())
            await self._stop(0.0 if command is None else _number(command, "grace_s"))
        except BaseException:
            if self._dispatcher is not None:
                await self._dispatcher.stop(0.0)
            raise
        finally:
            if progress is not None:
                progress.cancel()
            for used in (self._writer, self._attempts, self._builder):
                if used is not None:
                    used.close()
        if self._fault is not None:
            raise self._fault
        return 0

    async def _obey(self, command: dict[str, Any]) -> None:
        match command.get("cmd"):
            case "prepare" if self._dispatcher is None:
                await self._prepare(command)
            case "start" if self._dispatcher is not None and not self._started:
                self._started = True
                self._dispatcher.start(int(_number(command, "zero_monotonic_ns")))
            case other:
                raise UserError(f"command {other!r} does not fit here", where="stdin")

    async def _prepare(self, command: dict[str, Any]) -> None:
        self._worker, workers = int(_number(command, "worker")), int(_number(command, "workers"))
        settings, source = self._load(Path(str(command["plan"])), self._worker, workers)
        self._builder = source if isinstance(source, Frames) else None
        tokenizer = None
        if settings.tokenizer_ref:
            from models.store import load_reference

            tokenizer = load_reference(settings.tokenizer_ref).tokenizer
        folder = Path(str(command["bundle"])) / "requests"
        self._writer = ThreadedPart(folder, REQUESTS, f"worker-{self._worker}")
        if settings.patience is not None:
            self._attempts = ThreadedPart(folder.with_name("attempts"), ATTEMPTS, f"worker-{self._worker}")
        files = raise_file_limit()
        self._dispatcher = Dispatcher(
            settings, source, self._writer, self._worker, tokenizer, self._on_drained, self._attempts
        )
        await self._dispatcher.prepare()
        self._locked = lock_memory()
        self._output.emit(
            "ready",
            worker=self._worker,
            requests=self._dispatcher.requests,
            monotonic_ns=time.monotonic_ns(),
            file_limit=files,
            warnings=connection_warnings(settings, self._dispatcher.requests, files),
        )

    async def _stop(self, grace_s: float) -> None:
        dispatcher = self._dispatcher
        if dispatcher is None:
            return
        stopping = asyncio.get_running_loop().create_task(dispatcher.stop(grace_s))
        while not stopping.done():
            order = asyncio.get_running_loop().create_task(self._commands.get())
            await asyncio.wait({stopping, order}, return_when=asyncio.FIRST_COMPLETED)
            if not order.done():
                order.cancel()
            elif (order.result() or {}).get("grace_s", 0) <= 0:
                dispatcher.cut()
        await stopping
        if self._fault is None:
            self._output.emit("progress", **dispatcher.progress())
            fields = dispatcher.vitals.summary()
            fields |= {"write_error": dispatcher.write_error, "memory_locked": self._locked}
            fields |= {"built_late": dispatcher.built_late}
            self._output.emit("end", sent=dispatcher.sent, done=dispatcher.done, **fields)

    async def _report(self) -> None:
        """The progress each second, on the second."""
        assert self._dispatcher is not None
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += 1.0
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._output.emit("progress", **self._dispatcher.progress())

    def _on_drained(self) -> None:
        if self._dispatcher is not None:
            self._output.emit("progress", **self._dispatcher.progress())

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: a fault of ours.  Keep what is there, then say so and end."""
        loop.default_exception_handler(context)
        if self._fault is None:
            found = context.get("exception")
            self._fault = found if found is not None else RuntimeError(str(context.get("message")))
            self._commands.put_nowait(None)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Thread: lines of stdin to commands; a line that is no JSON object becomes a command that no one knows."""
        rest = b""
        while True:
            try:
                data = os.read(0, 65536)
            except OSError:
                data = b""
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, map(bytes.strip, lines)):
                try:
                    command = json.loads(line)
                except ValueError:
                    command = None
                known = command if isinstance(command, dict) else {"cmd": line.decode("utf-8", "replace")[:200]}
                loop.call_soon_threadsafe(self._commands.put_nowait, known)
            if not data or len(rest) > _COMMAND_LIMIT:
                loop.call_soon_threadsafe(self._commands.put_nowait, None)
                return


def connection_warnings(settings: SendSettings, requests: int, files: int) -> list[str]:
    """What may run short if no answer ended before the last request: open files, local ports."""
    most = min(requests, settings.max_concurrency or requests)
    found = []
    if most > files - _SPARE_FILES:
        found.append(
            f"up to {most} connections at once, but only {files} open files are allowed; raise it with: ulimit -n"
        )
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return found
    ports = (high - low + 1) * len(set(settings.targets))
    if most > ports:
        found.append(
            f"up to {most} connections at once, but only {ports} local ports for them; "
            "widen net.ipv4.ip_local_port_range or use more target addresses"
        )
    return found


def _number(command: dict[str, Any], key: str) -> float:
    value = command.get(key)
    if not isinstance(value, int | float):
        raise UserError(f"command without a number {key!r}: {command}", where="stdin")
    return value


def load_from_plan(plan: Path, worker: int, workers: int) -> tuple[SendSettings, Frames]:
    """The settings and the builder of one worker's calls, which runs from now on.  Raises UserError."""
    from loadgen.plan import Plan

    read = Plan.read(plan)
    settings = read.settings()
    return settings, Builder(plan, worker, workers, len(range(worker, read.requests, workers)))


def main(load: Loader = load_from_plan) -> int:
    """Run one sender to its end; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = Output()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(Sender(load, output).run())
    except UserError as error:
        output.emit("error", message=error.message, where=error.where, remedy=error.remedy)
        status = 1
    except Exception as error:  # the last line of defence: the parent must hear why
        output.emit("error", message=f"{type(error).__name__}: {error}", where=None, remedy=None)
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    output.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
