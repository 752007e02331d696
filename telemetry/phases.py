"""Where the time of the requests went: client wait, network and the server's nine phases, per row and per percentile.

Owns the arithmetic over phase columns.  Must always hold: the parts of a row sum to its whole (intended send -> end, or
-> first token), and the parts of a percentile sum to that percentile.  Only durations cross from the server's clock:
network = client duration from the send - server duration.
A row without the server's account (another server) is split by what the client saw: wait, first token, stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names, stats

E2E: Final = "e2e"
TTFT: Final = "ttft"
#: Parts of the end-to-end time; of the time to first token, where *other* is network, the way of the first bytes back,
#: and what of stalls and preemptions lies before it; and of a request on a server that gives no account.
E2E_PARTS: Final = names.ROW_PHASES
OTHER: Final = "other"
TTFT_PARTS: Final = (names.CLIENT_WAIT, names.INGRESS, names.TOKENIZE, names.QUEUE, names.PREFILL, OTHER)
CLIENT_PARTS: Final = (names.CLIENT_WAIT, "wait_first_token", "stream")

#: Requests on each side of a percentile's rank whose phases are averaged: this share of all, and this many at least.
NEIGHBOURS_SHARE: Final = 0.02
NEIGHBOURS_MIN: Final = 2

COLUMNS: Final = (
    "index", "intended_s", "sent_s", "first_token_s", "end_s", "server_duration_s",
    *(f"phase_{name}_s" for name in names.PHASES),
)  # fmt: skip
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Split:
    """The parts (s) of one percentile; they sum to ``total_s``.  n: rows ranked; averaged: rows the means come from."""

    measure: str
    p: float
    total_s: float
    parts: dict[str, float]
    n: int
    averaged: int
    from_server: bool  # false: the server gave no account, the parts are the client's view

    @property
    def largest(self) -> str:
        """The part that took most."""
        return max(self.parts, key=lambda name: self.parts[name])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Growth:
    """How a percentile of the time to first token grew from the first third of the run to the last."""

    p: float
    first: Split
    last: Split

    @property
    def total_s(self) -> float:
        return self.last.total_s - self.first.total_s

    def of(self, part: str) -> float:
        """Growth of one part, in seconds."""
        return self.last.parts.get(part, 0.0) - self.first.parts.get(part, 0.0)

    def share(self, part: str) -> float | None:
        """Share of the growth that one part makes; None when nothing grew."""
        return self.of(part) / self.total_s if self.total_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        return {"p": self.p, "first": self.first.to_dict(), "last": self.last.to_dict(), "growth_s": self.total_s}


def answered_rows(requests: pa.Table, verdicts: pa.Table) -> pa.Table:
    """The rows of requests that count for latency: complete answers that are not our own fault; canaries left out."""
    chosen = verdicts.filter(
        pc.and_(pc.equal(verdicts.column("answered"), "yes"), pc.not_equal(verdicts.column("label"), names.INVALID))
    )
    mask = pc.is_in(requests.column("index"), chosen.column("index").combine_chunks())
    if "canary_kind" in requests.column_names:
        mask = pc.and_(mask, pc.is_null(requests.column("canary_kind")))
    return requests.filter(mask)


def row_parts(requests: pa.Table, measure: str = E2E) -> pa.Table:
    """index, total_s and one column per part (s), a row per answered request that carries the server's account.

    Columns: ``<part>_s`` of E2E_PARTS or TTFT_PARTS.  Rows lacking a moment or a phase are left out.
    """
    needed = [f"phase_{name}_s" for name in names.PHASES] + ["sent_s", "end_s", "server_duration_s"]
    if measure == TTFT:
        needed.append("first_token_s")
    rows = _known(requests, needed)
    total, parts = _parts(rows, measure)
    return pa.table(
        {"index": rows.column("index"), "total_s": total} | {f"{name}_s": values for name, values in parts.items()}
    )


def phases_at_percentile(requests: pa.Table, p: float, measure: str = E2E) -> Split | None:
    """The mean of each part over the requests ranked near the p-th percentile, scaled to sum to it.

    requests: answered rows (``answered_rows``).  None when there are none.  As soon as one row carries the server's
    account only rows that do are ranked.
    """
    found = splits(requests, (p,), measure)
    return found[0] if found else None


def splits(requests: pa.Table, ps: Sequence[float], measure: str = E2E) -> list[Split]:
    """``phases_at_percentile`` for several percentiles, ranked once; empty when no row can be ranked."""
    table = row_parts(requests, measure)
    from_server = table.num_rows > 0
    if from_server:
        total = table.column("total_s").to_numpy()
        parts = {name.removesuffix("_s"): table.column(name).to_numpy() for name in table.column_names[2:]}
    else:
        rows = _known(requests, ["sent_s", "first_token_s", "end_s"])
        total, parts = _client_parts(rows, measure)
    n = len(total)
    if n == 0:
        return []
    order = np.argsort(total, kind="stable")
    near = max(NEIGHBOURS_MIN, round(NEIGHBOURS_SHARE * n))
    found = []
    for p in ps:
        rank = stats.nearest_rank(n, p) - 1
        chosen = order[max(0, rank - near) : rank + near + 1]
        means = {name: float(values[chosen].mean()) for name, values in parts.items()}
        value = float(total[order[rank]])
        together = sum(means.values())
        scale = value / together if together > 0 else 0.0
        found.append(Split(measure, p, value, {k: v * scale for k, v in means.items()}, n, len(chosen), from_server))
    return found


def growth_through_run(requests: pa.Table, p: float = 90.0) -> Growth | None:
    """First against last third of the run (by intended send) at the p-th percentile of TTFT; None below 30 rows."""
    rows = _known(requests.select(COLUMNS), ["intended_s", "first_token_s"])
    if rows.num_rows < 30:
        return None
    intended = rows.column("intended_s").to_numpy()
    start, end = float(intended.min()), float(intended.max())
    third = (end - start) / 3
    first = phases_at_percentile(rows.filter(pa.array(intended <= start + third)), p, TTFT)
    last = phases_at_percentile(rows.filter(pa.array(intended >= end - third)), p, TTFT)
    if first is None or last is None or first.from_server != last.from_server:
        return None
    return Growth(p, first, last)


def _parts(rows: pa.Table, measure: str) -> tuple[Floats, dict[str, Floats]]:
    intended, sent, end = (_floats(rows, name) for name in ("intended_s", "sent_s", "end_s"))
    server = {name: _floats(rows, f"phase_{name}_s") for name in names.PHASES}
    if measure == E2E:
        # The sum of the phases, not the reported duration: ``check`` holds the two together within 1 ms.
        duration = np.sum(list(server.values()), axis=0) if rows.num_rows else np.empty(0)
        client = {names.CLIENT_WAIT: sent - intended, names.NETWORK: (end - sent) - duration}
        return end - intended, {name: {**client, **server}[name] for name in E2E_PARTS}
    total = _floats(rows, "first_token_s") - intended
    parts = {names.CLIENT_WAIT: sent - intended} | {name: server[name] for name in TTFT_PARTS[1:-1]}
    parts[OTHER] = total - np.sum(list(parts.values()), axis=0) if rows.num_rows else np.empty(0)
    return total, parts


def _client_parts(rows: pa.Table, measure: str) -> tuple[Floats, dict[str, Floats]]:
    intended, sent, first, end = (_floats(rows, name) for name in ("intended_s", "sent_s", "first_token_s", "end_s"))
    parts = {CLIENT_PARTS[0]: sent - intended, CLIENT_PARTS[1]: first - sent}
    if measure == TTFT:
        return first - intended, parts
    return end - intended, {**parts, CLIENT_PARTS[2]: end - first}


def _known(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The rows that have every one of these columns."""
    gaps = [name for name in columns if table.column(name).null_count]
    if not gaps:
        return table
    mask = np.ones(table.num_rows, dtype=np.bool_)
    for name in gaps:
        mask &= pc.is_valid(table.column(name)).to_numpy()
    return table.filter(pa.array(mask))


def _floats(table: pa.Table, name: str) -> Floats:
    values: Floats = table.column(name).to_numpy()
    return values
