"""The lines of text traces: CSV with a header, and JSON one object a line, each with its number.

Owns what a line is: bytes up to LF or CRLF, under a limit; a byte-order mark, blank lines, a half-written last line and
text that is no UTF-8 are told apart and counted.  Fields are found by the column's name, never by position.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from loadgen.traces.trace import Rows
from models.errors import UserError

CSV_LINE: Final = 4096  # bytes; a real row has under 100
JSON_LINE: Final = 16 << 20  # a row of Mooncake with a million tokens has 15 kB of ids
BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Header:
    """The columns of a CSV file."""

    names: tuple[str, ...]

    def places(self, columns: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.names.index(column) for column in columns)


def header_names(line: bytes) -> tuple[str, ...]:
    """The column names of a header line."""
    text = line.removeprefix(BOM).decode("utf-8", "replace").strip()
    return tuple(name.strip() for name in fields_of(text) or ())


def fields_of(text: str) -> list[str] | None:
    """The fields of one CSV line; None where its quotes make no sense."""
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return None


def read_header(file: IO[bytes], rows: Rows, columns: Sequence[str], format: str) -> Header:
    """Read the header of a CSV file.  Raises UserError for a column that is not there."""
    line = file.readline(CSV_LINE)
    names = header_names(line)
    missing = [name for name in columns if name not in names]
    if missing:
        raise UserError(
            f"column {missing[0]} is missing from the header {list(names)}",
            where=f"{rows.path}:1",
            remedy=f"an {format} trace has the columns {', '.join(columns)}",
        )
    if line.startswith(BOM):
        rows.notes.append("a byte-order mark before the header was skipped")
    return Header(names)


def split_line(line: bytes, number: int, header: Header, rows: Rows) -> list[str] | None:
    """The fields of one line; None where it was dropped."""
    try:
        text = line.decode("ascii").rstrip("\r\n")
    except UnicodeDecodeError:
        rows.drop("not_text", number, None, line.decode("utf-8", "replace").strip())
        return None
    if not text.strip():
        rows.drop("blank_line", number, None, "")
        return None
    fields = fields_of(text)
    if fields is None:
        rows.drop("bad_quotes", number, None, text)
        return None
    if len(fields) != len(header.names):
        half = len(fields) < len(header.names) and not line.endswith(b"\n")
        rows.drop("half_line" if half else "wrong_field_count", number, None, text)
        return None
    return fields


def csv_rows(path: Path, rows: Rows, columns: Sequence[str], format: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, the fields of these columns) of every whole row; the others are dropped with their reason."""
    with path.open("rb") as file:
        header = read_header(file, rows, columns, format)
        places = header.places(columns)
        number = 1
        while line := file.readline(CSV_LINE):
            number += 1
            refuse_long(line, CSV_LINE, path, number, format)
            fields = split_line(line, number, header, rows)
            if fields is not None:
                yield number, [fields[place] for place in places]


def refuse_long(line: bytes, limit: int, path: Path, number: int, format: str) -> None:
    """Raises UserError for a line without an end."""
    if len(line) == limit and not line.endswith(b"\n"):
        raise UserError(
            f"the line is longer than {limit} bytes",
            where=f"{path}:{number}",
            remedy=f"this is no {format} trace, or its line ends are lost; fetch it again",
        )


def json_rows(path: Path, rows: Rows, format: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is a JSON object; the others are dropped with their reason."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(JSON_LINE):
            number += 1
            refuse_long(line, JSON_LINE, path, number, format)
            if number == 1 and line.startswith(BOM):
                line = line[len(BOM) :]
                rows.notes.append("a byte-order mark before the first row was skipped")
            if not line.strip():
                rows.drop("blank_line", number, None, "")
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                shown = line[:80].decode("utf-8", "replace").strip()
                rows.drop("not_json" if line.endswith(b"\n") else "half_line", number, None, shown)
                continue
            if isinstance(found, dict):
                yield number, found
            else:
                rows.drop("not_an_object", number, None, line[:80].decode("utf-8", "replace").strip())


def first_objects(head: bytes) -> list[dict[str, Any]]:
    """The JSON objects of the first lines of a file; empty where it does not begin with one."""
    found: list[dict[str, Any]] = []
    lines = head.removeprefix(BOM).split(b"\n")
    for place, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if place == len(lines) - 1 and found:
                break  # cut by the end of the head
            return found
        if not isinstance(value, dict):
            return found
        found.append(value)
    return found
