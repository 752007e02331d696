"""The sender process: sends one worker's calls, free of gevent, steered by JSON lines (`python -m loadgen.sender`).

    stdin   {"cmd":"prepare","plan":PATH,"worker":i,"workers":n,"bundle":FOLDER}
            {"cmd":"start","zero_monotonic_ns":N}
            {"cmd":"stop","grace_s":x}          again, with no grace: hurry.  End of file: stop now.
    stdout  {"ev":"ready",...}  {"ev":"progress",...} each second and when all is done  {"ev":"end",...}
            {"ev":"error","message":...,"where":...,"remedy":...} and exit status 1

Owns the protocol.  Must always hold: nothing else ever reaches stdout (a stray print goes to stderr); a parent that
died, or reads no more, never keeps this process from noting its requests and ending.  Ctrl-C in a terminal reaches the
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
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import uvloop

from loadgen.building import Builder, Frames
from loadgen.dispatch import Dispatcher
from loadgen.job import CallSource, SendSettings
from loadgen.recorder import Recorder
from loadgen.spool import Common, Spool
from loadgen.vitals import lock_memory, raise_file_limit
from models.errors import UserError

Loader = Callable[[Path, int, int], tuple[SendSettings, CallSource | Frames]]

_SPARE_FILES: Final = 64  # descriptors that are not connections
_COMMAND_LIMIT: Final = 1 << 20
LAST_ROWS_S: Final = 4.0  # what an end waits for the last rows; the parent waits for what is left


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
        self._spool: Spool | None = None
        self._recorder: Recorder | None = None
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
            if self._builder is not None:
                self._builder.close()
            await self._close_rows()
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
        common = Common(self._worker, settings.model, settings.keep_text, settings.tokenizer_ref)
        name = f"worker-{self._worker}"
        self._recorder = Recorder(Path(str(command["bundle"])), name, common, attempts=settings.patience is not None)
        self._spool = Spool(self._recorder.folder, common, self._recorder.notify)
        files = raise_file_limit()
        self._dispatcher = Dispatcher(settings, source, self._spool, self._worker, self._on_drained)
        await self._dispatcher.prepare()
        await self._recorder.ready()
        self._locked = lock_memory()
        self._output.emit(
            "ready",
            worker=self._worker,
            requests=self._dispatcher.requests,
            monotonic_ns=time.monotonic_ns(),
            file_limit=files,
            warnings=[*connection_warnings(settings, self._dispatcher.requests, files), *self._dispatcher.warnings],
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
            fields = dispatcher.vitals.summary()  # of the sending: the last rows are not part of it
            self._output.emit("progress", **self._progress(dispatcher))
            await self._close_rows()
            fields |= {"write_error": self._write_error, "memory_locked": self._locked}
            fields |= {"built_late": dispatcher.built_late, "recorder_cpu_s": self._recorder_cpu_s}
            self._output.emit("end", sent=dispatcher.sent, done=dispatcher.done, **fields)

    async def _close_rows(self) -> None:
        """Write what is noted, and give the recorder some time for the last rows; again: nothing."""
        if self._spool is not None and self._recorder is not None:
            try:
                self._spool.close()
            finally:
                await self._recorder.close(LAST_ROWS_S)

    @property
    def _write_error(self) -> str | None:
        """Why rows are missing on disk at present; None: none are."""
        found = (one.error for one in (self._spool, self._recorder) if one is not None)
        return next(filter(None, found), None)

    @property
    def _recorder_cpu_s(self) -> float | None:
        return self._recorder.cpu_s if self._recorder is not None else None

    def _progress(self, dispatcher: Dispatcher) -> dict[str, Any]:
        return {**dispatcher.progress(), "write_error": self._write_error}

    async def _report(self) -> None:
        """The progress each second, on the second."""
        assert self._dispatcher is not None
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += 1.0
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._output.emit("progress", **self._progress(self._dispatcher))

    def _on_drained(self) -> None:
        if self._dispatcher is not None:
            self._output.emit("progress", **self._progress(self._dispatcher))

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: a fault of ours.  Keep what is there, then say so and end."""
        loop.default_exception_handler(context)
        if self._fault is None:
            found = context.get("exception")
            self._fault = found if found is not None else RuntimeError(str(context.get("message")))
            self._commands.put_nowait(None)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Thread: lines of stdin to commands; a line that is no JSON object becomes a command that no one knows."""

        def obey(command: dict[str, Any] | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: all is done
                loop.call_soon_threadsafe(self._commands.put_nowait, command)

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
                obey(known)
            if not data or len(rest) > _COMMAND_LIMIT:
                obey(None)
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
