"""Is this run worse than the baseline?  For the gate: each figure with its change, the noise it was held against, a yes
or a no.

Owns the two tests and their bounds.  Must always hold: a change below the tolerance is never a regression, however
significant; a change within the noise never is, however large; a percentile that either side's sample cannot certify is
not compared, and is named.

* Three or more runs in the baseline: the new run against the prediction interval of their logarithms (shares: of the
  shares themselves), Student's t, one-sided, 5 % over all figures together (Bonferroni).  This is the test to trust.
* One or two: requests depend on each other through the queue, so a bootstrap of single requests would call half of all
  unchanged pairs different.  Blocks of a twentieth of the run are drawn instead, with a 99 % interval; marked
  ``approximate``, since blocks still understate the noise between two runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from telemetry import latency, names, stats
from telemetry.bundle import Bundle
from telemetry.distributions import student_quantile
from telemetry.latency import Population
from telemetry.slo import Slo

TOLERANCE: Final = 0.10  # of a latency, relative
SHARE_TOLERANCE: Final = 0.01  # of goodput, in points
ALPHA: Final = 0.05
ENOUGH_RUNS: Final = 3
PERCENTILES: Final = (50.0, 95.0)
BLOCKS: Final = 20
DRAWS: Final = 400
DRAW_CONFIDENCE: Final = 0.99
SEED: Final = 20_240_501

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure.  baseline, value: seconds, or a share for goodput; None: unbounded.  noise: the least worsening that
    counts as significant, in the unit of ``change`` (relative for latencies, points for shares)."""

    figure: str
    baseline: float | None
    value: float | None
    change: float | None
    noise: float | None
    regressed: bool
    approximate: bool
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(bundle: Bundle, baseline: Sequence[Bundle], slo: Slo) -> list[Change]:
    """Every figure of a run against a baseline of one or more runs, all judged under one SLO."""
    new, old = _Run(bundle, slo), [_Run(one, slo) for one in baseline]
    figures = [("goodput", None), *((measure, p) for measure in latency.MEASURES for p in PERCENTILES)]
    return [_compare(measure, p, new, old, len(figures)) for measure, p in figures]


class _Run:
    """One run's values in the order of their intended send: good or not, and times with +inf for the dropped."""

    def __init__(self, bundle: Bundle, slo: Slo) -> None:
        requests = bundle.table("requests", latency.COLUMNS)
        verdicts = bundle.verdicts(slo)
        label = verdicts.column("label").to_numpy(zero_copy_only=False)
        self.good: Floats = (label[label != names.INVALID] == names.GOOD).astype(np.float64)
        population = Population(requests, verdicts)
        self._times = {measure: population.ranked(measure) for measure in latency.MEASURES}

    def values(self, measure: str) -> Floats:
        return self.good if measure == "goodput" else self._times[measure]


def _compare(measure: str, p: float | None, new: _Run, old: Sequence[_Run], figures: int) -> Change:
    name = measure if p is None else f"{measure} p{p:g}"
    samples = [run.values(measure) for run in (new, *old)]
    least = min(len(values) for values in samples)
    needed = 1 if p is None else stats.needed_to_certify(p)
    if least < needed:
        note = f"not compared: n = {least}, {needed} needed"
        return Change(name, None, None, None, None, False, False, note)
    figure = _share if p is None else lambda values: _quantile(values, p)
    value, before = figure(samples[0]), [figure(values) for values in samples[1:]]
    middle = float(np.mean(before)) if p is None else _geometric(before)
    if not all(map(math.isfinite, before)):
        note = "not compared: unbounded in the baseline, more requests were dropped there than it allows"
        return Change(name, None, value if math.isfinite(value) else None, None, None, False, False, note)
    if not math.isfinite(value):
        return Change(name, middle, None, None, None, True, False, "unbounded: too many requests were dropped")
    change = value - middle if p is None else value / middle - 1 if middle > 0 else 0.0
    worse = -change if p is None else change
    tolerance = SHARE_TOLERANCE if p is None else TOLERANCE
    approximate = len(before) < ENOUGH_RUNS
    if approximate:
        noise = _block_noise(samples[0], samples[1:], p, figure)
    else:
        noise = _prediction_noise(before, figures, relative=p is not None)
    return Change(name, middle, value, change, noise, worse > tolerance and worse > noise, approximate)


def _prediction_noise(before: Sequence[float], figures: int, *, relative: bool) -> float:
    """How much worse one more run of the same thing may be: upper end of the prediction interval."""
    values = np.log(np.maximum(before, 1e-9)) if relative else np.asarray(before)
    runs = len(values)
    spread = float(values.std(ddof=1)) * math.sqrt(1 + 1 / runs)
    reach = student_quantile(1 - ALPHA / figures, runs - 1) * spread
    return math.expm1(min(reach, 700.0)) if relative else reach


def _block_noise(new: Floats, old: Sequence[Floats], p: float | None, figure: Any) -> float:
    """Half-width of the block-bootstrap interval of the change around zero."""
    rng = np.random.default_rng(SEED)
    drawn = [np.array([figure(_blocks(values, rng)) for _ in range(DRAWS)]) for values in (new, *old)]
    if p is None:
        changes = drawn[0] - np.mean(drawn[1:], axis=0)
    else:
        with np.errstate(invalid="ignore", divide="ignore"):
            changes = np.log(drawn[0]) - np.mean(np.log(drawn[1:]), axis=0)
    changes = changes[np.isfinite(changes)]
    if len(changes) < DRAWS // 2:
        return math.inf
    centred = changes - np.median(changes)
    reach = float(np.quantile(np.abs(centred), DRAW_CONFIDENCE))
    return reach if p is None else math.expm1(min(reach, 700.0))


def _blocks(values: Floats, rng: np.random.Generator) -> Floats:
    """As many values, drawn as runs of neighbours on a circle."""
    n = len(values)
    length = max(1, math.ceil(n / BLOCKS))
    starts = rng.integers(0, n, math.ceil(n / length))
    index = (starts[:, None] + np.arange(length)).ravel()[:n] % n
    chosen: Floats = values[index]
    return chosen


def _share(values: Floats) -> float:
    return float(values.mean())


def _quantile(values: Floats, p: float) -> float:
    rank = stats.nearest_rank(len(values), p) - 1
    return float(np.partition(values, rank)[rank])


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(np.maximum(values, 1e-9)))))
