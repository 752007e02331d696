"""Faults on a server whose size depends on what its load takes: known once the healthy side has been played."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from models.errors import UserError
from telemetry.bundle import Bundle

OF_PEAK: Final = "of_peak"
PAGE_TOKENS: Final = 16  # of the servers that the lab starts


def sized(asked: Mapping[str, Any], healthy: Bundle) -> dict[str, Any]:
    """asked, with every ``of_peak`` (share of the KV pages that the load held at its peak) made the ``size`` that the
    server takes (share of its whole pool), but at least what the longest request needs.

    Raises UserError where the healthy side has no step log.
    """
    faults = [
        {**{key: value for key, value in one.items() if key != OF_PEAK}, "size": pool_share(one[OF_PEAK], healthy)}
        if OF_PEAK in one
        else one
        for one in asked.get("faults") or ()
    ]
    return {**asked, "faults": faults}


def pool_share(of_peak: float, healthy: Bundle) -> float:
    """The share of the server's pool that is ``of_peak`` of what this run held at its peak."""
    steps = healthy.table("steps", ["kv_used", "kv_free"])
    if not len(steps):
        raise UserError(
            "the healthy side has no step log", where=str(healthy.path), remedy="a fault of this size needs one"
        )
    rows = healthy.table("requests", ["prompt_tokens_reported", "completion_tokens_reported"])
    tokens: int = pc.max(pc.add(*(_numbers(rows, name) for name in rows.column_names))).as_py() or 0
    pages: int = pc.max(pc.add(steps.column("kv_used"), steps.column("kv_free"))).as_py()
    peak: int = pc.max(steps.column("kv_used")).as_py()
    return min(1.0, max(tokens // PAGE_TOKENS + 2, of_peak * peak) / pages)


def _numbers(rows: pa.Table, name: str) -> pa.ChunkedArray:
    return pc.fill_null(rows.column(name), 0)
