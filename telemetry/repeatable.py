"""How surely did a run hold or break its SLO?  The distance of each objective from its bound, in standard errors.

Every objective is a share of bad requests that may not exceed what it allows (``Objective.allowed_bad``).  The standard
error of that share comes from BATCHES parts of the run in the order of their intended sends, since requests that queue
behind each other are not independent (batch means: Law and Kelton, Simulation Modeling and Analysis).  Must always
hold: positive on the held side of a bound, negative on the other; AND takes the least, OR the largest of its members.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.distributions import student_tail
from telemetry.judged import bad_requests
from telemetry.objective import ALL, Group, Objective
from telemetry.slo import Slo

BATCHES: Final = 10
FARTHEST: Final = 8.0  # beyond it a distance says nothing more


def margin(slo: Slo, requests: pa.Table, verdicts: pa.Table) -> tuple[float, str | None]:
    """The distance, -FARTHEST to FARTHEST, and the objective with the least; (0, None) where nothing could be judged.

    requests: at least ``telemetry.latency.COLUMNS``.
    """
    found = [_distance(one, requests, verdicts) for one in slo.objectives]
    known = [(value, one.sentence) for value, one in zip(found, slo.objectives, strict=True) if value is not None]
    if not known:
        return 0.0, None
    return _joined(slo.rule, [0.0 if value is None else value for value in found]), min(known)[1]


def chance(distance: float) -> float:
    """That another run at the same rate holds the SLO, by Student's t of the batches."""
    return 1 - student_tail(distance, BATCHES - 1)


def _joined(rule: Group, values: list[float]) -> float:
    found = [_joined(one, values) if isinstance(one, Group) else values[one] for one in rule.members]
    return min(found) if rule.kind == ALL else max(found)


def _distance(objective: Objective, requests: pa.Table, verdicts: pa.Table) -> float | None:
    """None where no request counts for it."""
    index, bad = bad_requests(objective, requests, verdicts)
    n = len(bad)
    if n == 0:
        return None
    place = pc.index_in(index, requests.column("index").combine_chunks())
    moments = requests.column("intended_s").take(pc.fill_null(place, 0)).to_numpy()
    moments = np.where(pc.is_valid(place).to_numpy(zero_copy_only=False), moments, np.inf)  # no row: it never came
    ordered = bad[np.argsort(moments, kind="stable")].astype(np.float64)
    share = float(ordered.mean())
    parts = [float(part.mean()) for part in np.array_split(ordered, min(BATCHES, n)) if len(part)]
    of_batches = float(np.std(parts, ddof=1)) / math.sqrt(len(parts)) if len(parts) > 1 else 0.0
    of_counts = math.sqrt(share * (1 - share) / n)
    error = max(of_batches, of_counts, 0.5 / n)  # half a request: a run without a bad one is not without noise
    # half a request to the good side: exactly what is allowed still holds
    distance = (objective.allowed_bad + 0.5 / n - share) / error
    return float(np.clip(distance, -FARTHEST, FARTHEST))
