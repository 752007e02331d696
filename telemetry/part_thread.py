"""A part file whose bytes go to the disk on a thread, so that a slow disk delays no event loop.

Owns that thread.  Must always hold: rows are turned into bytes by the caller (a thread that did it would hold the
interpreter), the thread does nothing but write; the order of the messages is that of the flushes.  Where a journal
commits, one write to a file has been seen to take 80 ms.
"""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import pyarrow as pa

from telemetry.part_writer import PartWriter


class ThreadedPart(PartWriter):
    """As PartWriter; ``flush`` returns at once, true when nothing is left to write, and ``error`` may come later."""

    def __init__(self, folder: Path, schema: pa.Schema, worker_name: str) -> None:
        self._wanted: SimpleQueue[bool] | None = None  # until then the caller writes
        super().__init__(folder, schema, worker_name)
        self._wanted = SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(self._wanted,), name="rows", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the thread finish, then as PartWriter."""
        if self._wanted is not None:
            self._wanted.put(False)
            self._thread.join()
            self._wanted = None
        super().close()

    def _drain(self) -> bool:
        if self._wanted is None:
            return super()._drain()
        self._wanted.put(True)
        return not self._unwritten

    def _write(self, wanted: SimpleQueue[bool]) -> None:
        while wanted.get():
            super()._drain()
