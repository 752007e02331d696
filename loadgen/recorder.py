"""The rows of one sender, made in a process of their own: a row costs more than the sending, and a send must not wait.

Owns both halves: the recorder (`python -m loadgen.recorder JSON`), which reads the sender's spool and writes the parts
of the bundle, and `Recorder`, its handle in the sender.  Must always hold: it yields the processor to the sender at
once, wherever both have one (SCHED_IDLE), until the sender has ended; when the sender goes, whatever way, it makes the
rows that are left and ends; whoever makes rows of a spool holds its lock.

    argument  {"bundle":FOLDER,"name":PART,"attempts":bool,...}  the rest: loadgen.spool.Common
    stdin     any byte: there is more to read.  End of file: that was the last
    stdout    JSON lines: {"ev":"ready"}, each second and at the end {"ev":"made","error":why or null,...}, and
              {"ev":"error","message":...,"where":...,"remedy":...} with status 1
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loadgen.spool import FOLDER, LOCK, Common, Kept, SpoolReader, folder_for
from models.errors import UserError

if TYPE_CHECKING:
    from loadgen.row_maker import Tokenizer

READY_LIMIT_S: Final = 60.0
TELL_S: Final = 1.0
FLUSH_S: Final = 1.0
LOCK_LIMIT_S: Final = 300.0  # for a recorder to make the rows of a long backlog
_POLL_S: Final = 0.05


class Recorder:
    """Starts the recorder of a sender and hears of it."""

    def __init__(self, bundle: Path, name: str, common: Common, *, attempts: bool) -> None:
        self.folder = folder_for(bundle, name, common.keep_text)
        self.cpu_s: float | None = None  # once it has ended
        self.error: str | None = None  # why rows cannot be written at present
        words = {"bundle": str(bundle), "name": name, "attempts": attempts, **asdict(common)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.recorder", json.dumps(words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._rest = b""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._out, self._hear)

    async def ready(self) -> None:
        """Wait until it can make rows: it takes its start's CPU before the run has begun.  Raises UserError."""
        async with asyncio.timeout(READY_LIMIT_S):
            await self._ready

    def notify(self) -> None:
        """There is more to read.  From any thread."""
        with suppress(BlockingIOError, BrokenPipeError, OSError):  # full: it knows; gone: `error` says so
            os.write(self._in, b"\n")

    async def close(self, limit_s: float) -> None:
        """Nothing comes any more: wait so long for the last row, then leave it to its work; `recover` waits for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._over

    def _hear(self) -> None:
        try:
            data = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        if not data:
            asyncio.get_running_loop().remove_reader(self._out)
            gone = UserError(
                "the process that makes the rows ended before its time",
                where="loadgen.recorder",
                remedy="the rows are made at the end of the run; see the sender's log in the bundle for the reason",
            )
            if self.cpu_s is None and self.error is None:
                self.error = gone.message
            if not self._ready.done():
                self._ready.set_exception(gone)
            if not self._over.done():
                self._over.set_result(None)

    def _take(self, told: dict[str, Any]) -> None:
        if told["ev"] == "error":
            self.error = told["message"]
            if not self._ready.done():
                self._ready.set_exception(UserError(told["message"], where=told["where"], remedy=told["remedy"]))
        elif told["ev"] == "ready":
            self._ready.set_result(None)
        else:
            self.error, self.cpu_s = told["error"], told.get("cpu_s")


def tokenizer_of(common: Common) -> Tokenizer | None:
    """The tokenizer that counts the answers, ready to work.  Raises UserError: there is no such one."""
    if not common.tokenizer_ref:
        return None
    from models.store import load_reference

    tokenizer = load_reference(common.tokenizer_ref).tokenizer
    tokenizer.encode_plain("")  # built at its first use
    return tokenizer


class RowParts:
    """The parts that rows go to: requests and, of a run with patience, attempts."""

    def __init__(self, bundle: Path, name: str, common: Common, tokenizer: Tokenizer | None, *, attempts: bool) -> None:
        from loadgen.row_maker import RowMaker
        from telemetry.part_writer import PartWriter
        from telemetry.schema import ATTEMPTS, REQUESTS

        self.rows = 0
        self.misfit: str | None = None
        self._requests = PartWriter(bundle / "requests", REQUESTS, name)
        self._attempts = PartWriter(bundle / "attempts", ATTEMPTS, name) if attempts else None
        self._maker = RowMaker(self._requests, common.worker, tokenizer, model=common.model, keep_text=common.keep_text)

    @property
    def error(self) -> str | None:
        """Why rows cannot be written, or were not."""
        return self.misfit or self._requests.error or (self._attempts.error if self._attempts is not None else None)

    def add(self, one: Kept | dict[str, Any], zero_ns: int) -> None:
        """Make its row."""
        if isinstance(one, dict):
            if self._attempts is not None:
                self._attempts.append(one)
            return
        self._maker.zero_ns = zero_ns
        self._maker.make(one)
        self.rows += 1
        if self._maker.full:
            self.flush()

    def flush(self) -> bool:
        """Hand on what is made; true when the operating system holds it all."""
        try:
            self._maker.flush()
            if self._attempts is not None:
                self._attempts.flush()
        except ValueError as problem:  # a row that does not fit; the others are written
            self.misfit = str(problem)
        return self.error is None or self.error == self.misfit

    def close(self) -> None:
        """Raises UserError where rows are left that a full disk did not take."""
        with ExitStack() as stack:
            for part in filter(None, (self._requests, self._attempts)):
                stack.callback(part.close)


@contextmanager
def locked(folder: Path, limit_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a spool; false where another process still has it after `limit_s`."""
    end = time.monotonic() + limit_s
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    yield False
                    return
                time.sleep(_POLL_S)
            else:
                yield True
                return
    finally:
        os.close(fd)


class Recording:
    """The recorder's work: a thread that yields to everyone follows the sender, one that does not makes the rest."""

    def __init__(self, folder: Path, parts: RowParts, tell: Callable[..., None]) -> None:
        self._parts, self._tell = parts, tell
        self._reader = SpoolReader(folder)
        self._more = threading.Event()
        self._over = False
        self._fault: BaseException | None = None

    def run(self) -> None:
        """Until the end of stdin, and what is left then.  Raises UserError."""
        follower = threading.Thread(target=self._follow, name="follow")
        follower.start()
        while os.read(0, 1 << 16):
            self._more.set()
        self._over = True
        self._more.set()
        follower.join()
        if self._fault is not None:
            raise self._fault
        self._make()
        self._parts.close()
        self._reader.close()

    def _follow(self) -> None:
        try:
            yield_to_others()
            told = flushed = time.monotonic()
            while not self._over:
                self._more.wait(FLUSH_S)
                self._more.clear()
                self._make(while_it_lasts=True)
                now = time.monotonic()
                if now - flushed >= FLUSH_S:
                    flushed = now
                    if self._parts.flush():
                        self._reader.forget()
                if now - told >= TELL_S:
                    told = now
                    self._tell("made", error=self._parts.error)
        except BaseException as fault:  # for the thread that waits
            self._fault = fault
            self._tell("made", error=f"{type(fault).__name__}: {fault}")

    def _make(self, *, while_it_lasts: bool = False) -> None:
        """The rows of all that is there; while_it_lasts: until the sender has ended."""
        for one in self._reader.records():
            assert self._reader.common is not None
            self._parts.add(one, self._reader.common.zero_ns)
            if while_it_lasts and self._over:
                return


def record(words: dict[str, Any], tell: Callable[..., None]) -> None:
    """The recorder's life; tell: writes an event to the sender.  Raises UserError."""
    bundle, name, attempts = Path(words.pop("bundle")), words.pop("name"), words.pop("attempts")
    folder = bundle / FOLDER / name
    with locked(folder) as alone:
        if not alone:
            raise UserError(f"another process makes the rows of {name}", where=str(folder))
        common = Common(**words)
        parts = RowParts(bundle, name, common, tokenizer_of(common), attempts=attempts)
        tell("ready")
        Recording(folder, parts, tell).run()
        clear(folder)
        tell("made", error=parts.error, cpu_s=time.process_time())


def clear(folder: Path) -> None:
    """Remove a spool, whose rows are safe, and the folder of spools with the last of them."""
    shutil.rmtree(folder.resolve(), ignore_errors=True)
    if folder.is_symlink():
        folder.unlink()
    with suppress(OSError):
        folder.parent.rmdir()


def yield_to_others() -> None:
    """This thread runs only where nobody else wants the processor (Linux; elsewhere it has a low priority).

    For good: who may not raise a priority cannot take this back either.
    """
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(10)


def main() -> int:
    """The recorder process."""
    out = os.dup(1)
    os.dup2(2, 1)  # a stray print goes to the log

    def tell(event: str, **fields: Any) -> None:
        with suppress(OSError):  # the sender is gone: its rows are made all the same
            os.write(out, json.dumps({"ev": event, **fields}).encode() + b"\n")

    try:
        record(json.loads(sys.argv[1]), tell)
    except UserError as error:
        tell("error", message=error.message, where=error.where, remedy=error.remedy)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
