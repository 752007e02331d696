"""From "p99 went from 0.8 s to 2.1 s" to a cause: what changed between two sides, where, why, and for whom.

    explain(a, b)      two lists of bundles (a pair of single runs will do, with wider limits) -> ``Explanation``

Layers: 1 the phases that make the change of the percentile (``contributions``); 2 the causes, by replay of what-ifs
through a model of the server (``counterfactual``); 3 the requests that it concerns (``attributes``).  Rises of dropped
and wrong requests are explained from their own evidence (``drops``, ``wrongs``).

Must always hold: phases sum to the change of the percentile, mix and within to the change of the exceedance; a cause is
named only with its evidence and with the check that would disprove it; "unknown" is an answer; nothing is read but the
bundles.
"""

from telemetry.explain.causes import CAUSES, UNKNOWN, Cause
from telemetry.explain.explain import explain
from telemetry.explain.result import Explanation, Hypothesis
from telemetry.explain.server_model import Load, Replay, Replayed, ServerModel

__all__ = [
    "CAUSES", "UNKNOWN", "Cause", "Explanation", "Hypothesis", "Load", "Replay", "Replayed", "ServerModel", "explain",
]  # fmt: skip
