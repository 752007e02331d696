"""Rows of a dispatcher as a closed bundle, judged, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from telemetry import outcomes, slo
from telemetry.bundle import COMPLETE, Bundle
from telemetry.summary import Summary, summarize
from tests.loadgen.sending import Row


def policy(ttft_s: float = 20.0) -> slo.Slo:
    text = f"name: t\nclasses:\n  default: {{ttft: {{base_s: {ttft_s}}}}}\nobjectives: [goodput >= 1 %]\n"
    return slo.parse(text, "slo.yaml")


def bundle_of(folder: Path, rows: list[Row], attempts: list[Row] | None = None, workers: int = 1) -> Bundle:
    """A complete bundle of these rows, spread over the parts of so many workers."""
    bundle = Bundle.create(folder, {}, scheduled=len(rows))
    for table, content in (("requests", rows), ("attempts", attempts or [])):
        writers = [bundle.writer(table, f"worker-{n}") for n in range(workers)] if content else []
        for place, row in enumerate(content):
            writers[place % workers].append(row)
        for writer in writers:
            writer.close()
    bundle.update(status=COMPLETE)
    return bundle


def summary_of(folder: Path, rows: list[Row], rule: slo.Slo, **more: Any) -> Summary:
    return summarize(bundle_of(folder, rows, **more), rule)


def on_time(rows: list[Row]) -> list[Row]:
    """The rows as if this machine had not been busy: their lag is not what is asked here."""
    return [{**row, "intended_s": row["intended_s"] + (row["lag_s"] or 0.0), "lag_s": 0.0} for row in rows]


def labels_of(rows: list[Row], rule: slo.Slo) -> list[tuple[str, str | None]]:
    """(label, reason) of each row."""
    from telemetry.schema import REQUESTS

    table = pa.Table.from_pylist(rows, schema=REQUESTS)
    verdicts = outcomes.judge(table.select(list(outcomes.COLUMNS)), rule, len(rows), COMPLETE)
    return list(zip(verdicts.column("label").to_pylist(), verdicts.column("reason").to_pylist(), strict=True))
