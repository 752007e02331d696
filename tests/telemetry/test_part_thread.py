"""A part written on a thread: a disk that stops delays nobody, a full one loses nothing, the order holds."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from models.errors import UserError
from telemetry import parts
from telemetry.part_thread import ThreadedPart
from telemetry.parts import read_table

SCHEMA = pa.schema([pa.field("index", pa.int64(), nullable=False)])


class Disk:
    """Stands before os.write: waits while `stopped`, fails while `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.full = False
        self.written = threading.Event()
        self._write = os.write
        monkeypatch.setattr(parts.os, "write", self)

    def __call__(self, fd: int, data: bytes) -> int:
        assert self.go.wait(20)
        try:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._write(fd, data)
        finally:
            self.written.set()


def indices(folder: Path) -> list[int]:
    return read_table(folder, SCHEMA).table.column("index").to_pylist()


def test_a_disk_that_stops_delays_no_flush_and_the_order_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    writer = ThreadedPart(tmp_path, SCHEMA, "w")
    disk.go.clear()
    for index in range(20):
        writer.append({"index": index})
        assert not writer.flush()  # would wait for ever if it wrote itself
    assert indices(tmp_path) == []
    disk.go.set()
    writer.close()
    writer.close()
    assert indices(tmp_path) == list(range(20))


def test_a_full_disk_is_said_tried_again_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    writer = ThreadedPart(tmp_path, SCHEMA, "w")
    disk.full = True
    disk.written.clear()
    writer.append({"index": 0})
    writer.flush()
    assert disk.written.wait(20)
    disk.full = False
    writer.append({"index": 1})
    writer.flush()
    writer.close()
    assert indices(tmp_path) == [0, 1]


def test_rows_that_cannot_be_written_to_the_end_are_an_error_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    writer = ThreadedPart(tmp_path, SCHEMA, "w")
    writer.append({"index": 0})
    writer.flush()
    disk.written.clear()
    disk.full = True
    writer.append({"index": 1})
    with pytest.raises(UserError, match="No space left"):
        writer.close()
    assert writer.error == "No space left on device"
