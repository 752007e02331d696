"""Reader of the Azure 2023 LLM inference traces (conversation and code): CSV, one arrival a row.

Columns by name: TIMESTAMP (`2023-11-16 18:15:46.6805900`, no zone, always seven fraction digits: `strptime` raises on
them and cutting to 10 ms merges 30 % of the code rows, so digits are kept exactly), ContextTokens, GeneratedTokens
(integers >= 1).  CRLF or LF, with or without a final newline.  The 2024 file has the same header and is told from
this one by the zone offset on its first data row.
Source: Azure/AzurePublicDataset (CC-BY-4.0); Patel et al., Splitwise, ISCA 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.traces.azure_rows import header_fits, read_rows
from loadgen.traces.trace import Batch, Choices, Rows
from loadgen.traces.values import stamp_ns

FORMAT: Final = "azure-2023"


def recognises(head: bytes) -> bool:
    """Does this look like an Azure 2023 trace?  head: the first bytes of the file."""
    return header_fits(head, zoned=False)


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError for a file that is no such trace."""
    return read_rows(path, rows, FORMAT, stamp_ns, None)
