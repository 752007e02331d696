"""Phases of single requests on servers that are not ours: from spans or answers into the columns of the rows.

Done once, when the parts of a bundle are gathered.  Must always hold: a row that carries our engine's account is left
alone; the phases that are filled in sum to ``server_duration_s``; what a server does not tell stays null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names
from telemetry.adapters.adapter import DURATION, Account, Adapter
from telemetry.adapters.registry import of_manifest

if TYPE_CHECKING:
    from telemetry.bundle import Bundle

_COLUMNS: Final = {phase: f"phase_{phase}_s" for phase in names.PHASES}


def filler(bundle: Bundle) -> Callable[[pa.Table], pa.Table] | None:
    """A function that completes slices of the requests table; None where no target is another kind of server."""
    adapters = of_manifest(bundle.manifest)
    if not adapters:
        return None
    told = _told_by_spans(bundle, adapters) if any(one.of_spans for one in adapters.values()) else {}
    trips = {url: _round_trip(bundle, url) for url, one in adapters.items() if one.completed}

    def fill(rows: pa.Table) -> pa.Table:
        for url, one in adapters.items():
            if one.of_spans is not None:
                rows = _filled(rows, [told.get(trace) for trace in rows.column("trace_id").to_pylist()])
            elif one.completed:
                rows = _filled(rows, _completed(rows, url, trips[url]))
        return rows

    return fill


def _told_by_spans(bundle: Bundle, adapters: Mapping[str, Adapter]) -> dict[str, Account]:
    if not (bundle.path / "spans").is_dir():
        return {}
    readers = list(dict.fromkeys(one.of_spans for one in adapters.values() if one.of_spans is not None))
    columns = ["trace_id", "name", "service", "start_unix_ns", "end_unix_ns", "attributes"]
    traces: dict[str, list[dict[str, Any]]] = {}
    for batch in bundle.table("spans", columns).to_batches(max_chunksize=4096):
        for span in batch.to_pylist():
            if span["trace_id"] and span["service"] != names.ENGINE_SERVICE:
                traces.setdefault(span["trace_id"], []).append(_parsed(span))
    found = {}
    for trace, spans in traces.items():
        accounts = [account for reader in readers if (account := reader(spans)) is not None]
        if accounts:
            found[trace] = accounts[0]
    return found


def _parsed(span: dict[str, Any]) -> dict[str, Any]:
    try:
        attributes = json.loads(span["attributes"] or "{}")
    except ValueError:
        attributes = {}
    return {**span, "attributes": attributes if isinstance(attributes, dict) else {}}


def _round_trip(bundle: Bundle, url: str) -> float:
    """Seconds of the quickest TCP connect to a target, which is one round trip; 0 where none was made."""
    rows = bundle.table("requests", ["target", "connect_s"])
    values = rows.filter(pc.equal(rows.column("target"), url)).column("connect_s").drop_null().to_numpy()
    made = values[values > 0]
    return float(made.min()) if len(made) else 0.0


def _completed(rows: pa.Table, url: str, round_trip_s: float) -> list[Account | None]:
    """Accounts of answers that told prefill and decode: the queue is what the client waited beyond them."""
    columns = ["target", "sent_s", "first_token_s", "phase_prefill_s", "phase_decode_s"]
    found: list[Account | None] = []
    for row in rows.select(columns).to_pylist():
        if row["target"] != url or any(row[name] is None for name in columns):
            found.append(None)
            continue
        waited = row["first_token_s"] - row["sent_s"] - row["phase_prefill_s"] - round_trip_s
        phases = {
            names.QUEUE: max(0.0, waited),
            names.PREFILL: row["phase_prefill_s"],
            names.DECODE: row["phase_decode_s"],
        }
        found.append({**phases, DURATION: sum(phases.values())})
    return found


def _filled(rows: pa.Table, accounts: list[Account | None]) -> pa.Table:
    """The rows with the accounts in their columns, where a row has no duration of the server's yet."""
    open_ = pc.is_null(rows.column("server_duration_s")).to_pylist()
    chosen = np.array([one is not None and free for one, free in zip(accounts, open_, strict=True)], dtype=np.bool_)
    if not chosen.any():
        return rows
    mask = pa.array(chosen)
    for key, column in {**_COLUMNS, DURATION: "server_duration_s"}.items():
        values = pa.array([None if one is None else one.get(key, 0.0) for one in accounts], pa.float64())
        at = rows.column_names.index(column)
        rows = rows.set_column(at, rows.schema.field(at), pc.if_else(mask, values, rows.column(column)))
    return rows
