"""The traces known by name: file, address, pinned sha256, licence and citation.

Only these may be fetched, and a file counts as one of them only when its sha256 says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SHIPPED_FOLDER: Final = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True)
class Known:
    """One trace of the catalogue.  url is None for a trace that ships with the project."""

    name: str
    file: str
    sha256: str
    bytes: int
    rows: int
    licence: str
    citation: str
    about: str
    url: str | None = None
    synthetic: bool = False
    stand_in: str | None = None  # shipped trace with its statistics, used where the real one cannot be had


_AZURE: Final = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
_SPLITWISE: Final = (
    "Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024; "
    "github.com/Azure/AzurePublicDataset"
)

KNOWN: Final[dict[str, Known]] = {
    entry.name: entry
    for entry in (
        Known(
            name="azure-2023-conv",
            file="AzureLLMInferenceTrace_conv.csv",
            sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            bytes=719_188,
            rows=19_366,
            licence="CC-BY-4.0",
            citation=_SPLITWISE,
            about="chat at Azure, an hour of 2023: near-Poisson by the second, drifting by the minute",
            url=_AZURE + "AzureLLMInferenceTrace_conv.csv",
            stand_in="synthetic-conv",
        ),
        Known(
            name="azure-2023-code",
            file="AzureLLMInferenceTrace_code.csv",
            sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
            bytes=320_117,
            rows=8_819,
            licence="CC-BY-4.0",
            citation=_SPLITWISE,
            about="code completion at Azure, an hour of 2023: long silences, then 67 arrivals in one second",
            url=_AZURE + "AzureLLMInferenceTrace_code.csv",
        ),
        Known(
            name="synthetic-conv",
            file="synthetic-conv.csv",
            sha256="aaee64a319cffe11e640a69ca1ce78b97537b9e61637a47708f39d35c313bfb0",
            bytes=34_935,
            rows=967,
            licence="Apache-2.0",
            citation="made by loadgen/traces/make_synthetic.py; no real request is in it",
            about="SYNTHETIC, three minutes drawn with the statistics of azure-2023-conv",
            synthetic=True,
        ),
    )
}
