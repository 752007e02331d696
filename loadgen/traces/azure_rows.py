"""The rows of both Azure layouts: TIMESTAMP, ContextTokens, GeneratedTokens by name; only the stamp differs.

27 million rows have to go through, so a block of lines without any oddity is converted by Arrow as a whole; a block
with one (a bad field, a blank line, a quote) is read line by line, which alone decides what is dropped and why.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from loadgen.traces.lines import CSV_LINE, Header, header_names, read_header, refuse_long, split_line
from loadgen.traces.trace import BadValueError, Batch, Rows
from loadgen.traces.values import MAX_NS, has_zone, token_count

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK: Final = 2 << 20  # bytes
_SHORTEST: Final = 19  # characters of a stamp to the second; Arrow would take a bare date too


def header_fits(head: bytes, *, zoned: bool) -> bool:
    """Does the file begin with these columns, and its first stamp with or without a zone?"""
    lines = head.split(b"\n")
    names = header_names(lines[0])
    if not set(COLUMNS) <= set(names):
        return False
    first = next((line for line in lines[1:] if line.strip()), b"").decode("utf-8", "replace").split(",")
    at = names.index(COLUMNS[0])
    return has_zone(first[at] if at < len(first) else "") == zoned


def read_rows(
    path: Path, rows: Rows, format: str, stamp_of: Callable[[str, dict[str, int]], int], zone: str | None
) -> Iterator[Batch]:
    """All usable rows.  stamp_of: a written stamp to nanoseconds; zone: of Arrow's type, None for naive stamps."""
    with path.open("rb") as file:
        header = read_header(file, rows, COLUMNS, format)
        number = 1
        rest = b""
        days: dict[str, int] = {}
        while True:
            block = file.read(BLOCK)
            last = not block
            block, rest = rest + block, b""
            if not last:
                end = block.rfind(b"\n") + 1
                block, rest = block[:end], block[end:]
                if len(rest) > CSV_LINE:
                    refuse_long(b"x" * CSV_LINE, CSV_LINE, path, number + block.count(b"\n") + 1, format)
            if block:
                found = _by_arrow(block, header, zone, rows)
                if found is None:
                    found = _by_line(block, number, path, header, rows, format, stamp_of, days)
                number += block.count(b"\n")
                if len(found):
                    yield found
            if last:
                return


def _by_arrow(block: bytes, header: Header, zone: str | None, rows: Rows) -> Batch | None:
    """The block as columns; None where any line of it needs a closer look."""
    if b'"' in block or not block.endswith(b"\n"):
        return None
    types = {name: pa.string() if name == COLUMNS[0] else pa.int32() for name in COLUMNS}
    try:
        table = pa_csv.read_csv(
            io.BytesIO(block),
            read_options=pa_csv.ReadOptions(column_names=header.names, use_threads=False, block_size=len(block) + 1),
            parse_options=pa_csv.ParseOptions(ignore_empty_lines=False),
            convert_options=pa_csv.ConvertOptions(
                column_types=types, include_columns=COLUMNS, null_values=[], strings_can_be_null=False
            ),
        )
        stamps = table.column(COLUMNS[0])
        if table.num_rows != block.count(b"\n") or pc.min(pc.binary_length(stamps)).as_py() < _SHORTEST:
            return None
        ns = stamps.cast(pa.timestamp("ns", zone)).cast(pa.int64()).to_numpy()
    except pa.ArrowException:
        return None
    inputs, outputs = (table.column(name).to_numpy() for name in COLUMNS[1:])
    if min(inputs.min(), outputs.min()) < 1 or np.abs(ns).max() > MAX_NS:
        return None
    return rows.many(ns, inputs, outputs)


def _by_line(
    block: bytes,
    before: int,
    path: Path,
    header: Header,
    rows: Rows,
    format: str,
    stamp_of: Callable[[str, dict[str, int]], int],
    days: dict[str, int],
) -> Batch:
    """The block line by line.  before: lines of the file ahead of it."""
    places = header.places(COLUMNS)
    for number, line in enumerate(io.BytesIO(block), start=before + 1):
        refuse_long(line[:CSV_LINE], CSV_LINE, path, number, format)
        fields = split_line(line, number, header, rows)
        if fields is None:
            continue
        column, value = COLUMNS[0], fields[places[0]]
        try:
            stamp = stamp_of(value, days)
            column, value = COLUMNS[1], fields[places[1]]
            tokens_in = token_count(value)
            column, value = COLUMNS[2], fields[places[2]]
            tokens_out = token_count(value)
        except BadValueError as bad:
            rows.drop(str(bad), number, column, value)
            continue
        rows.keep(stamp, tokens_in, tokens_out)
    return rows.take()
