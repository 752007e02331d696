"""Reader of BurstGPT_1 and BurstGPT_2: CSV `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`.

Timestamp is in seconds and does not begin at 0 (5 and 5270414).  A row with 0 response tokens is a request that failed
when it was recorded (1.8 % and 1.9 %): ground truth for "dropped", kept or dropped by choice and counted by kind.
Source: HPMLL/BurstGPT (CC-BY-4.0); Wang et al., BurstGPT, KDD 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.traces.lines import csv_rows, header_names
from loadgen.traces.trace import (
    FAILED_EMPTY,
    FAILED_UNANSWERED,
    KEEP,
    NO_SESSION,
    BadValueError,
    Batch,
    Choices,
    Rows,
)
from loadgen.traces.values import SECOND_NS, count_or_zero, number_ns

FORMAT: Final = "burstgpt-1/2"
COLUMNS: Final = ("Timestamp", "Request tokens", "Response tokens")
ALL_COLUMNS: Final = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
SESSION: Final = "Session ID"  # of BurstGPT_3 alone


def recognises(head: bytes) -> bool:
    """Does this look like BurstGPT_1 or _2?  head: the first bytes of the file."""
    names = header_names(head.split(b"\n")[0])
    return set(ALL_COLUMNS) <= set(names) and SESSION not in names


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError for a file that is no such trace."""
    for number, fields in csv_rows(path, rows, COLUMNS, FORMAT):
        take_row(number, fields, rows, choices, NO_SESSION)
        if rows.full:
            yield rows.take()
    yield rows.take()


def take_row(number: int, fields: list[str], rows: Rows, choices: Choices, session: int) -> None:
    """One row from its Timestamp, Request tokens and Response tokens."""
    column, value = COLUMNS[0], fields[0]
    try:
        stamp = number_ns(value, SECOND_NS)
        column, value = COLUMNS[1], fields[1]
        tokens_in = count_or_zero(value)
        column, value = COLUMNS[2], fields[2]
        tokens_out = count_or_zero(value)
    except BadValueError as bad:
        rows.drop(str(bad), number, column, value)
        return
    failed = tokens_out == 0
    if failed and choices.failures != KEEP:
        rows.drop(FAILED_UNANSWERED if tokens_in else FAILED_EMPTY, number, column, value)
    elif tokens_in == 0 and not failed:
        rows.drop("zero_tokens", number, COLUMNS[1], fields[1])
    else:
        rows.keep(stamp, tokens_in, tokens_out, session=session, failed=failed)
