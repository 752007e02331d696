"""The traces known by name: file, address, pinned sha256, licence and citation.

Only these may be fetched, and a file counts as one of them only when its sha256 says so; a trace whose sha256 we do not
know (mooncake-toolagent, burstgpt-2, Bailian, ServeGen) is not here: give its file.
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
    bytes: int | None  # None: not known before it is fetched
    rows: int | None
    licence: str
    citation: str
    about: str
    url: str | None = None
    synthetic: bool = False
    stand_in: str | None = None  # shipped trace with its statistics, used where the real one cannot be had


_MOONCAKE: Final = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"
_MOONCAKE_PAPER: Final = (
    "Qin et al., Mooncake: Trading More Storage for Less Computation, FAST 2025; github.com/kvcache-ai/Mooncake"
)
_BURST: Final = "https://github.com/HPMLL/BurstGPT/releases/download/"
_BURST_PAPER: Final = (
    "Wang et al., BurstGPT: A Real-world Workload Dataset to Optimize LLM Serving Systems, KDD 2025; "
    "github.com/HPMLL/BurstGPT"
)
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
            name="azure-2024-conv",
            file="AzureLLMInferenceTrace_conv_1week.csv",
            sha256="a0cc9b969a9bbf0fd811802cbf4323edd3a209ace791e3799ad4f9207f213941",
            bytes=None,
            rows=27_303_999,
            licence="CC-BY-4.0",
            citation="Stojkovic et al., DynamoLLM: Designing LLM Inference Clusters for Performance and Energy "
            "Efficiency, HPCA 2025; github.com/Azure/AzurePublicDataset",
            about="chat at Azure, a week of 2024 (about 1.1 GB)",
            url="https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace/"
            "AzureLLMInferenceTrace_conv_1week.csv",
        ),
        Known(
            name="mooncake-conversation",
            file="mooncake_fast25_conversation_trace.jsonl",
            sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            bytes=3_029_533,
            rows=12_031,
            licence="Apache-2.0",
            citation=_MOONCAKE_PAPER,
            about="chat at Kimi, an hour with prefix blocks of 512 tokens; its clock ticks every 3 s",
            url=_MOONCAKE + "conversation_trace.jsonl",
        ),
        Known(
            name="mooncake-synthetic",
            file="mooncake_fast25_synthetic_trace.jsonl",
            sha256="bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
            bytes=None,
            rows=None,
            licence="Apache-2.0",
            citation=_MOONCAKE_PAPER,
            about="made by Mooncake's authors from public data sets, with prefix blocks of 512 tokens",
            url=_MOONCAKE + "synthetic_trace.jsonl",
        ),
        Known(
            name="burstgpt-1",
            file="BurstGPT_1.csv",
            sha256="4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
            bytes=None,
            rows=None,
            licence="CC-BY-4.0",
            citation=_BURST_PAPER,
            about="ChatGPT and GPT-4 of a university over two months, whole seconds, failed requests kept",
            url=_BURST + "v1.1/BurstGPT_1.csv",
        ),
        Known(
            name="burstgpt-3",
            file="BurstGPT_3.csv",
            sha256="2299986a07388aa303ec2c41d1131e756db650a39ed6ef9dfe7cc3d7f9a43b8f",
            bytes=None,
            rows=None,
            licence="CC-BY-4.0",
            citation=_BURST_PAPER,
            about="the later part of BurstGPT, with sessions and recorded latencies",
            url=_BURST + "v2.0/BurstGPT_3.csv",
        ),
        Known(
            name="ragpulse",
            file="ragpulse_0_trace.jsonl",
            sha256="cd371571bef3320907147f8901729e37f412aafb067ec8eb153e2828e1801e65",
            bytes=None,
            rows=7_106,
            licence="none stated for the data",
            citation="Wang et al., RAGPulse: An Open-Source RAG Workload Trace, arXiv:2511.12979; "
            "github.com/flashserve/RAGPulse",
            about="question answering over documents at a university, two weeks one behind the other",
            url="https://raw.githubusercontent.com/flashserve/RAGPulse/main/data/0_trace.jsonl",
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
