"""Which of two faults at once is the larger: measured, by playing each alone, both and none on the engine itself.

    size of a fault = the change of the explained percentile that it makes, averaged over the two orders in which they
    can come (its Shapley value); with the same noise in all four, over all pairs

Near saturation the order of the numbers in a scenario's file tells nothing: a little less speed may cost more than half
as many arrivals again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from loadgen.lab.play import Played
from loadgen.lab.scenario import Scenario
from loadgen.lab.sides import faulty, replay_b
from telemetry import stats
from telemetry.compare.replays import WARM_UP
from telemetry.explain.contributions import interval
from telemetry.explain.counterfactual import shapley
from telemetry.explain.late import NAMED
from telemetry.twin import Twin

#: Share of the change.  What-ifs agree with the engine within 10 % (docs/explain.md): closer sizes are equal.
EQUAL: Final = 0.1
#: Share of the change from which the smaller of two must be named: what an explanation names, and that accuracy.
DUE: Final = NAMED + EQUAL


@dataclass(frozen=True, slots=True)
class Order:
    """The two causes, the larger first; shares: of the change that both make together.  tied: either may be first."""

    causes: tuple[str, str]
    shares: tuple[float, float]
    tied: bool


def order(
    scenario: Scenario, twin: Twin, figure: str, *, load: float, seed: int, pairs: int, requests: int
) -> Order | None:
    """Of a scenario with two faults.  figure: the percentile that was explained ("ttft p90").

    None where the figure has no size: not a percentile, unbounded, or not changed.
    """
    measure, _, p = figure.partition(" p")
    if not p:
        return None
    subsets = {
        frozenset(named): faulty(scenario, twin, load, seed, requests, places)
        for named, places in (
            ((), ()), ((scenario.cause,), (0,)), ((scenario.then,), (1,)), ((scenario.cause, scenario.then), (0, 1)),
        )
    }  # fmt: skip
    found = []
    for pair in range(pairs):
        values = {
            chosen: quantile(replay_b(world, twin, seed, pair), measure, float(p)) for chosen, world in subsets.items()
        }
        found.append(shapley((scenario.cause, scenario.then), values.__getitem__))
    sizes = np.array(found)
    whole = float(sizes.sum(axis=1).mean())
    if not np.isfinite(sizes).all() or whole <= 0:
        return None
    shares = sizes.mean(axis=0) / whole
    low, high = interval(sizes[:, 0] - sizes[:, 1])
    noise = low is not None and high is not None and low <= 0 <= high
    causes = (scenario.cause, scenario.then)
    first = int(shares[1] > shares[0])
    return Order(
        (causes[first], causes[1 - first]),
        (float(shares[first]), float(shares[1 - first])),
        noise or abs(float(shares[0] - shares[1])) < EQUAL,
    )


def quantile(played: Played, measure: str, p: float) -> float:
    """A percentile (s) of one replay, without its warm-up; inf where the request at its rank got no answer."""
    rows = played.tables["requests"]

    def column(name: str) -> np.ndarray:
        return np.array([np.nan if one is None else one for one in rows.column(name).to_pylist()], dtype=float)

    intended = column("intended_s")
    if measure == "tpot":
        times = column("tpot_s")
    else:
        times = column("first_token_s" if measure == "ttft" else "end_s") - intended
    failed = np.array([one is not None for one in rows.column("error").to_pylist()])
    times[failed] = np.inf
    times = times[(intended >= WARM_UP * intended[-1]) & ~np.isnan(times)]
    return float(np.partition(times, stats.nearest_rank(len(times), p) - 1)[stats.nearest_rank(len(times), p) - 1])
