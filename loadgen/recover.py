"""Rows that were noted and never made, since their recorder died too: made from what it left (`loadgen.spool`).

Usage: python -m loadgen.recover BUNDLE     where rows are about to leave this machine
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadgen.recorder import LOCK_LIMIT_S, RowParts, clear, locked, tokenizer_of
from loadgen.spool import FOLDER, Kept, Row, SpoolReader
from models.errors import UserError
from telemetry.parts import read_table
from telemetry.schema import ATTEMPTS, REQUESTS

Key = tuple[int, int]  # index and attempt; of a request, -1


def recover(bundle: Path, limit_s: float = LOCK_LIMIT_S) -> int:
    """Make the rows that are missing in the bundle at this path; how many.  Only when its senders have ended.

    Waits up to `limit_s` for recorders that are still at work.  May be cut off anywhere and called again.  Raises
    UserError: a recorder that does not end, a full disk; then what was noted is still there.
    """
    if not (bundle / FOLDER).is_dir():
        return 0
    made = 0
    for folder in sorted((bundle / FOLDER).iterdir()):
        try:
            with locked(folder, limit_s) as alone:
                if not alone:
                    raise UserError(
                        f"the rows of {folder.name} are still being made after {limit_s:g} s",
                        where=str(folder),
                        remedy="wait for the process that does (loadgen.recorder), then tailspan runs check --repair",
                    )
                made += _made(bundle, folder)
                clear(folder)
        except FileNotFoundError:
            if folder.is_symlink():  # it lay in memory, and the machine was started anew
                folder.unlink()
    return made


def _made(bundle: Path, folder: Path) -> int:
    there = _there(bundle)
    reader, parts = SpoolReader(folder), None
    records = reader.records()
    while (one := _next(reader, records)) is not None:
        assert reader.common is not None
        key = (one["index"], one["attempt"]) if isinstance(one, dict) else (one.call.index, -1)
        if key in there:
            continue
        there.add(key)
        if parts is None:
            common = reader.common
            parts = RowParts(bundle, f"recovered-{folder.name}", common, tokenizer_of(common), attempts=True)
        parts.add(one, reader.common.zero_ns)
    reader.close()
    if parts is None:
        return 0
    parts.close()
    return parts.rows


def _next(reader: SpoolReader, records: Iterator[Kept | Row]) -> Kept | Row | None:
    """The next record; None: no more, or what a machine that went down left is none.  Raises UserError."""
    try:
        return next(records, None)
    except (ValueError, TypeError) as problem:
        if reader.common is None:
            raise UserError(
                f"what was noted cannot be read: {problem}",
                where=FOLDER,
                remedy="use the version of tailspan that wrote this bundle",
            ) from problem
        return None


def _there(bundle: Path) -> set[Key]:
    def columns(table: str, schema: Any, *names: str) -> list[list[int]]:
        if not (bundle / table).is_dir():
            return [[] for _ in names]
        found = read_table(bundle / table, schema, names).table
        return [found.column(name).to_pylist() for name in names]

    (requests,) = columns("requests", REQUESTS, "index")
    indexes, attempts = columns("attempts", ATTEMPTS, "index", "attempt")
    return {(index, -1) for index in requests} | set(zip(indexes, attempts, strict=True))


if __name__ == "__main__":
    try:
        recover(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"{error}")
