"""A run bundle from a run in virtual time, so that everything that reads bundles reads the twin's as well.

What must hold: it is labelled simulated like any run against a simulated server; a row has what a client would have
seen, with nothing between client and engine: sent when intended, no lag, no network; no text, so no check of quality
can speak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from telemetry import names
from telemetry.bundle import COMPLETE, Bundle
from telemetry.schema import REQUESTS
from telemetry.slo import Slo
from telemetry.summary import summarize
from telemetry.twin import ABORT, LENGTH, TwinRun

TARGET: Final = "twin://virtual"
REPLICA: Final = "twin"
#: What a client is told of a refusal: status and reason code.
_REFUSED: Final = {
    names.REJECT_QUEUE: (429, names.REJECTED),
    names.REJECT_TOKENS: (429, names.REJECTED),
    names.REJECT_TTFT: (503, names.REJECTED),
    names.CONTEXT_OVERFLOW: (400, names.CONTEXT_OVERFLOW),
    names.KV_OOM: (400, names.KV_OOM),
}


def write_bundle(
    run: TwinRun,
    slo: Slo,
    *,
    root: Path | str | None = None,
    name: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Bundle:
    """Write a complete, compacted and judged bundle.

    root: the folder of runs (default: the usual one).  fields: of the manifest, beside those that the run itself
    tells (trace, hashes, repeat, seeds, ...); the setting stands in it under "twin".  A run that was replayed with
    tokens=True has the moment of each token in its rows, one with steps=True the step log; else these are null, and
    the table is missing.
    """
    setting = run.setting
    given = dict(fields or {})
    bundle = Bundle.create(
        root,
        given.pop("plan", {}),
        **{
            "name": name,
            "command": "virtual time",
            "slo": slo.manifest_entry(),
            "seeds": {"noise": setting.seed},
            "clock": {"zero_monotonic_ns": 0, "zero_unix_ns": 0},
            "scheduled": len(run.load),
            "length_s": float(run.load.at_s[-1]) if len(run.load) else 0.0,
            "targets": [TARGET],
            "server": {TARGET: {"url": TARGET, "models": [setting.model], "simulated": run.label}},
            "twin": asdict(setting),
            names.SIMULATED_KEY: run.label,
            **given,
        },
    )
    with bundle.writer("requests", REPLICA) as writer:
        writer.append_table(rows(run))
    if run.steps is not None:
        with bundle.writer("steps", REPLICA) as writer:
            writer.append_table(run.steps)
    bundle.update(status=COMPLETE, workers=[{"name": REPLICA, "status": "ok"}])
    bundle.compact()
    bundle.update(validity=summarize(bundle, slo).validity.to_dict())
    return bundle


def rows(run: TwinRun) -> pa.Table:
    """The run as a table of telemetry.schema.REQUESTS."""
    load, n = run.load, len(run.load)
    at = np.asarray(load.at_s, dtype=np.float64)
    outcome = run.outcome.tolist()
    refused = [_REFUSED.get(one) for one in outcome]
    failed = [_reason(run, place, one) for place, one in enumerate(outcome)]
    complete = run.answered
    started = ~np.isnan(run.ttft_s)
    last = np.where(started & ~np.isnan(run.e2e_s), at + run.e2e_s, np.nan)
    taken = np.array([one is None for one in refused], dtype=bool)
    tokens = np.where(complete, run.output_tokens, 0)
    facts = run.facts
    found: dict[str, Any] = {
        "index": np.arange(n),
        "class": load.klass if load.klass is not None else ["default"] * n,
        "worker": np.zeros(n, dtype=np.int32),
        "target": [TARGET] * n,
        "replica": [REPLICA] * n,
        "model": [run.setting.model] * n,
        "intended_s": at,
        "sent_s": at,
        "lag_s": np.zeros(n),
        "connect_s": np.zeros(n),
        "connection_reused": np.ones(n, dtype=bool),
        "headers_s": at + run.ttft_s,
        "first_chunk_s": at + run.ttft_s,
        "first_token_s": at + run.ttft_s,
        "first_content_s": at + run.ttft_s,
        "last_token_s": last,
        "end_s": np.where(taken, at + run.e2e_s, at),
        "tpot_s": run.tpot_s,
        "status": [200 if one is None else one[0] for one in refused],
        "error": failed,
        "error_detail": [one if reason is not None else None for one, reason in zip(outcome, failed, strict=True)],
        "finish_reason": [LENGTH if one else None for one in complete.tolist()],
        "truncated_by_limit": [True if one else None for one in complete.tolist()],
        "done_marker": complete,
        "attempts": np.ones(n, dtype=np.int32),
        "input_tokens": load.input_tokens,
        "expected_output_tokens": load.output_tokens,
        "prompt_tokens_reported": _where(complete, load.input_tokens),
        "completion_tokens_reported": _where(complete, tokens),
        "completion_tokens_counted": _where(complete, tokens),
        "cached_tokens": _where(taken, facts["cached_tokens"]),
        "usage_estimated": np.zeros(n, dtype=bool),
        "server_request_id": list(run.request_ids),
        "server_duration_s": np.where(taken, run.e2e_s, np.nan),
        **{f"phase_{name}_s": np.where(taken, values, np.nan) for name, values in run.phases.items()},
        **{name: _where(taken, facts[name]) for name in _FACTS},
        "sampled": np.zeros(n, dtype=bool),
    }
    if run.token_s is not None:
        found["chunk_s"] = [moments - start for moments, start in zip(run.token_s, at, strict=True)]
        found["chunk_tokens"] = [np.ones(len(moments), dtype=np.int16) for moments in run.token_s]
        found["max_gap_s"] = [float(np.diff(moments).max()) if len(moments) > 1 else None for moments in run.token_s]
    columns = [_column(found.get(field.name), field.type, n) for field in REQUESTS]
    return pa.Table.from_arrays(columns, schema=REQUESTS)


#: Facts of the run that are columns of the same name.
_FACTS: Final = (
    "prefill_wait_s", "prefill_chunks", "preemptions", "queue_depth_at_arrival", "queue_tokens_ahead",
    "decode_max_gap_s", "batch_size_mean", "step_first", "step_last", "floor_ttft_s", "floor_tpot_s",
)  # fmt: skip


def _reason(run: TwinRun, place: int, outcome: str) -> str | None:
    """The reason code of a row; None: a complete answer."""
    if outcome == LENGTH:
        return None
    if outcome in _REFUSED:
        return _REFUSED[outcome][1]
    if outcome == ABORT:
        return names.TIMEOUT_FIRST_TOKEN if np.isnan(run.ttft_s[place]) else names.TIMEOUT_TOTAL
    return names.SERVER_ERROR


def _where(mask: Any, values: Any) -> Any:
    """The values, null elsewhere."""
    return pa.array(values, mask=~np.asarray(mask), from_pandas=True)


def _column(values: Any, kind: pa.DataType, n: int) -> pa.Array:
    """A column of a type; NaN is null."""
    if values is None:
        return pa.nulls(n, kind)
    if not isinstance(values, pa.Array):
        values = pa.array(values, from_pandas=True)
    return values.cast(kind)
