"""The figures that are compared: percentiles of three times, and shares of three failures.

A percentile is the order statistic of nearest rank over all requests, those without an answer ranked last (+inf), as
everywhere in tailspan (``telemetry.stats``).  A share is one of all judged requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry import names, stats
from telemetry.compare.facts import MEASURES, Facts

PERCENTILES: Final = (50.0, 90.0, 99.0)
FAILURES: Final = (names.DROPPED, names.WRONG, names.LATE)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figure:
    """measure: a time, or a label of requests where p is None."""

    measure: str
    p: float | None = None

    @property
    def name(self) -> str:
        return self.measure if self.p is None else f"{self.measure} p{self.p:g}"

    @property
    def needed(self) -> int:
        """Requests below which it says nothing: those that certify the percentile; of a share, 1."""
        return 1 if self.p is None else stats.needed_to_certify(self.p)


FIGURES: Final = (
    *(Figure(measure, p) for measure in MEASURES for p in PERCENTILES),
    *(Figure(label) for label in FAILURES),
)


def values(facts: Facts, figures: Sequence[Figure] = FIGURES) -> tuple[Floats, npt.NDArray[np.int64]]:
    """The value of each figure (s, or a share; +inf: unbounded, NaN: no request has one), and its n."""
    found, counts = np.full(len(figures), np.nan), np.zeros(len(figures), dtype=np.int64)
    for measure in dict.fromkeys(one.measure for one in figures if one.p is not None):
        defined = facts.times[measure]
        defined = defined[~np.isnan(defined)]
        n = len(defined)
        places = [at for at, one in enumerate(figures) if one.measure == measure and one.p is not None]
        counts[places] = n
        if n:
            ranks = [stats.nearest_rank(n, figures[at].p or 0.0) - 1 for at in places]
            found[places] = np.partition(defined, sorted(set(ranks)))[ranks]
    for at, one in enumerate(figures):
        if one.p is None:
            counts[at] = len(facts)
            found[at] = float((facts.label == names.LABELS.index(one.measure)).mean()) if len(facts) else np.nan
    return found, counts


def band(runs: Sequence[Facts], figure: Figure) -> tuple[float | None, float | None]:
    """95 % order-statistic band of a percentile over all requests of a side; None: an open end."""
    if figure.p is None:
        return None, None
    pooled = np.concatenate([run.times[figure.measure] for run in runs])
    pooled = pooled[~np.isnan(pooled)]
    finite = pooled[np.isfinite(pooled)]
    one = stats.percentile(finite, figure.p, len(pooled) - len(finite))
    return one.low, one.high
