"""What a run says to each objective: the value, its band, the sample, and how much of the error budget it spent.

Owns the measurement of an objective.  Must always hold: requests without an answer count as infinitely slow, and as
answers whose every token came late; with fewer requests than the objective asks for, it is undecided.

Error budget: an objective is a ratio of good to total (a percentile too, see ``Objective.allowed_bad``), so the budget
of a run is ``allowed_bad * n`` requests.  ``budget_spent`` is the share of it that this run's bad requests used; above
1 it is overspent.  None where nothing may be bad, or there was no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import latency, names, outcomes, stats
from telemetry.distributions import binomial_interval
from telemetry.objective import BROKEN, FLUIDITY, GOODPUT, HELD, UNDECIDED, Objective
from telemetry.slo import Slo

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Judged:
    """An objective and what the run says to it.  value: seconds, or a share; None: no data, or unbounded.

    low, high: 95 % band of a percentile (order statistics) or of a share (Clopper and Pearson).  certified: the sample
    is large enough for the percentile.  verdict: held, broken or undecided.
    """

    objective: Objective
    value: float | None
    unbounded: bool
    low: float | None
    high: float | None
    n: int
    certified: bool
    holds: bool
    verdict: str
    budget_spent: float | None


def mark_of(one: Judged) -> str:
    """The verdict to show: what no request was there to judge is open, neither held nor broken.

    An objective without data still does not hold, so that a run of nothing passes no gate.
    """
    return UNDECIDED if one.n == 0 else one.verdict


def judge_objectives(slo: Slo, requests: pa.Table, verdicts: pa.Table) -> tuple[Judged, ...]:
    """Every objective of the SLO, in its order."""
    population = latency.Population(requests, verdicts)
    return tuple(judge_objective(one, population, requests, verdicts) for one in slo.objectives)


def decide(slo: Slo, judged: tuple[Judged, ...]) -> str:
    """held, broken or undecided: the whole SLO."""
    return slo.rule.decide([one.verdict for one in judged])


def judge_objective(
    objective: Objective, population: latency.Population, requests: pa.Table, verdicts: pa.Table
) -> Judged:
    """Whether the run keeps one objective."""
    if objective.is_share:
        return _share(objective, of_class(verdicts, requests, objective.traffic_class))
    if objective.measure == FLUIDITY:
        counted = without_canaries(verdicts, requests)
        return _fluidity(objective, of_class(counted, requests, objective.traffic_class))
    values, dropped = population.values(objective.measure, traffic_class=objective.traffic_class)
    found = stats.percentile(values, objective.percentile or 0.0, dropped)
    bad = int((values > objective.bound).sum()) + dropped
    return _judged(objective, found, bad)


def bad_requests(
    objective: Objective, requests: pa.Table, verdicts: pa.Table
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The requests that count for an objective (their indices), and which of them are bad; invalid ones do not count.

    A request whose time is undefined (TPOT of one token) does not count for that time, and canaries for none.
    """
    chosen = of_class(verdicts, requests, objective.traffic_class)
    chosen = chosen if objective.is_share else without_canaries(chosen, requests)
    chosen = chosen.filter(pc.not_equal(chosen.column("label"), names.INVALID))
    label = chosen.column("label")
    if objective.is_share:
        good = objective.measure == GOODPUT
        bad = pc.not_equal(label, names.GOOD) if good else pc.equal(label, objective.measure)
        return chosen.column("index").to_numpy(), _bools(bad)
    dropped = _bools(pc.equal(label, names.DROPPED))
    if objective.measure == FLUIDITY:
        values = chosen.column("fluidity").to_numpy()
        bad_values = values < objective.bound  # false for NaN
    else:
        known, place = latency.joined(requests, chosen)
        values = np.full(chosen.num_rows, np.nan)  # a request without a row has no time
        values[place[known]] = latency.times(requests, objective.measure)[known]
        bad_values = values > objective.bound
    counts = dropped | ~np.isnan(values)
    return chosen.column("index").to_numpy()[counts], (dropped | bad_values)[counts]


def of_class(verdicts: pa.Table, requests: pa.Table, traffic_class: str | None) -> pa.Table:
    """The verdicts on requests of one class; all of them for None."""
    if traffic_class is None:
        return verdicts
    index = requests.filter(pc.equal(requests.column("class"), traffic_class)).column("index")
    return verdicts.filter(pc.is_in(verdicts.column("index"), index.combine_chunks()))


def without_canaries(verdicts: pa.Table, requests: pa.Table) -> pa.Table:
    """The verdicts on real traffic: canaries stay out of every figure of speed."""
    index = requests.filter(pc.is_valid(requests.column("canary_kind"))).column("index")
    if not len(index):
        return verdicts
    return verdicts.filter(pc.invert(pc.is_in(verdicts.column("index"), index.combine_chunks())))


def _share(objective: Objective, verdicts: pa.Table) -> Judged:
    labels = outcomes.counts(verdicts)
    n = sum(labels.values()) - labels[names.INVALID]
    label = names.GOOD if objective.measure == GOODPUT else objective.measure
    share = labels[label] / n if n else None
    bad = n - labels[label] if objective.measure == GOODPUT else labels[label]
    holds = objective.holds(share)
    low, high = binomial_interval(labels[label], n) if n else (None, None)
    verdict = _verdict(objective, n, holds)
    return Judged(objective, share, False, low, high, n, n > 0, holds, verdict, _spent(objective, n, bad))


def _fluidity(objective: Objective, verdicts: pa.Table) -> Judged:
    """From the low end: the p5 of fluidity is the 95th percentile of what is missing to 1."""
    counts = verdicts.filter(pc.not_equal(verdicts.column("label"), names.INVALID))
    dropped = int(pc.sum(pc.equal(counts.column("label"), names.DROPPED)).as_py() or 0)
    known = pc.drop_null(counts.column("fluidity")).to_numpy()
    missing = np.concatenate([1 - known, np.ones(dropped)])
    found = stats.percentile(missing, 100 - (objective.percentile or 0.0))

    def share(value: float | None) -> float | None:
        return None if value is None else 1 - value

    turned = stats.Percentile(
        objective.percentile or 0.0, share(found.value), False, found.n, dropped, share(found.high), share(found.low),
        found.certified,
    )  # fmt: skip
    return _judged(objective, turned, int((1 - missing < objective.bound).sum()))


def _judged(objective: Objective, found: stats.Percentile, bad: int) -> Judged:
    holds = objective.holds(found.value, unbounded=found.unbounded)
    verdict = _verdict(objective, found.n, holds)
    spent = _spent(objective, found.n, bad)
    return Judged(
        objective, found.value, found.unbounded, found.low, found.high, found.n, found.certified, holds, verdict, spent
    )


def _verdict(objective: Objective, n: int, holds: bool) -> str:
    if n < objective.min_requests:
        return UNDECIDED
    return HELD if holds else BROKEN


def _spent(objective: Objective, n: int, bad: int) -> float | None:
    allowed = objective.allowed_bad * n
    return bad / allowed if allowed > 1e-9 else None


def _bools(values: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = values.to_numpy().astype(np.bool_)
    return found
