"""The calls of one worker, built in a process of their own: prompts cost up to milliseconds, a send must not wait.

Owns both halves: the builder (`python -m loadgen.building PLAN WORKER WORKERS`), which makes one call after another and
writes them to its stdout, and `Builder`, the CallSource that reads them in the sender.  The pipe between them and the
look-ahead of the dispatcher are all that is built ahead.  Must always hold: the calls and their order are those of
loadgen.calls; the sender's event loop builds nothing, it only unpacks what has arrived; a builder that ends before its
last call is an error, never a shorter run; when the sender goes, the builder ends at its next write.

    a frame: 4 bytes of length, big endian, then marshal of the fields of a Call in their order (tuple), or of the
    message, place and remedy of an error (dict)
"""

from __future__ import annotations

import asyncio
import fcntl
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, Final

from loadgen.job import Call
from models.errors import UserError

PIPE_BYTES: Final = 1 << 20
READ_BYTES: Final = 256 << 10
NICE: Final = 5  # the sender comes first where both have one core
_FIELDS: Final = tuple(field.name for field in fields(Call))


class Frames:
    """Calls from a file descriptor that another process writes; a CallSource that may be not ready.  count: how many.

    Iterating gives None where the next call has not arrived; the function given to `when_ready` is called, on the
    event loop, once when there is more.  Raises UserError: the error of the other side, or its end before the last.
    """

    def __init__(self, fd: int, count: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._count = count
        self._buffer = bytearray()
        self._ended = False

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Call | None]:
        for _ in range(self._count):
            while (call := self._next()) is None:
                yield None
            yield call

    def when_ready(self, ready: Callable[[], None]) -> None:
        """Call `ready` once, when there is more to read."""
        loop = asyncio.get_running_loop()

        def heard() -> None:
            loop.remove_reader(self._fd)
            ready()

        loop.add_reader(self._fd, heard)

    def close(self) -> None:
        """Read no more; the other side ends at its next write.  May be called twice."""
        if self._fd >= 0:
            with suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _next(self) -> Call | None:
        while True:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) >= 4 + size and size:
                found = marshal.loads(memoryview(self._buffer)[4 : 4 + size])
                del self._buffer[: 4 + size]
                if isinstance(found, dict):
                    raise UserError(found["message"], where=found["where"], remedy=found["remedy"])
                return Call(*found)
            if self._ended:
                raise UserError(
                    "the process that builds the prompts ended before the last of them",
                    where="loadgen.building",
                    remedy="see the sender's log in the bundle; it may have run out of memory",
                )
            if not self._read():
                return None

    def _read(self) -> bool:
        """Take what the pipe holds; False where that is nothing."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        self._ended = not data
        self._buffer += data
        return True


class Builder(Frames):
    """Starts the builder of one worker's calls.  count: how many calls the plan has for it."""

    def __init__(self, plan: Path, worker: int, workers: int, count: int) -> None:
        command = [sys.executable, "-m", "loadgen.building", str(plan), str(worker), str(workers)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        super().__init__(os.dup(self._process.stdout.fileno()), count)
        self._process.stdout.close()
        # Its end is taken note of at once: until then a builder that has done its work stays in the process table.
        self._reaper = threading.Thread(target=self._process.wait, name="builder", daemon=True)
        self._reaper.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the builder, whatever it is at."""
        super().close()
        self._process.kill()
        self._reaper.join()


def frame(content: tuple[Any, ...] | dict[str, str | None]) -> bytes:
    """One frame."""
    data = marshal.dumps(content)
    return len(data).to_bytes(4, "big") + data


def packed(call: Call) -> bytes:
    """The frame of a call."""
    return frame(tuple(getattr(call, name) for name in _FIELDS))


def build(plan: Path, worker: int, workers: int, out: BinaryIO) -> None:
    """Write every call of one worker; an error of the user's becomes a frame.  Raises OSError when nobody reads."""
    from loadgen.plan import load_worker

    try:
        for call in load_worker(plan, worker, workers)[1]:
            assert call is not None
            out.write(packed(call))
            out.flush()
    except UserError as error:
        out.write(frame({"message": error.message, "where": error.where, "remedy": error.remedy}))
    out.flush()


def main() -> int:
    """The builder process."""
    plan, worker, workers = sys.argv[1:]
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print goes to the log
    with suppress(OSError):
        fcntl.fcntl(out.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # Linux
    with suppress(OSError):
        os.nice(NICE)
    with suppress(BrokenPipeError):
        build(Path(plan), int(worker), int(workers), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
