"""Reader of Vidur's traces: CSV `arrived_at,num_prefill_tokens,num_decode_tokens`, float seconds from 0.

Vidur's Splitwise files are the data of Azure 2023 in this layout.
Source: microsoft/vidur (MIT); Agrawal et al., Vidur, MLSys 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.traces.lines import csv_rows, header_names
from loadgen.traces.trace import BadValueError, Batch, Choices, Rows
from loadgen.traces.values import SECOND_NS, number_ns, token_count

FORMAT: Final = "vidur"
COLUMNS: Final = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def recognises(head: bytes) -> bool:
    """Does this look like a trace of Vidur?  head: the first bytes of the file."""
    return set(COLUMNS) <= set(header_names(head.split(b"\n")[0]))


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError for a file that is no such trace."""
    for number, fields in csv_rows(path, rows, COLUMNS, FORMAT):
        column, value = COLUMNS[0], fields[0]
        try:
            stamp = number_ns(value, SECOND_NS)
            column, value = COLUMNS[1], fields[1]
            tokens_in = _whole(value)
            column, value = COLUMNS[2], fields[2]
            tokens_out = _whole(value)
        except BadValueError as bad:
            rows.drop(str(bad), number, column, value)
            continue
        rows.keep(stamp, tokens_in, tokens_out)
        if rows.full:
            yield rows.take()
    yield rows.take()


def _whole(text: str) -> int:
    """Pandas writes a column of counts that once held a gap as `374.0`."""
    return token_count(text.strip().removesuffix(".0"))
