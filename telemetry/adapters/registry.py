"""Which server is this?  By its own build info first (our engine speaks vLLM's names too), then by its own names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from telemetry import names
from telemetry.adapters import llama_cpp, sglang, tensorrt_llm, tgi, vllm
from telemetry.adapters.adapter import Adapter

OURS: Final = "tailspan"
ADAPTERS: Final[dict[str, Adapter]] = {
    one.ADAPTER.name: one.ADAPTER for one in (vllm, sglang, tensorrt_llm, llama_cpp, tgi)
}
METRICS_PATHS: Final = tuple(dict.fromkeys(["/metrics", *(one.metrics for one in ADAPTERS.values())]))
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)[{ ]", re.MULTILINE)


def metric_names(text: str) -> set[str]:
    """Names of the samples in Prometheus text; empty for anything else."""
    return set(_SAMPLE.findall(text))


def recognise(metrics: Iterable[str], owners: Iterable[str] = (), server: str = "") -> str | None:
    """OURS, a name of ADAPTERS, or None.

    metrics: names that it exposes.  owners: ``owned_by`` of its models.  server: its Server header.
    """
    found, owned = set(metrics), {owner.lower() for owner in owners}
    if any(name.startswith(names.M_BUILD_INFO) for name in found) or OURS in owned:
        return OURS
    for one in ADAPTERS.values():
        if any(name.startswith(one.prefixes) for name in found):
            return one.name
    for one in ADAPTERS.values():
        if owned & set(one.owners) or (server and server.lower().startswith(one.servers)):
            return one.name
    return None


def of_manifest(manifest: Mapping[str, Any]) -> dict[str, Adapter]:
    """Target URL -> adapter, of the targets of a bundle that are another kind of server."""
    servers = manifest.get("server") or {}
    kinds = {url: one.get("kind") for url, one in servers.items() if isinstance(one, dict)}
    return {url: ADAPTERS[kind] for url, kind in kinds.items() if kind in ADAPTERS}
