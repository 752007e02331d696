"""Which requests and which times a percentile is taken over.

Owns the population behind every latency figure.  Must always hold: times start at the intended send (the actual send is
asked for by name); a request without an answer is there as +inf, an invalid one and a canary are not there at all; an
undefined time (TPOT of one token, a gap without two chunks) is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names, phases, stats

MEASURES: Final = ("ttft", "tpot", "e2e")
COLUMNS: Final = (
    "index", "class", "intended_s", "sent_s", "first_token_s", "end_s", "tpot_s", "max_gap_s", "canary_kind",
    "server_duration_s", *(f"phase_{name}_s" for name in names.PHASES),
)  # fmt: skip
Floats = npt.NDArray[np.float64]


class Population:
    """The requests of a run that count for latency: joined from the requests table (COLUMNS) and its verdicts."""

    def __init__(self, requests: pa.Table, verdicts: pa.Table) -> None:
        known = pc.is_in(requests.column("index"), verdicts.column("index").combine_chunks())
        rows = requests.filter(known)
        place = pc.index_in(rows.column("index"), verdicts.column("index").combine_chunks())
        labels = verdicts.column("label").take(place)
        counts = pc.and_(pc.not_equal(labels, names.INVALID), pc.is_null(rows.column("canary_kind")))
        self._rows = rows.filter(counts)
        self._dropped: npt.NDArray[np.bool_] = pc.equal(labels, names.DROPPED).filter(counts).to_numpy()

    @property
    def n(self) -> int:
        """Requests in it, those dropped included."""
        return len(self._dropped)

    @property
    def answered(self) -> pa.Table:
        """The rows with a complete answer."""
        return self._rows.filter(pa.array(~self._dropped))

    def values(self, measure: str, *, from_send: bool = False, traffic_class: str | None = None) -> tuple[Floats, int]:
        """Seconds of one measure (ttft, tpot, e2e, gap or a phase) over the answered, and how many were dropped.

        from_send: ttft and e2e from the actual send, which hides what a late generator or a full socket cost.
        """
        rows = self._rows
        mask = np.ones(rows.num_rows, dtype=np.bool_)
        if traffic_class is not None:
            mask = pc.fill_null(pc.equal(rows.column("class"), traffic_class), False).to_numpy().astype(np.bool_)
        found = times(rows.filter(pa.array(mask & ~self._dropped)), measure, from_send=from_send)
        return found[~np.isnan(found)], int((mask & self._dropped).sum())

    def ranked(self, measure: str) -> Floats:
        """Seconds of a measure in the order of the intended send, +inf for the dropped; undefined ones left out."""
        rows = self._rows
        found = times(rows, measure)
        found[self._dropped] = np.inf
        found = found[np.argsort(rows.column("intended_s").to_numpy(), kind="stable")]
        return found[~np.isnan(found)]

    def percentiles(
        self, measure: str, ps: Sequence[float], *, from_send: bool = False, survivors: bool = False
    ) -> list[stats.Percentile]:
        """Percentiles of a measure; survivors: only of the requests that were answered."""
        values, dropped = self.values(measure, from_send=from_send)
        return stats.percentiles(values, ps, 0 if survivors else dropped)


def times(rows: pa.Table, measure: str, *, from_send: bool = False) -> Floats:
    """Seconds of one measure of every row; NaN where it is undefined.  ValueError for no such measure."""

    def column(name: str) -> Floats:
        values: Floats = rows.column(name).cast(pa.float64()).to_numpy().copy()
        return values

    start = column("sent_s" if from_send else "intended_s")
    if measure == "ttft":
        return column("first_token_s") - start
    if measure == "e2e":
        return column("end_s") - start
    if measure in ("tpot", "gap"):
        return column({"tpot": "tpot_s", "gap": "max_gap_s"}[measure])
    if measure == names.CLIENT_WAIT:
        return column("sent_s") - column("intended_s")
    if measure == names.NETWORK:
        return column("end_s") - column("sent_s") - column("server_duration_s")
    if measure in names.PHASES:
        return column(f"phase_{measure}_s")
    raise ValueError(f"no measure {measure!r}")


def mean_parts(rows: pa.Table) -> dict[str, float]:
    """Mean seconds in each part of the end-to-end time over some answered rows; empty without the server's account."""
    parts = phases.row_parts(rows)
    if parts.num_rows == 0:
        return {}
    return {name: float(pc.mean(parts.column(f"{name}_s")).as_py()) for name in phases.E2E_PARTS}
