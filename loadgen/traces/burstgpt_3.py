"""Reader of BurstGPT_3: the layout of BurstGPT_1 with `Session ID,Elapsed time` before Model.

Timestamp is float seconds and begins at 19440110.0.  Session ID is empty on every row of the API log, which is normal;
Elapsed time is the latency that was recorded and is not read.  7.26 % of the rows have 0 response tokens.
Source: HPMLL/BurstGPT (CC-BY-4.0); Wang et al., BurstGPT, KDD 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.traces.burstgpt import ALL_COLUMNS, COLUMNS, SESSION, take_row
from loadgen.traces.lines import csv_rows, header_names
from loadgen.traces.trace import NO_SESSION, Batch, Choices, Rows

FORMAT: Final = "burstgpt-3"


def recognises(head: bytes) -> bool:
    """Does this look like BurstGPT_3?  head: the first bytes of the file."""
    return {*ALL_COLUMNS, SESSION} <= set(header_names(head.split(b"\n")[0]))


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError for a file that is no such trace."""
    sessions: dict[str, int] = {}
    for number, fields in csv_rows(path, rows, (*COLUMNS, SESSION), FORMAT):
        name = fields[3].strip()
        session = sessions.setdefault(name, len(sessions)) if name else NO_SESSION
        take_row(number, fields, rows, choices, session)
        if rows.full:
            yield rows.take()
    yield rows.take()
