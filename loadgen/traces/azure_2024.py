"""Reader of the Azure 2024 LLM inference traces: the header of 2023, stamps with a zone and of mixed precision.

`2024-05-10 00:00:00.009930+00:00`; some rows have no fraction, and a zone other than UTC is converted, so that
`09:35:07+05:30` is the same moment as `04:05:07+00:00`.  27,303,999 rows in the conversation file.
Source: Azure/AzurePublicDataset (CC-BY-4.0); Stojkovic et al., DynamoLLM, HPCA 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.traces.azure_rows import header_fits, read_rows
from loadgen.traces.trace import Batch, Choices, Rows
from loadgen.traces.values import zoned_stamp_ns

FORMAT: Final = "azure-2024"


def recognises(head: bytes) -> bool:
    """Does this look like an Azure 2024 trace?  head: the first bytes of the file."""
    return header_fits(head, zoned=True)


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError for a file that is no such trace."""
    return read_rows(path, rows, FORMAT, zoned_stamp_ns, "UTC")
