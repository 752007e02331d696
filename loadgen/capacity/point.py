"""One run of a search, judged: its rate, whether it held the SLO, how surely, and the figures that the answer needs.

Owns the step from a bundle to a Point.  Must always hold: a run that is not VALID never counts for or against the
server, unless we ended it ourselves because it was lost; a Point is plain JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names
from telemetry.bundle import Bundle
from telemetry.objective import BROKEN, HELD, UNDECIDED
from telemetry.repeatable import FARTHEST, chance, margin
from telemetry.slo import Slo
from telemetry.summary import Summary

SEARCH: Final = "search"
OVERLOAD: Final = "overload"  # sent only for what it does to the server
DESCENT: Final = "descent"  # after an overload

#: verdict of a point: held, broken, undecided; or CLIENT_LIMITED, INCOMPLETE.
LATENCIES: Final = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Point:
    """rate: requests/s offered.  margin: of the SLO, in standard errors (``telemetry.repeatable``).  run: its bundle's
    folder name.

    good_share: of the judged requests.  good_per_s: good requests/s offered in the run; tokens_per_s: output tokens of
    good requests/s; prompt_tokens_per_s likewise.  latency_s: p50 and p95 of each measure.  breaks: the objective with
    the least chance.
    """

    kind: str
    rate: float
    seed: int
    run: str
    verdict: str
    margin: float
    requests: int
    length_s: float
    good_share: float | None
    tokens_per_s: float
    prompt_tokens_per_s: float
    latency_s: dict[str, list[float | None]]
    breaks: str | None
    stopped: str | None = None
    why: str = ""  # of a run that does not count

    @property
    def good_per_s(self) -> float:
        """Good requests/s."""
        return self.rate * (self.good_share or 0.0)

    @property
    def held(self) -> bool:
        return self.verdict == HELD

    @property
    def chance(self) -> float:
        """That another run at this rate holds the SLO."""
        return chance(self.margin)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Point:
        """From ``to_dict``; TypeError for missing keys."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def point_of(bundle: Bundle, slo: Slo, summary: Summary, kind: str, rate: float, seed: int) -> Point:
    """What a finished run says at its rate."""
    requests = bundle.table("requests")
    verdicts = bundle.verdicts(slo)
    stopped = bundle.manifest.get("stopped")
    distance, breaks = margin(slo, requests, verdicts)
    length_s = float(bundle.manifest.get("length_s") or 0.0)
    verdict, why = _verdict(summary, stopped)
    if verdict == HELD:
        distance = max(distance, 0.0)
    elif verdict == BROKEN:
        distance = -FARTHEST if stopped else min(distance, 0.0)
    good = requests.filter(
        pc.is_in(
            requests.column("index"),
            verdicts.filter(pc.equal(verdicts.column("label"), names.GOOD)).column("index").combine_chunks(),
        )
    )
    return Point(
        kind=kind,
        rate=rate,
        seed=seed,
        run=bundle.path.name,
        verdict=verdict,
        margin=distance,
        requests=summary.judged,
        length_s=length_s,
        good_share=summary.goodput,
        tokens_per_s=_tokens(good, "completion_tokens_reported", "completion_tokens_counted") / max(length_s, 1e-9),
        prompt_tokens_per_s=_tokens(good, "prompt_tokens_reported", "input_tokens") / max(length_s, 1e-9),
        latency_s={one.measure: [one.scheduled[0].value, one.scheduled[2].value] for one in summary.latencies},
        breaks=breaks,
        stopped=stopped,
        why=why,
    )


def _verdict(summary: Summary, stopped: str | None) -> tuple[str, str]:
    if stopped:
        return BROKEN, stopped
    if summary.validity.verdict != names.VALID:
        return summary.validity.verdict, "; ".join(summary.validity.reasons)
    refused = summary.reasons[names.DROPPED].get(names.REFUSED, 0)
    if refused > summary.judged / 2:
        return names.INCOMPLETE, f"the server is gone: {refused} of {summary.judged} requests were refused"
    if summary.decision == UNDECIDED:
        return UNDECIDED, summary.sentence
    return (HELD if summary.held else BROKEN), ""


def _tokens(rows: pa.Table, column: str, otherwise: str) -> float:
    counted = pc.coalesce(rows.column(column), rows.column(otherwise))
    return float(pc.sum(counted).as_py() or 0)
