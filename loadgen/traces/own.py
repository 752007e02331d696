"""Reader of a user's own trace: CSV with a header, JSONL or Parquet, read through a column map.

Nothing is guessed: the map names the columns (time, input, output; session, ids and text where there are such) and the
unit of the time is given, since a number does not tell seconds from milliseconds.  text is never kept: it is for
`traces verify`, which counts it under two tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from loadgen.traces.block_size import BlockSize
from loadgen.traces.lines import csv_rows, json_rows
from loadgen.traces.trace import BATCH_ROWS, NO_SESSION, BadValueError, Batch, Choices, Rows
from loadgen.traces.values import (
    UNITS_NS,
    has_zone,
    json_tokens,
    number_ns,
    stamp_ns,
    token_count,
    zoned_stamp_ns,
)
from models.errors import UserError

CSV: Final = "own-csv"
JSONL: Final = "own-jsonl"
PARQUET: Final = "own-parquet"
FORMATS: Final = (CSV, JSONL, PARQUET)
NEEDED: Final = ("time", "input", "output")
OPTIONAL: Final = ("session", "ids", "text")
ISO: Final = "iso"  # written dates
UNITS: Final = (*UNITS_NS, ISO)
MAP_REMEDY: Final = "name the columns: --columns time=…,input=…,output=… (and session=…, ids=…, text=…)"


def format_of(head: bytes) -> str:
    """Which of the three a file is: told by its first bytes."""
    if head.startswith(b"PAR1"):
        return PARQUET
    return JSONL if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else CSV


def checked(choices: Choices) -> None:
    """Raises UserError for a column map or a unit that cannot be used."""
    columns = choices.columns
    unknown = [name for name in columns if name not in (*NEEDED, *OPTIONAL)]
    missing = [name for name in NEEDED if not columns.get(name)]
    if unknown or missing:
        what = f"{unknown[0]!r} is no column of ours" if unknown else f"no column is named for {missing[0]!r}"
        raise UserError(what, where="--columns", remedy=MAP_REMEDY)
    if choices.time_unit not in UNITS:
        raise UserError(
            f"the unit of the time column {columns['time']!r} is not given"
            if choices.time_unit is None
            else f"{choices.time_unit!r} is no time unit",
            where="--time-unit",
            remedy=f"choose {', '.join(UNITS)}: it is never guessed",
        )


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError."""
    checked(choices)
    names = [choices.columns[name] for name in NEEDED]
    session_name, ids_name = choices.columns.get("session"), choices.columns.get("ids")
    blocks = BlockSize(choices.block_size or 0, choices.block_size)
    sessions: dict[str, int] = {}
    days: dict[str, int] = {}
    with_ids = ids_name is not None
    for number, row in records(path, rows, choices, [*names, *filter(None, (session_name, ids_name))]):
        name = names[0]
        try:
            stamp = _stamp(row.get(name), choices.time_unit or "", days)
            name = names[1]
            tokens_in = _tokens(row.get(name))
            name = names[2]
            tokens_out = _tokens(row.get(name))
            ids: list[int] | None = None
            if ids_name is not None:
                name = ids_name
                ids = row.get(name) or []
                if not isinstance(ids, list) or not all(type(one) is int and abs(one) < 1 << 62 for one in ids):
                    raise BadValueError("bad_ids")
                blocks.take(tokens_in, len(ids))
        except BadValueError as bad:
            rows.drop(str(bad), number, name, str(row.get(name, "(missing)")))
            continue
        told = row.get(session_name) if session_name is not None else None
        session = NO_SESSION if told in (None, "") else sessions.setdefault(str(told), len(sessions))
        rows.keep(stamp, tokens_in, tokens_out, session, ids)
        if rows.full:
            yield rows.take()
    if with_ids:
        rows.block_size = blocks.found(rows)
    yield rows.take()


def records(path: Path, rows: Rows, choices: Choices, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row number, the named columns) of every row, whatever of the three the file is.  Raises UserError."""
    with path.open("rb") as file:
        kind = choices.format if choices.format in FORMATS else format_of(file.read(64))
    if kind == CSV:
        if "text" in choices.columns:
            raise UserError("text in a CSV is cut at its line ends", where="--columns", remedy="use JSONL or Parquet")
        for number, fields in csv_rows(path, rows, columns, CSV):
            yield number, dict(zip(columns, fields, strict=True))
    elif kind == JSONL:
        yield from json_rows(path, rows, JSONL)
    else:
        yield from _parquet_rows(path, columns)


def texts(path: Path, choices: Choices) -> Iterator[tuple[str, int]]:
    """(text, the input length that the file claims) of every row with both."""
    name, claimed = choices.columns["text"], choices.columns["input"]
    for _, row in records(path, Rows(path), choices, [name, claimed]):
        text, length = row.get(name), row.get(claimed)
        if isinstance(text, str) and type(length) is int:
            yield text, length


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise UserError(
                    f"column {missing[0]} is missing from {file.schema_arrow.names}", where=str(path), remedy=MAP_REMEDY
                )
            number = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"not readable as Parquet: {error}", where=str(path), remedy="write the file again") from None


def _stamp(value: Any, unit: str, days: dict[str, int]) -> int:
    if unit != ISO:
        return number_ns(value, UNITS_NS[unit])
    if isinstance(value, datetime):
        value = value.isoformat(sep=" ")
    if not isinstance(value, str):
        raise BadValueError("bad_stamp")
    return (zoned_stamp_ns if has_zone(value) else stamp_ns)(value, days)


def _tokens(value: Any) -> int:
    return token_count(value) if isinstance(value, str) else json_tokens(value)
