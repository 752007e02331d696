"""What a scraper would have read from the twin's /metrics, a row a second, from its step log.

The names are the engine's; a counter's value at a moment is what steps that ended by then had done.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry import names
from telemetry.schema import SERIES
from telemetry.twin import TwinRun

INTERVAL_S: Final = 1.0
MOST: Final = 3600  # samples of a series; a longer run is sampled more seldom


def series(run: TwinRun, source: str) -> pa.Table:
    """Rows of schema SERIES.  run: replayed with steps=True.  source: the target's URL."""
    if run.steps is None:
        raise ValueError("the run has no step log")
    columns = {name: run.steps.column(name).to_numpy() for name in _COLUMNS}
    end = columns["end_ns"] / 1e9
    ended = left_s(run)
    last = float(ended.max()) if len(ended) else 0.0
    moments = np.arange(0.0, last + INTERVAL_S, max(INTERVAL_S, last / MOST))
    done = np.searchsorted(end, moments, side="right")  # steps that had ended by each moment
    sums = {name: np.concatenate([[0], np.cumsum(columns[name])]) for name in _SUMMED}
    # a gauge is what the step in hand found: between steps that of the last one, and nobody once all is done
    begun = np.searchsorted(columns["start_ns"] / 1e9, moments, side="right")
    at = np.maximum(begun - 1, 0)
    arrived = np.searchsorted(np.sort(np.asarray(run.load.at_s)), moments, side="right")
    left = np.searchsorted(np.sort(ended), moments, side="right")
    there = arrived - left
    steps_there = len(end) > 0
    running = np.where(there > 0, np.minimum(columns["running"][at], there), 0) if steps_there else 0 * there
    pool = max(1, run.kv_blocks)
    values = {
        names.M_RUNNING: running,
        names.M_WAITING: np.maximum(0, there - running),
        names.M_KV_USAGE: np.where(begun > 0, columns["kv_used"][at] / pool, 0.0) if steps_there else 0.0 * there,
        f"{names.M_GENERATION_TOKENS}_total": sums["sampled_rows"][done],
        f"{names.M_PROMPT_TOKENS}_total": sums["prefill_tokens"][done],
        f"{names.M_PREEMPTIONS}_total": sums["preempted"][done],
        f"{names.M_RECOMPUTED}_total": sums["recomputed_tokens"][done],
    }
    n = len(moments)
    return pa.concat_tables(
        [
            pa.table(
                {
                    "t_s": moments,
                    "source": [source] * n,
                    "name": [name] * n,
                    "labels": ["{}"] * n,
                    "value": np.asarray(value, dtype=np.float64),
                },
                schema=SERIES,
            )
            for name, value in values.items()
        ]
    )


def left_s(run: TwinRun) -> npt.NDArray[np.float64]:
    """When each client was gone, seconds after zero: served, refused, or out of patience (before the engine hears)."""
    stay = np.where(np.isnan(run.e2e_s), 0.0, run.e2e_s)
    if run.load.patience_s is not None:
        stay = np.fmin(stay, run.load.patience_s)
    gone: npt.NDArray[np.float64] = np.asarray(run.load.at_s) + stay
    return gone


_SUMMED: Final = ("sampled_rows", "prefill_tokens", "preempted", "recomputed_tokens")
_COLUMNS: Final = ("start_ns", "end_ns", "running", "kv_used", *_SUMMED)
