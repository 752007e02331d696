"""Would another run like this one hold the SLO?  A chance, from how far each objective is from its bound and how noisy.

Every objective is a share of bad requests that may not exceed what it allows (``Objective.allowed_bad``).  The standard
error of that share comes from BATCHES parts of the run in the order of their intended sends, since requests that queue
behind each other are not independent (batch means: Law and Kelton, Simulation Modeling and Analysis); the chance is
Student's.  Must always hold: above one half on the held side of a bound, below it on the other; AND takes the least,
OR the largest of its members, which bounds the joint chance without an assumption on how they depend.
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


def chance_to_hold(slo: Slo, requests: pa.Table, verdicts: pa.Table) -> tuple[float, str | None]:
    """The chance, and the objective with the least; (0.5, None) where nothing could be judged.

    requests: at least ``telemetry.latency.COLUMNS``.
    """
    chances = [_chance(one, requests, verdicts) for one in slo.objectives]
    known = [(chance, one.sentence) for chance, one in zip(chances, slo.objectives, strict=True) if chance is not None]
    if not known:
        return 0.5, None
    return _joined(slo.rule, [0.5 if chance is None else chance for chance in chances]), min(known)[1]


def _joined(rule: Group, chances: list[float]) -> float:
    found = [_joined(one, chances) if isinstance(one, Group) else chances[one] for one in rule.members]
    return min(found) if rule.kind == ALL else max(found)


def _chance(objective: Objective, requests: pa.Table, verdicts: pa.Table) -> float | None:
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
    return 1 - student_tail((objective.allowed_bad + 0.5 / n - share) / error, max(1, len(parts) - 1))
