"""What a command prints goes where the user sent it, and when that fails the command still ends as it should.

Must always hold: a reader that has had enough, a closed descriptor and a full disk change nothing of what a command
does; a load goes on to its end.  What could not be written is told at the end, by exit code 4, unless it was only that
the reader of a pipe left.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from telemetry.names import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Descriptor(io.FileIO):
    """Takes all that is written to a descriptor; after the first failure to nobody.  problem: what failed."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.problem: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Never raises."""
        try:
            return super().write(data)
        except OSError as error:
            self.problem = None if isinstance(error, BrokenPipeError) else error
            nobody = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nobody, self.fileno())
            os.close(nobody)
            return memoryview(data).nbytes


class StandardStreams:
    """stdout and stderr of this process from here on."""

    def __init__(self) -> None:
        for descriptor in (0, 1, 2):  # a file that is opened later must not take the place of a closed one
            try:
                os.fstat(descriptor)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
        self._out, self._err = Descriptor(1), Descriptor(2)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.flush()
        sys.stdout, sys.stderr = _text(self._out, sys.stdout), _text(self._err, sys.stderr)

    def finish(self, code: int) -> int:
        """The exit code, given the one that the command ended with."""
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        problem = self._out.problem
        if problem is None:
            return code
        print(
            f"error: standard output: cannot be written: {problem.strerror}\n"
            f"  remedy: make room, or send it elsewhere; what was to be printed would have ended with exit code {code}",
            file=sys.stderr,
        )
        return code if code in (EXIT_INTERNAL, EXIT_INTERRUPTED) else EXIT_USAGE


def _text(raw: Descriptor, before: object) -> io.TextIOWrapper:
    """A text stream like the one before."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    errors = getattr(before, "errors", None) or "backslashreplace"
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=raw.isatty() or raw.fileno() == 2
    )
