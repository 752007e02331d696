"""Which requests and which times a percentile is taken over.

Owns the population behind every latency figure.  Must always hold: times start at the intended send (the actual send is
asked for by name); a request without an answer is there as +inf, an invalid one and a canary are not there at all; an
undefined time (TPOT of one token, a gap without two chunks) is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
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
Bools = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]


class Population:
    """The requests of a run that count for latency: joined from the requests table (COLUMNS) and its verdicts."""

    def __init__(self, requests: pa.Table, verdicts: pa.Table) -> None:
        known, place = joined(requests, verdicts)
        labels = verdicts.column("label")
        invalid, dropped = (_bools(pc.equal(labels, label))[place] for label in (names.INVALID, names.DROPPED))
        counts = known & ~invalid & _bools(pc.is_null(requests.column("canary_kind")))
        self._rows = _chosen(requests.select(COLUMNS), counts)
        self._dropped: Bools = dropped[counts]
        self._times: dict[tuple[str, bool], Floats] = {}

    @property
    def n(self) -> int:
        """Requests in it, those dropped included."""
        return len(self._dropped)

    @cached_property
    def answered(self) -> pa.Table:
        """The rows with a complete answer."""
        return _chosen(self._rows, ~self._dropped)

    def values(self, measure: str, *, from_send: bool = False, traffic_class: str | None = None) -> tuple[Floats, int]:
        """Seconds of one measure (ttft, tpot, e2e, gap or a phase) over the answered, and how many were dropped.

        from_send: ttft and e2e from the actual send, which hides what a late generator or a full socket cost.
        """
        found, dropped = self._of(measure, from_send), self._dropped
        if traffic_class is not None:
            mask = _bools(pc.fill_null(pc.equal(self._rows.column("class"), traffic_class), False))
            found, dropped = found[mask], dropped[mask]
        return found[~(dropped | np.isnan(found))], int(dropped.sum())

    def ranked(self, measure: str) -> Floats:
        """Seconds of a measure in the order of the intended send, +inf for the dropped; undefined ones left out."""
        found = np.where(self._dropped, np.inf, self._of(measure, False))
        found = found[np.argsort(self._rows.column("intended_s").to_numpy(), kind="stable")]
        return found[~np.isnan(found)]

    def _of(self, measure: str, from_send: bool) -> Floats:
        """Of all rows, worked out once: several figures are taken over the same times."""
        key = (measure, from_send)
        if key not in self._times:
            self._times[key] = times(self._rows, measure, from_send=from_send)
        return self._times[key]

    def percentiles(
        self, measure: str, ps: Sequence[float], *, from_send: bool = False, survivors: bool = False
    ) -> list[stats.Percentile]:
        """Percentiles of a measure; survivors: only of the requests that were answered."""
        values, dropped = self.values(measure, from_send=from_send)
        return stats.percentiles(values, ps, 0 if survivors else dropped)


def joined(requests: pa.Table, verdicts: pa.Table) -> tuple[Bools, Places]:
    """Which rows of requests have a verdict, and where it stands in verdicts (sorted by index); 0 where there is none.

    Arrays of one entry a row of requests.
    """
    ours, theirs = requests.column("index").to_numpy(), verdicts.column("index").to_numpy()
    if np.array_equal(ours, theirs):
        return np.ones(len(ours), dtype=np.bool_), np.arange(len(ours))
    if not len(theirs):
        return np.zeros(len(ours), dtype=np.bool_), np.zeros(len(ours), dtype=np.int64)
    place = np.minimum(np.searchsorted(theirs, ours), len(theirs) - 1)
    known = theirs[place] == ours
    return known, np.where(known, place, 0)


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


def _bools(values: pa.ChunkedArray) -> Bools:
    found: Bools = values.to_numpy().astype(np.bool_)
    return found


def _chosen(rows: pa.Table, mask: Bools) -> pa.Table:
    return rows if mask.all() else rows.filter(pa.array(mask))
