"""Writing a part of a bundle's table, so that a kill -9 loses at most the last flush; read by ``telemetry.parts``.

Must always hold: bytes before the last complete message of a part are never rewritten.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from models.errors import UserError
from telemetry.parts import END_OF_STREAM, PART_KEY, VERSION_KEY
from telemetry.schema import SCHEMA_VERSION


class PartWriter:
    """Appends rows to a part file of its own; ``flush`` hands them to the operating system as one record batch.

    A full disk (or any other OSError) does no harm to what was written: the half-written message is cut off again,
    the rows stay in memory, ``error`` says why, and the next flush tries again; ``close`` raises UserError if rows
    are left.  Not thread-safe: one writer, one thread.
    """

    def __init__(self, folder: Path, schema: pa.Schema, worker_name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.part_id = uuid.uuid4().hex
        self._schema = schema
        self._names: list[str] = schema.names
        self._empty: dict[str, Any] = dict.fromkeys(schema.names)
        self._rows: list[tuple[Any, ...]] = []  # in the order of the schema
        self._unwritten: list[bytes] = []
        self.error: str | None = None
        self.rows_written = 0
        head = schema.with_metadata({VERSION_KEY: str(SCHEMA_VERSION), PART_KEY: self.part_id}).serialize().to_pybytes()
        _batch_of([], schema)  # Arrow's first conversion loads modules: not in mid-run
        self.path, self._fd = _create(folder, worker_name)
        self._length = 0
        self._unwritten.append(head)
        self._drain()

    def append(self, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Buffer a row or rows.  Missing columns become null; a column the schema lacks raises ValueError."""
        one = type(rows) is dict or isinstance(rows, Mapping)  # the first is what comes, and quick to see
        for row in cast("Sequence[Mapping[str, Any]]", [rows] if one else rows):
            full = row
            if list(row) != self._names:  # not all columns, or in another order
                full = {**self._empty, **row}
                if len(full) > len(self._empty):
                    unknown = row.keys() - self._empty.keys()
                    raise ValueError(f"no such column in {self.path.parent.name}: {', '.join(sorted(unknown))}")
            self._rows.append(tuple(full.values()))

    def append_table(self, table: pa.Table) -> None:
        """Write rows that are columns already, behind those appended before.  Raises ValueError: another schema."""
        self.flush()
        table = table.cast(self._schema)  # another schema is a ValueError
        for name in (field.name for field in self._schema if not field.nullable):
            if table.column(name).null_count:
                raise ValueError(f"{self.path.name}: {name} is missing in {table.column(name).null_count} rows")
        for batch in table.to_batches():
            self._unwritten.append(batch.serialize().to_pybytes())
            self.rows_written += batch.num_rows
        self._drain()

    @property
    def buffered(self) -> int:
        """Rows appended and not yet turned into a record batch."""
        return len(self._rows)

    def flush(self) -> bool:
        """Write what is buffered; true when the operating system holds every row.  Cost: 4 to 15 us a row.

        Raises ValueError for a row that does not fit the schema (a wrong type, a null where none may be); the other
        rows are written all the same.
        """
        rows, self._rows = self._rows, []
        misfits: list[str] = []
        if rows:
            batch, misfits = _to_batch(rows, self._schema)
            if batch.num_rows:
                self._unwritten.append(batch.serialize().to_pybytes())
                self.rows_written += batch.num_rows
        done = self._drain()
        if misfits:
            raise ValueError(f"{self.path.name}: {len(misfits)} rows do not fit the schema, first: {misfits[0]}")
        return done

    def close(self) -> None:
        """Flush, end the stream, and make it durable.  Closing twice is harmless."""
        if self._fd < 0:
            return
        try:
            if self.flush():
                self._unwritten.append(END_OF_STREAM)
                self._drain()
            if self._unwritten != [] and self._unwritten != [END_OF_STREAM]:
                raise UserError(
                    f"rows could not be written: {self.error}",
                    where=str(self.path),
                    remedy="free space on that disk; all rows before these are intact",
                )
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drain(self) -> bool:
        while self._unwritten:
            message = self._unwritten[0]
            try:
                done = 0
                while done < len(message):
                    done += os.write(self._fd, message[done:])
            except OSError as problem:
                self.error = problem.strerror or str(problem)
                os.ftruncate(self._fd, self._length)
                os.lseek(self._fd, self._length, os.SEEK_SET)
                return False
            self._length += len(message)
            self._unwritten.pop(0)
        self.error = None
        return True


def _create(folder: Path, name: str) -> tuple[Path, int]:
    """A new file for this writer alone: a restarted worker never appends to the torn part of its predecessor."""
    for attempt in range(1, 10_000):
        path = folder / (f"part-{name}.arrow" if attempt == 1 else f"part-{name}-{attempt}.arrow")
        try:
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue
    raise UserError(f"10,000 parts named {name!r} already", where=str(folder), remedy="remove the folder")


def _batch_of(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows, their values in the order of the schema, as a record batch."""
    count = len(rows)
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [
        pa.array(values, field.type)
        if not values or values[0] is not None or values.count(None) < count
        else pa.nulls(count, field.type)
        for values, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _to_batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> tuple[pa.RecordBatch, list[str]]:
    """The rows that fit, and of each of the others what does not."""
    required = [(n, field.name) for n, field in enumerate(schema) if not field.nullable]
    try:
        if all(row[n] is not None for n, _ in required for row in rows):
            return _batch_of(rows, schema), []
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass  # find the culprits below, one row at a time
    fitting, misfits = [], []
    for row in rows:
        missing = [name for n, name in required if row[n] is None]
        told = {name: value for name, value in zip(schema.names, row, strict=True) if value is not None}
        try:
            _batch_of([row], schema)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as problem:
            misfits.append(f"{problem} in {told!r:.300}")
        else:
            if missing:
                misfits.append(f"{', '.join(missing)} missing in {told!r:.300}")
            else:
                fitting.append(row)
    return _batch_of(fitting, schema), misfits
