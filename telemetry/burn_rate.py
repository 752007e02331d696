"""Multi-window burn-rate alerts: their windows, and which of them would have fired on a run, and when.

Owns the four alerts of the SRE workbook (chapter "Alerting on SLOs", table 5-8) as shares of an error budget, so that
they scale with the period of an SLO.  For 30 days: 2 % of the budget in 1 h is a burn rate of 14.4, 5 % in 6 h is 6, 10
% in 1 day is 3, 10 % in 3 days is 1; each also needs the same rate over a twelfth of its window, so that it ends soon
after the trouble does.

Must always hold: what ``replay`` says is what Prometheus would say with the exported rules (``prometheus_rules``), had
it watched this run alone: a request counts when it ends, a window that is longer than the run holds what there is of
it, and the alert is looked at every ``step``.  It fires where both windows burn faster than its factor, with three bad
requests in the long one at least, and as many requests as the objective asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.judged import bad_requests
from telemetry.objective import Objective
from telemetry.slo import Slo

#: (long window in seconds, share of the budget that burns in it at this rate, severity)
ALERTS: Final = (
    (3600.0, 0.02, "page"),
    (21_600.0, 0.05, "page"),
    (86_400.0, 0.10, "ticket"),
    (259_200.0, 0.10, "ticket"),
)
SHORT: Final = 12  # the short window is a twelfth of the long one
BAD_AT_LEAST: Final = 3  # in the long window: one or two bad requests at low traffic are no pattern
STEP_S: Final = 1.0
MAX_STEPS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert of an objective.  factor: burn rate, a multiple of the rate that spends the budget in the period."""

    long_s: float
    short_s: float
    factor: float
    severity: str

    def threshold(self, objective: Objective) -> float:
        """Share of bad requests above which a window burns too fast."""
        return self.factor * objective.allowed_bad


@dataclass(frozen=True, slots=True)
class Fired:
    """An alert that would have fired: from first_s, in all for_s seconds of the run; worst: the highest burn rate."""

    objective: str
    severity: str
    factor: float
    long_s: float
    first_s: float
    for_s: float
    worst: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def alerts_of(objective: Objective, period_s: float) -> list[Alert]:
    """The alerts that can fire for an objective: those whose threshold is below 1; none where nothing may be bad."""
    if objective.allowed_bad <= 0:
        return []
    made = [Alert(long, long / SHORT, share * period_s / long, severity) for long, share, severity in ALERTS]
    return [alert for alert in made if alert.long_s <= period_s and alert.threshold(objective) < 1]


def strongest(fired: Sequence[Fired]) -> list[Fired]:
    """Of each objective the alert with the highest factor: what a person on call would be told; pages first."""
    best: dict[str, Fired] = {}
    for one in fired:
        if one.objective not in best or one.factor > best[one.objective].factor:
            best[one.objective] = one
    return sorted(best.values(), key=lambda one: (one.severity != "page", one.first_s, one.objective))


def replay(slo: Slo, requests: pa.Table, verdicts: pa.Table) -> list[Fired]:
    """Which alerts would have fired on a run, in the order of their first moment."""
    found = []
    for objective in slo.objectives:
        alerts = alerts_of(objective, slo.period_s)
        index, bad = bad_requests(objective, requests, verdicts)
        moments = _ends(requests, index)
        known = ~np.isnan(moments)
        order = np.argsort(moments[known], kind="stable")
        moments, bad = moments[known][order], bad[known][order]
        if alerts and len(moments):
            found += [one for alert in alerts if (one := _fired(alert, objective, moments, bad)) is not None]
    return sorted(found, key=lambda one: (one.first_s, one.long_s, one.objective))


def _fired(
    alert: Alert, objective: Objective, moments: npt.NDArray[np.float64], bad: npt.NDArray[np.bool_]
) -> Fired | None:
    step = max(STEP_S, math.ceil(moments[-1] / MAX_STEPS))
    looks = np.arange(step, moments[-1] + step, step)
    totals, bads = np.arange(len(moments) + 1), np.concatenate([[0], np.cumsum(bad)])
    until = np.searchsorted(moments, looks, side="right")

    def counted(window: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        since = np.searchsorted(moments, looks - window, side="right")
        return totals[until] - totals[since], bads[until] - bads[since]

    (n, bad_long), (n_short, bad_short) = counted(alert.long_s), counted(alert.short_s)
    long = np.divide(bad_long, n, out=np.zeros(len(n)), where=n > 0)
    short = np.divide(bad_short, n_short, out=np.zeros(len(n)), where=n_short > 0)
    threshold = alert.threshold(objective)
    firing = (long > threshold) & (short > threshold) & (n >= objective.min_requests) & (bad_long >= BAD_AT_LEAST)
    if not firing.any():
        return None
    worst = float(np.minimum(long, short)[firing].max() / objective.allowed_bad)
    first = float(looks[int(firing.argmax())])
    return Fired(
        objective.sentence, alert.severity, alert.factor, alert.long_s, first, float(firing.sum() * step), worst
    )


def _ends(requests: pa.Table, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """When each of them ended; NaN: not told."""
    ends: npt.NDArray[np.float64] = np.full(int(index.max(initial=-1)) + 1, np.nan)
    ours, moments = requests.column("index").to_numpy()[::-1], requests.column("end_s").to_numpy()[::-1]
    there = (ours >= 0) & (ours < len(ends))
    ends[ours[there]] = moments[there]  # from the back: of two rows with one index the first counts
    return ends[index]
