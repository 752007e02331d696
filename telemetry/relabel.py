"""What another SLO would have said of a run: the labels that move, beside the facts.

Owns the comparison of two sets of verdicts.  Must always hold: no row of the bundle is touched; the moves sum to the
requests of the run, and both sets of labels sum to the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names, outcomes
from telemetry.bundle import Bundle
from telemetry.slo import Slo


@dataclass(frozen=True, slots=True)
class Relabelled:
    """before, after: requests per label.  moves: (label before, label after) -> requests, unchanged ones included."""

    before: dict[str, int]
    after: dict[str, int]
    moves: dict[tuple[str, str], int]

    @property
    def changed(self) -> int:
        """Requests with another label than before."""
        return sum(count for (old, new), count in self.moves.items() if old != new)

    def to_dict(self) -> dict[str, Any]:
        moves = [{"from": old, "to": new, "requests": count} for (old, new), count in self.moves.items()]
        return {"before": self.before, "after": self.after, "changed": self.changed, "moves": moves}


def relabel(bundle: Bundle, old: Slo, new: Slo) -> Relabelled:
    """Judge a bundle under two SLOs; the verdicts under the new one are kept beside the facts as well."""
    return moves(bundle.verdicts(old), bundle.verdicts(new))


def moves(before: pa.Table, after: pa.Table) -> Relabelled:
    """Join two verdict tables of one run by index."""
    place = pc.index_in(after.column("index"), before.column("index").combine_chunks())
    pairs = pa.table({"old": before.column("label").take(place), "new": after.column("label")})
    counted = {
        (e["old"], e["new"]): e["count_all"]
        for e in pairs.group_by(["old", "new"]).aggregate([([], "count_all")]).to_pylist()
    }
    ordered = {(old, new): counted[old, new] for old in names.LABELS for new in names.LABELS if (old, new) in counted}
    return Relabelled(outcomes.counts(before), outcomes.counts(after), ordered)
