"""Reader of the Azure 2023 LLM inference traces (conversation and code): CSV, one arrival a row.

Columns by name: TIMESTAMP (`2023-11-16 18:15:46.6805900`, no zone, always seven fraction digits: `strptime` raises on
them and cutting to 10 ms merges 30 % of the code rows, so digits are kept exactly), ContextTokens, GeneratedTokens
(integers >= 1).  CRLF or LF, with or without a final newline.  The 2024 file has the same header and is told from
this one by the zone offset on its first data row.
Source: Azure/AzurePublicDataset (CC-BY-4.0); Patel et al., Splitwise, ISCA 2024.
"""

from __future__ import annotations

import csv
from datetime import date
from pathlib import Path
from typing import Final

from loadgen.traces.trace import Rows
from models.errors import UserError

FORMAT: Final = "azure-2023"
COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_LINE: Final = 4096  # bytes; a real row has under 50
MAX_TOKENS: Final = 2**31 - 1
EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
MAX_DAYS: Final = 100_000  # either side of 1970: what fits 64 bits of nanoseconds
BOM: Final = b"\xef\xbb\xbf"


class BadValueError(Exception):
    """A field that cannot be used: the reason of the drop."""


def recognises(head: bytes) -> bool:
    """Does this look like an Azure 2023 trace?  head: the first bytes of the file (a few kB)."""
    lines = head.removeprefix(BOM).decode("utf-8", "replace").splitlines()
    if not lines or not set(COLUMNS) <= {name.strip() for name in lines[0].split(",")}:
        return False
    first = next((line for line in lines[1:] if line.strip()), "")
    return not has_zone(first, lines[0])


def has_zone(row: str, header: str) -> bool:
    """True where the stamp of this row carries a zone: then the file is of 2024."""
    at = [name.strip() for name in header.split(",")].index("TIMESTAMP")
    fields = row.split(",")
    stamp = fields[at].strip() if at < len(fields) else ""
    return stamp.endswith("Z") or "+" in stamp or "-" in stamp[10:]


def read(path: Path) -> tuple[Rows, list[str]]:
    """All usable rows of the file, and notes for the user.  Raises UserError for a file that is no such trace."""
    rows = Rows(path)
    notes: list[str] = []
    with path.open("rb") as file:
        header = file.readline(MAX_LINE)
        if header.startswith(BOM):
            header = header[len(BOM) :]
            notes.append("a byte-order mark before the header was skipped")
        names = [name.strip() for name in header.decode("utf-8", "replace").strip().split(",")]
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise UserError(
                f"column {missing[0]} is missing from the header {names}",
                where=f"{path}:1",
                remedy=f"an {FORMAT} trace has the columns {', '.join(COLUMNS)}",
            )
        stamp_at, input_at, output_at = (names.index(name) for name in COLUMNS)
        days: dict[str, int] = {}
        number = 1
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                raise UserError(
                    f"the line is longer than {MAX_LINE} bytes",
                    where=f"{path}:{number}",
                    remedy=f"this is no {FORMAT} trace, or its line ends are lost; fetch it again",
                )
            try:
                text = line.decode("ascii").rstrip("\r\n")
            except UnicodeDecodeError:
                rows.drop("not_text", number, None, line.decode("utf-8", "replace").strip())
                continue
            if not text.strip():
                rows.drop("blank_line", number, None, "")
                continue
            fields = next(csv.reader([text])) if '"' in text else text.split(",")
            if len(fields) != len(names):
                half = len(fields) < len(names) and not line.endswith(b"\n")
                rows.drop("half_line" if half else "wrong_field_count", number, None, text)
                continue
            column = COLUMNS[0]
            value = fields[stamp_at]
            try:
                stamp = stamp_ns(value, days)
                column, value = COLUMNS[1], fields[input_at]
                tokens_in = token_count(value)
                column, value = COLUMNS[2], fields[output_at]
                tokens_out = token_count(value)
            except BadValueError as bad:
                rows.drop(str(bad), number, column, value)
                continue
            rows.keep(stamp, tokens_in, tokens_out)
    return rows, notes


def stamp_ns(text: str, days: dict[str, int]) -> int:
    """Nanoseconds of `YYYY-MM-DD HH:MM:SS[.fraction]` since 1970, exact.  days: a cache of dates, kept by the caller.

    Raises BadValueError("bad_stamp").
    """
    text = text.strip()
    day_text = text[:10]
    day = days.get(day_text)
    if day is None:
        try:
            day = days[day_text] = date.fromisoformat(day_text).toordinal() - EPOCH_DAY
        except ValueError:
            raise BadValueError("bad_stamp") from None
    if abs(day) > MAX_DAYS:
        raise BadValueError("bad_stamp")
    clock, dot, fraction = text[10:].partition(".")
    parts = clock[1:].split(":")
    if clock[:1] not in (" ", "T") or len(parts) != 3 or not all(len(part) == 2 and part.isdigit() for part in parts):
        raise BadValueError("bad_stamp")
    if dot and not (fraction.isdigit() and len(fraction) <= 9):
        raise BadValueError("bad_stamp")
    hour, minute, second = (int(part) for part in parts)
    if hour > 23 or minute > 59 or second > 60:
        raise BadValueError("bad_stamp")
    return (day * 86_400 + hour * 3600 + minute * 60 + second) * 1_000_000_000 + int(fraction.ljust(9, "0") or 0)


def token_count(text: str) -> int:
    """A count of tokens, an integer >= 1.  Raises BadValueError with the reason of the drop."""
    text = text.strip()
    if text.isdigit():
        value = int(text[:20])
        if value > MAX_TOKENS:
            raise BadValueError("count_too_large")
        if value == 0:
            raise BadValueError("zero_tokens")
        return value
    if text.startswith("-"):
        raise BadValueError("negative_count")
    if text.lower() in ("nan", "null", "none", ""):
        raise BadValueError("missing_count")
    raise BadValueError("not_a_count")
