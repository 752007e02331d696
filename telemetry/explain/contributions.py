"""Layer 1: which phases make the change of a percentile.

    C_k(p)   mean of phase k over the requests ranked near the percentile, scaled so that the phases sum to it
             (``telemetry.phases``)
    change   sum over k of C_k in B - C_k in A, averaged over the repeats: exact by construction

It says where the time is, not why: a longer queue is most often the symptom of slower or longer work ahead of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from telemetry import names
from telemetry.distributions import student_quantile
from telemetry.explain.result import Contribution, Phases
from telemetry.explain.side import Run
from telemetry.phases import E2E, TTFT, Split, splits

CONFIDENCE: Final = 0.95


def contributions(a: Sequence[Run], b: Sequence[Run], measure: str, p: float, warm_up: float = 0.0) -> Phases | None:
    """The phases of one percentile (measure: phases.E2E or TTFT) on both sides; None: a side has no account of it.

    The percentile is that of the answered requests, averaged over the repeats.
    """
    found = [[_split(run, measure, p, warm_up) for run in side] for side in (a, b)]
    split_a = [one for one in found[0] if one is not None]
    split_b = [one for one in found[1] if one is not None]
    if len(split_a) < len(a) or len(split_b) < len(b) or not split_a or not split_b:
        return None
    if len({one.from_server for one in (*split_a, *split_b)}) > 1:
        return None  # a client's view and a server's account have no common parts
    parts = []
    for name in dict.fromkeys(part for one in (*split_a, *split_b) for part in one.parts):
        of_a = np.array([one.parts.get(name, 0.0) for one in split_a])
        of_b = np.array([one.parts.get(name, 0.0) for one in split_b])
        low, high = interval(of_b - of_a) if len(of_a) == len(of_b) else (None, None)
        parts.append(Contribution(name, float(of_a.mean()), float(of_b.mean()), low, high))
    total = [float(np.mean([one.total_s for one in side])) for side in (split_a, split_b)]
    return Phases(measure, p, total[0], total[1], tuple(parts), split_a[0].from_server)


def interval(changes: np.ndarray) -> tuple[float | None, float | None]:
    """95 % interval of the mean of paired changes; None with one pair."""
    if len(changes) < 2:
        return None, None
    reach = student_quantile(1 - (1 - CONFIDENCE) / 2, len(changes) - 1) * float(changes.std(ddof=1))
    reach /= math.sqrt(len(changes))
    middle = float(changes.mean())
    return middle - reach, middle + reach


def _split(run: Run, measure: str, p: float, warm_up: float) -> Split | None:
    chosen = run.answered & (run["intended_s"] >= warm_up * run.facts.length_s)
    columns = ["sent_s", "end_s", "first_token_s", "server_duration_s", *(f"phase_{one}_s" for one in names.PHASES)]
    table = pa.table(
        {"index": run.index[chosen], "intended_s": run["intended_s"][chosen]}
        | {name: pa.array(run[name][chosen], from_pandas=True) for name in columns}
    )
    found = splits(table, (p,), measure)
    return found[0] if found else None


def measure_of(figure: str) -> str:
    """The time whose phases a figure is explained by."""
    return TTFT if figure.startswith("ttft") else E2E
