"""Part files of a bundle's tables: reading them and gathering them into one; ``telemetry.part_writer`` writes them.

Owns: the files in ``<bundle>/<table>/``.  While a run goes, each writer appends to its own ``part-<name>.arrow``: an
Arrow IPC stream, a schema message with a part id, then one record batch a flush.  Later ``data.parquet`` holds all.
Must always hold:
  * bytes before the last complete message of a part are never rewritten;
  * a row is read exactly once: a Parquet file lists the ids of the parts that it took over, and a part so listed is
    ignored, so that a crash between "rename the Parquet file" and "remove the parts" leaves no duplicates;
  * a torn tail costs the rows of its last, incomplete message, is counted, and never makes the rest unreadable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from models.errors import UserError
from telemetry.schema import SCHEMA_VERSION

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # Arrow IPC stream format
VERSION_KEY: Final = b"tailspan.schema_version"
PART_KEY: Final = b"tailspan.part_id"
COVERED_KEY: Final = b"tailspan.covered_parts"  # in data.parquet: JSON list of the part ids it holds
TORN_KEY: Final = b"tailspan.torn_bytes"  # in data.parquet: bytes of torn tails met when it was made
DATA_FILE: Final = "data.parquet"
ROW_GROUP: Final = 65_536  # rows held in memory at most while compacting


@dataclass(frozen=True, slots=True)
class PartInfo:
    """What one file of a table holds.  torn_bytes: length of the incomplete tail that was ignored."""

    path: Path
    part_id: str | None
    rows: int
    torn_bytes: int


@dataclass(frozen=True, slots=True)
class TableRead:
    """A table with where it came from."""

    table: pa.Table
    parts: tuple[PartInfo, ...]

    @property
    def torn_bytes(self) -> int:
        return sum(part.torn_bytes for part in self.parts)


def read_table(folder: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> TableRead:
    """All rows of a table: Parquet and Arrow parts, the columns of ``schema`` (or those named) and any further ones.

    A column that an older part lacks is filled with nulls.  UserError when a part's schema version is unknown.
    """
    for attempt in range(3):
        try:
            return _read_once(folder, schema, columns)
        except FileNotFoundError:  # compacted between listing and opening: look again
            if attempt == 2:
                raise
    raise AssertionError("unreachable")


def _read_once(folder: Path, schema: pa.Schema, columns: Sequence[str] | None) -> TableRead:
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    tables, infos = [], []
    covered: set[str] = set()
    for path in sorted(folder.glob("*.parquet")):
        try:
            with pq.ParquetFile(path) as file:
                metadata = _file_metadata(file, path)
                covered.update(json.loads(metadata.get(COVERED_KEY, b"[]")))
                present = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
                table = file.read(columns=present)
        except (pa.ArrowException, ValueError) as problem:
            raise UserError(
                f"no whole Parquet file: {problem}", where=str(path), remedy="restore it from a copy of the bundle"
            ) from problem
        tables.append(_align(table, wanted, extras=columns is None))
        infos.append(PartInfo(path, None, table.num_rows, int(metadata.get(TORN_KEY, b"0"))))
    for path in sorted(folder.glob("*.arrow")):
        batches = _Stream(path)
        if batches.part_id in covered:
            continue
        kept = [
            _align(pa.Table.from_batches([batch], batches.schema), wanted, extras=columns is None) for batch in batches
        ]
        tables.extend(kept)
        if batches.part_id is not None:
            covered.add(batches.part_id)  # the same part shipped twice counts once
        infos.append(PartInfo(path, batches.part_id, sum(t.num_rows for t in kept), batches.torn_bytes))
    if not tables:
        return TableRead(wanted.empty_table(), tuple(infos))
    return TableRead(pa.concat_tables(tables, promote_options="default"), tuple(infos))


class _Stream:
    """Record batches of one Arrow part, up to its torn tail; ``torn_bytes`` is final once iterated."""

    def __init__(self, path: Path) -> None:
        self.torn_bytes = 0
        self.part_id: str | None = None
        self.schema = pa.schema([])
        # Read, not mapped: a writer on a full disk cuts its torn tail off, and touching a page beyond the end kills.
        self._path = path
        self._source = pa.OSFile(str(path))
        self._reader: pa.RecordBatchStreamReader | None = None
        try:
            self._reader = pa.ipc.open_stream(self._source)
        except (pa.ArrowException, OSError):
            self.torn_bytes = self._source.size()
            return
        self.schema = self._reader.schema
        metadata = self.schema.metadata or {}
        _check_version(metadata, path)
        if PART_KEY in metadata:
            self.part_id = metadata[PART_KEY].decode()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._reader is None:
            return
        intact = self._source.tell()
        while True:
            try:
                batch = self._reader.read_next_batch()
                batch.validate()
            except StopIteration:
                self._source.seek(intact)
                tail = self._source.read(len(END_OF_STREAM) + 1)
                self.torn_bytes = 0 if tail == END_OF_STREAM else self._beyond(intact)
                return
            except (pa.ArrowException, OSError):
                self.torn_bytes = self._beyond(intact)
                return
            intact = self._source.tell()
            yield batch

    def _beyond(self, intact: int) -> int:
        """Bytes behind the last whole batch.  Asked anew: Arrow knows the size at opening, and the file may grow."""
        try:
            size = self._path.stat().st_size
        except OSError:
            size = int(self._source.size())
        return max(0, size - intact)


def _file_metadata(file: pq.ParquetFile, path: Path) -> Mapping[bytes, bytes]:
    metadata: Mapping[bytes, bytes] = file.metadata.metadata or {}
    _check_version(metadata, path)
    return metadata


def _check_version(metadata: Mapping[bytes, bytes], path: Path) -> None:
    version = metadata.get(VERSION_KEY, b"missing").decode(errors="replace")
    if version.isdigit() and 1 <= int(version) <= SCHEMA_VERSION:
        return
    if version.isdigit():
        raise UserError(
            f"written with table schema {version}; this version of tailspan reads up to {SCHEMA_VERSION}",
            where=str(path),
            remedy="open the bundle with the version that its manifest names under versions, or a newer one",
        )
    raise UserError(
        f"its table schema version is {version}, so the meaning of its columns is unknown",
        where=str(path),
        remedy="put only files written by tailspan into a bundle",
    )


def _align(table: pa.Table, schema: pa.Schema, *, extras: bool) -> pa.Table:
    """Same columns in the same order and types; nulls for what an older part lacks; further columns kept behind."""
    names = set(table.column_names)
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in names
        else pa.chunked_array([pa.nulls(table.num_rows, field.type)], type=field.type)
        for field in schema
    ]
    fields = [pa.field(field.name, field.type) for field in schema]
    if extras:
        known = set(schema.names)
        for field in table.schema:
            if field.name not in known:
                columns.append(table.column(field.name))
                fields.append(pa.field(field.name, field.type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def compact(folder: Path, schema: pa.Schema, transform: Callable[[pa.Table], pa.Table] | None = None) -> bool:
    """Gather all parts of a table into ``data.parquet`` (zstd), then remove them; false when there was nothing to do.

    transform: applied to each slice of rows on its way (the text policy).  Atomic: a temporary file is synced and
    renamed, and only then are parts removed; rerun after a crash at any point, it ends in the same state.  UserError on
    a full disk, with every part still there.  Memory: one row group.  Call it only when no writer is left.
    """
    arrows = sorted(folder.glob("*.arrow"))
    parquets = sorted(folder.glob("*.parquet"))
    for left in folder.glob(".*.tmp"):
        left.unlink()
    if not arrows and [path.name for path in parquets] in ([], [DATA_FILE]):
        return False
    temporary = folder / f".{DATA_FILE}.tmp"
    try:
        _write_compacted(temporary, arrows, parquets, schema, transform)
        temporary.replace(folder / DATA_FILE)
        sync_folder(folder)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"could not be compacted: {problem.strerror or problem}; its parts are untouched",
            where=str(folder),
            remedy="free space on that disk, then: tailspan runs check --repair",
        ) from problem
    for path in [*arrows, *(path for path in parquets if path.name != DATA_FILE)]:
        path.unlink(missing_ok=True)
    return True


def _write_compacted(
    temporary: Path,
    arrows: Iterable[Path],
    parquets: Iterable[Path],
    schema: pa.Schema,
    transform: Callable[[pa.Table], pa.Table] | None,
) -> None:
    covered: list[str] = []
    torn = 0
    extra = _extra_fields([*parquets, *arrows], schema)
    full = pa.schema([*(pa.field(field.name, field.type) for field in schema), *extra])
    with pq.ParquetWriter(temporary, full.with_metadata({VERSION_KEY: str(SCHEMA_VERSION)}), compression="zstd") as out:
        pending: list[pa.Table] = []

        def write(table: pa.Table | None) -> None:
            if table is not None and table.num_rows:
                pending.append(_align(table, full, extras=False))
            if pending and (table is None or sum(t.num_rows for t in pending) >= ROW_GROUP):
                joined = pa.concat_tables(pending)
                out.write_table(joined if transform is None else transform(joined), row_group_size=ROW_GROUP)
                pending.clear()

        for path in parquets:
            with pq.ParquetFile(path) as file:
                metadata = _file_metadata(file, path)
                covered.extend(json.loads(metadata.get(COVERED_KEY, b"[]")))
                torn += int(metadata.get(TORN_KEY, b"0"))
                for group in range(file.num_row_groups):
                    write(file.read_row_group(group))
        for path in arrows:
            batches = _Stream(path)
            if batches.part_id in covered:
                continue
            for batch in batches:
                write(pa.Table.from_batches([batch], batches.schema))
            if batches.part_id is not None:
                covered.append(batches.part_id)
            torn += batches.torn_bytes
        write(None)
        out.add_key_value_metadata({COVERED_KEY: json.dumps(covered), TORN_KEY: str(torn)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())


def _extra_fields(paths: Iterable[Path], schema: pa.Schema) -> list[pa.Field]:
    found: dict[str, pa.Field] = {}
    for path in paths:
        names = pq.read_schema(path) if path.suffix == ".parquet" else _Stream(path).schema
        for field in names:
            if field.name not in schema.names:
                found.setdefault(field.name, pa.field(field.name, field.type))
    return list(found.values())


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by rename, so that a reader sees the old content or the new one, never a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
