"""What a run knows of the phases of servers that are not ours: of single requests, in the mean, or not at all.

Means are growths of sums over growths of counts between the first and the last scrape.  Must always hold: a mean is
never shown as a percentile; what each name contains is said beside it; quantiles of phases are never added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.adapters.adapter import Adapter, Mean
from telemetry.adapters.registry import of_manifest

if TYPE_CHECKING:
    from telemetry.bundle import Bundle

PER_REQUEST: Final = "per request"
AGGREGATE: Final = "aggregate"
NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class PhaseMean:
    """seconds: mean of a phase over ``n`` of ``per`` (request, batch); contains: what else is in it."""

    phase: str
    seconds: float
    n: int
    per: str
    contains: str


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """What one target tells.  kind: name of its adapter.  how: PER_REQUEST, AGGREGATE or NONE.

    told: answered requests with an account of their own, of ``answered``.  pressure: our word -> highest value seen.
    """

    target: str
    kind: str
    title: str
    version: str
    how: str
    told: int
    answered: int
    means: tuple[PhaseMean, ...]
    pressure: dict[str, float]
    contains: dict[str, str]
    hint: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """One line for people."""
        name = f"{self.title} {self.version}".strip()
        if self.how == PER_REQUEST:
            note = "; ".join(f"{phase} contains {what}" for phase, what in self.contains.items())
            return f"{name}: phases of {self.told} of {self.answered} answers by its own account; {note}"
        if self.how == AGGREGATE:
            means = ", ".join(
                f"{one.phase} {1e3 * one.seconds:.1f} ms{' a batch' if one.per == 'batch' else ''}"
                + (f" (contains {one.contains})" if one.contains else "")
                for one in self.means
            )
            return f"{name}: phases in the mean over the run alone, not by request: {means}. {self.hint}"
        return f"{name}: it told nothing of its phases. {self.hint}"


def accounts(bundle: Bundle) -> tuple[ServerAccount, ...]:
    """Of each target that is another kind of server; empty where all are ours or unknown."""
    adapters = of_manifest(bundle.manifest)
    if not adapters:
        return ()
    rows = bundle.table("requests", ["target", "error", "server_duration_s"])
    series = bundle.table("series")
    found = []
    for url, one in adapters.items():
        mine = rows.filter(pc.equal(rows.column("target"), url))
        answered = mine.filter(pc.is_null(mine.column("error")))
        told = answered.num_rows - answered.column("server_duration_s").null_count
        samples = Samples(series.filter(pc.equal(series.column("source"), url)))
        means = phase_means(one, samples, answered.num_rows)
        found.append(
            ServerAccount(
                target=url,
                kind=one.name,
                title=one.title,
                version=str(bundle.manifest["server"][url].get("version") or ""),
                how=PER_REQUEST if told else AGGREGATE if means else NONE,
                told=told,
                answered=answered.num_rows,
                means=means,
                pressure={
                    word: top for word, name in one.pressure.items() if (top := samples.highest(name)) is not None
                },
                contains=dict(one.contains),
                hint=one.hint,
            )
        )
    return tuple(found)


class Samples:
    """The series of one target by name."""

    def __init__(self, series: pa.Table) -> None:
        self._rows: dict[str, list[tuple[float, str, float]]] = {}
        for row in series.select(["t_s", "name", "labels", "value"]).to_pylist():
            self._rows.setdefault(row["name"], []).append((row["t_s"], row["labels"], row["value"]))

    def growth(self, name: str, labels: Mapping[str, str]) -> float | None:
        """Last less first value, summed over the label sets that carry ``labels``; None where there is none.

        A counter that fell began anew with the server: what it had before is lost, its new value is the growth.
        """
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for _, text, value in sorted(self._rows.get(name, ()), key=lambda row: row[0]):
            if labels and not labels.items() <= json.loads(text).items():
                continue
            first.setdefault(text, value)
            last[text] = value
        if not last:
            return None
        return sum(value - first[text] if value >= first[text] else value for text, value in last.items())

    def highest(self, name: str) -> float | None:
        """The highest value of a gauge, or of a counter."""
        return max((value for _, _, value in self._rows.get(name, ())), default=None)


def phase_means(adapter: Adapter, samples: Samples, requests: int) -> tuple[PhaseMean, ...]:
    """The means that the samples tell; requests: those of the run, for counters without a count of their own."""
    found = []
    for one in adapter.means:
        value = _mean(one, samples, requests)
        if value is None:
            continue
        taken, n = value
        if one.minus is not None:
            other = _mean(one.minus, samples, requests)
            if other is None:
                continue
            taken = max(0.0, taken - other[0])
        found.append(PhaseMean(one.phase, taken, n, one.per, one.contains))
    return tuple(found)


def _mean(one: Mean, samples: Samples, requests: int) -> tuple[float, int] | None:
    total = samples.growth(one.total, one.labels)
    count = samples.growth(one.count, one.labels) if one.count else float(requests)
    return None if total is None or not count else (total / count, round(count))
