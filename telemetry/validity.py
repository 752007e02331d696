"""May the figures of this run be believed?  The run judges itself before it judges the server.

VALID, CLIENT_LIMITED (the generator did not deliver the load it promised, so latencies are partly its own) or
INCOMPLETE (a worker was lost, or the run was cut).  Must always hold: each reason carries its number and its bound, and
the verdict stands before every other figure.  Bounds: schedule lag p99 and event-loop lag p99 of at most max(5 ms, 1 %
of the TTFT deadline), 99 % of the schedule attempted in its time, a sender below 80 % of a core, at most 1 % of the
requests invalid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names, outcomes, stats
from telemetry.slo import Slo

LAG_FLOOR_S: Final = 0.005
LAG_SHARE: Final = 0.01
ACHIEVED_MIN: Final = 0.99
CPU_MAX: Final = 0.80
INVALID_MAX: Final = 0.01
SHORT_S: Final = 5.0  # in a shorter run the lag of the last request alone would decide the rate


@dataclass(frozen=True, slots=True)
class Validity:
    """verdict: VALID, CLIENT_LIMITED or INCOMPLETE; reasons: sentences with their numbers; figures: those numbers."""

    verdict: str
    reasons: tuple[str, ...]
    figures: dict[str, float | int | None]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"reasons": list(self.reasons)}


def assess(requests: pa.Table, manifest: Mapping[str, Any], slo: Slo, verdicts: pa.Table | None = None) -> Validity:
    """Judge a run from its rows (outcomes.COLUMNS and sent_s), its manifest and, where at hand, its verdicts."""
    scheduled = int(manifest.get("scheduled") or requests.num_rows)
    status = str(manifest.get("status", "incomplete"))
    lost = lost_workers(manifest)
    if verdicts is None:
        verdicts = outcomes.judge(requests, slo, scheduled, status, workers_lost=bool(lost))
    labels = outcomes.counts(verdicts)
    judged = sum(labels.values())
    bound = lag_bound(requests, slo)

    lags = pc.drop_null(requests.column("lag_s")).to_numpy()
    lag = stats.percentile(lags, 99).value
    sent = requests.num_rows - requests.column("sent_s").null_count
    achieved = _achieved(requests, scheduled if status == "complete" and not lost else requests.num_rows)
    cpu = _worst(manifest, "cpu_ratio")
    loop = _worst(manifest, "loop_lag_p99_s")
    invalid = labels[names.INVALID] / judged if judged else 0.0
    figures: dict[str, float | int | None] = {
        "scheduled": scheduled,
        "attempted": requests.num_rows,
        "sent": sent,
        "lag_p99_s": lag,
        "lag_max_s": float(lags.max()) if len(lags) else None,
        "lag_bound_s": bound,
        "achieved_ratio": achieved,
        "loop_lag_p99_s": loop,
        "cpu_ratio": cpu,
        "invalid_ratio": invalid,
        "workers_lost": len(lost),
    }

    incomplete = []
    if lost:
        incomplete.append(f"{len(lost)} of {len(manifest.get('workers') or lost)} workers lost: {', '.join(lost)}")
    if status == "running":
        incomplete.append(f"still running: {requests.num_rows} of {scheduled} requests so far")
    elif status == "interrupted":
        incomplete.append(f"interrupted after {requests.num_rows} of {scheduled} requests")
    elif failure := manifest.get("failure"):
        incomplete.append(
            f"ended by an internal error of the generator after {requests.num_rows} of {scheduled} requests: {failure}"
        )
    elif stopped := manifest.get("stopped"):
        incomplete.append(f"ended early after {requests.num_rows} of {scheduled} requests: {stopped}")
    elif status != "complete" and not lost:
        incomplete.append(f"cut after {requests.num_rows} of {scheduled} requests")
    elif requests.num_rows < scheduled and not lost:
        incomplete.append(f"{scheduled - requests.num_rows} of {scheduled} requests left no row")

    limited = []
    if lag is not None and lag > bound:
        limited.append(f"requests were sent late: lag p99 {_ms(lag)} > {_ms(bound)}")
    if achieved is not None and achieved < ACHIEVED_MIN:
        limited.append(f"only {100 * achieved:.1f} % of the asked rate was delivered (99 % needed)")
    if loop is not None and loop > bound:
        limited.append(f"the sender's event loop was late: p99 {_ms(loop)} > {_ms(bound)}")
    if cpu is not None and cpu >= CPU_MAX:
        limited.append(f"the sender used {100 * cpu:.0f} % of a core (below 80 % needed)")
    if invalid > INVALID_MAX and not incomplete:  # a cut run has its reason already
        why = ", ".join(f"{name} {count}" for name, count in outcomes.reasons(verdicts)[names.INVALID].items())
        limited.append(f"{labels[names.INVALID]} of {judged} requests are invalid, {100 * invalid:.1f} % > 1 %: {why}")

    verdict = names.INCOMPLETE if incomplete else names.CLIENT_LIMITED if limited else names.VALID
    return Validity(verdict, (*incomplete, *limited), figures)


def lag_bound(requests: pa.Table, slo: Slo) -> float:
    """max(5 ms, 1 % of the smallest TTFT deadline among the requests), in seconds."""
    ttft, _, _ = slo.deadline_columns(requests)
    finite = ttft[np.isfinite(ttft)]
    return max(LAG_FLOOR_S, LAG_SHARE * float(finite.min())) if len(finite) else LAG_FLOOR_S


def lost_workers(manifest: Mapping[str, Any]) -> list[str]:
    """Names of the workers that the manifest calls lost (workers: [{name, status: "ok" | "lost"}])."""
    workers = manifest.get("workers") or []
    return [str(w.get("name", place)) for place, w in enumerate(workers) if _is_lost(w)]


def _is_lost(worker: Any) -> bool:
    return isinstance(worker, Mapping) and worker.get("status") == "lost"


def _achieved(requests: pa.Table, scheduled: int) -> float | None:
    """Delivered over asked rate: requests begun, over the time it took to begin them against the schedule's.

    1 for a generator that keeps its times; a request that the server refused counts as begun.  None without a schedule.
    """
    if scheduled == 0 or requests.num_rows == 0:
        return None if scheduled == 0 else 0.0
    intended = requests.column("intended_s").to_numpy()
    lag = pc.fill_null(requests.column("lag_s"), 0.0).to_numpy()
    asked = float(intended.max() - intended.min())
    taken = float((intended + lag).max() - intended.min())
    stretch = min(1.0, asked / taken) if taken > 0 and asked > SHORT_S else 1.0
    return float(min(1.0, requests.num_rows / scheduled) * stretch)


def _worst(manifest: Mapping[str, Any], figure: str) -> float | None:
    """The largest value of a figure over the generator as a whole and each worker; None where none is given."""
    values = [float(entry[figure]) for entry in _accounts(manifest) if isinstance(entry.get(figure), int | float)]
    return max(values, default=None)


def _accounts(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    generator = manifest.get("generator") or {}
    nested = generator.get("workers") or []
    for entry in [
        generator,
        *(nested.values() if isinstance(nested, Mapping) else nested),
        *(manifest.get("workers") or []),
    ]:
        if isinstance(entry, Mapping):
            yield entry


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
