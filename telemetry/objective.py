"""Objectives of an SLO: sentences such as ``ttft p95 <= 2 s``, and how several are joined by AND and OR.

Owns the grammar of a sentence and the three-valued logic of its verdict.  Must always hold: a sentence that would
reward the worse is refused; too few requests never make a yes or a no.

The logic is Kleene's: an AND is broken as soon as one member is, undecided while one member is and none is broken; an
OR is held as soon as one member is.  So a small sample can leave an SLO open, never turn a broken one into a held one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from telemetry.names import DROPPED, LATE, PHASES, ROW_PHASES, WRONG
from telemetry.stats import needed_to_certify

GOODPUT: Final = "goodput"
FLUIDITY: Final = "fluidity"
LATENCIES: Final = ("ttft", "tpot", "e2e", "gap")
SHARES: Final = (GOODPUT, LATE, WRONG, DROPPED)
GRAMMAR: Final = "'ttft p95 <= 2 s', 'queue p90 <= 500 ms', 'fluidity p5 >= 90 %' or 'goodput >= 95 %'"

HELD: Final = "held"
BROKEN: Final = "broken"
UNDECIDED: Final = "undecided"  # too few requests to say

ALL: Final = "all"
ANY: Final = "any"

#: ``min_requests: certify`` asks of a share that so many requests without a single bad one prove it with 95 %.
SHARE_ALPHA: Final = 0.05

_SENTENCE: Final = re.compile(
    r"(?P<measure>[a-z0-9_]+)(?:\s+p(?P<percentile>\d+(?:\.\d+)?))?\s*(?P<op><=|>=)\s*"
    r"(?P<bound>\d+(?:\.\d+)?)\s*(?P<unit>s|ms|%)?"
)


class Problem(Exception):
    """A sentence that is not understood.  The reader of the file adds the line."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Objective:
    """One sentence about the run.  bound: seconds for latencies and phases, a share (0..1) otherwise.

    min_requests: with fewer the objective is undecided, neither held nor broken.
    """

    text: str
    measure: str
    percentile: float | None
    op: str
    bound: float
    traffic_class: str | None = None
    min_requests: int = 0

    def holds(self, value: float | None, *, unbounded: bool = False) -> bool:
        """Whether a measured value keeps it; a value that is missing or unbounded keeps none."""
        if unbounded or value is None:
            return False
        return value <= self.bound if self.op == "<=" else value >= self.bound

    @property
    def is_share(self) -> bool:
        """Whether its value is a share of the requests (goodput, late, wrong, dropped)."""
        return self.measure in SHARES

    @property
    def is_fraction(self) -> bool:
        """Whether its value lies in 0..1 and has no unit."""
        return self.is_share or self.measure == FLUIDITY

    @property
    def allowed_bad(self) -> float:
        """Share of the requests that may be bad: the error budget, seen as a ratio of good to total.

        A percentile is a ratio too: ``ttft p95 <= 2 s`` lets 5 % of the requests be slower than 2 s.
        """
        if self.measure == GOODPUT:
            return 1 - self.bound
        if self.is_share:
            return self.bound
        percentile = self.percentile or 0.0
        return (percentile if self.op == ">=" else 100 - percentile) / 100

    @property
    def sentence(self) -> str:
        """The text with its class."""
        return f"{self.text} (class {self.traffic_class})" if self.traffic_class else self.text


@dataclass(frozen=True, slots=True)
class Group:
    """Objectives joined by ``all`` or ``any``; members are positions in Slo.objectives, or groups."""

    kind: str
    members: tuple[int | Group, ...]

    def decide(self, verdicts: Sequence[str]) -> str:
        """held, broken or undecided, from the verdict of each objective."""
        found = [m.decide(verdicts) if isinstance(m, Group) else verdicts[m] for m in self.members]
        settles = BROKEN if self.kind == ALL else HELD
        if settles in found:
            return settles
        if UNDECIDED in found:
            return UNDECIDED
        return HELD if self.kind == ALL else BROKEN

    def words(self, objectives: Sequence[Objective]) -> str:
        """The rule as a sentence: ``goodput >= 95 % AND (ttft p95 <= 2 s OR e2e p95 <= 9 s)``."""
        parts = [f"({m.words(objectives)})" if isinstance(m, Group) else objectives[m].sentence for m in self.members]
        return (" AND " if self.kind == ALL else " OR ").join(parts)

    def canonical(self) -> list[object]:
        """Plain lists, for the hash of an SLO."""
        return [self.kind, *(m.canonical() if isinstance(m, Group) else m for m in self.members)]

    @property
    def is_flat(self) -> bool:
        """Whether it only joins objectives by AND, which is what a plain list says."""
        return self.kind == ALL and not any(isinstance(m, Group) for m in self.members)


def parse_sentence(text: str, traffic_class: str | None = None, min_requests: int | str = 0) -> Objective:
    """One objective from its sentence.  min_requests: a number, or ``certify``.  Raises Problem."""
    sentence = " ".join(text.split())
    match = _SENTENCE.fullmatch(sentence)
    if match is None:
        raise Problem(f"cannot understand objective {sentence!r}", f"write it like {GRAMMAR}")
    measure, op, unit, number = match["measure"], match["op"], match["unit"], float(match["bound"])
    percentile = float(match["percentile"]) if match["percentile"] else None
    if measure in SHARES:
        if percentile is not None or unit not in ("%", None):
            raise Problem(f"{measure} is a share of the requests", f"write {measure} {op} 5 %")
        bound = _share(number, unit)
    elif measure == FLUIDITY:
        if percentile is None or not 0 < percentile < 100:
            raise Problem("fluidity needs a percentile between p0 and p100", "write fluidity p5 >= 90 %")
        if unit not in ("%", None):
            raise Problem("fluidity is a share of token deadlines", "write fluidity p5 >= 90 %")
        bound = _share(number, unit)
    elif measure in (*LATENCIES, *ROW_PHASES):
        if percentile is None or not 0 < percentile < 100:
            raise Problem(f"{measure} needs a percentile between p0 and p100", f"like {GRAMMAR}")
        if unit not in ("s", "ms"):
            raise Problem(f"{measure} is a time and needs a unit", "end it with s or ms")
        bound = number / (1000 if unit == "ms" else 1)
    else:
        raise Problem(f"no measure {measure!r}", f"one of: {', '.join((*LATENCIES, FLUIDITY, *SHARES, *PHASES))}")
    more_is_better = measure in (GOODPUT, FLUIDITY)
    if (op == ">=") != more_is_better:
        raise Problem(f"{measure} {op} would reward the worse", f"use {'>=' if more_is_better else '<='}")
    made = Objective(sentence, measure, percentile, op, bound, traffic_class)
    needed = certifying_sample(made) if isinstance(min_requests, str) else min_requests
    return Objective(sentence, measure, percentile, op, bound, traffic_class, needed)


def certifying_sample(objective: Objective) -> int:
    """Requests needed to say yes with confidence: the certifying n of a percentile, the rule of three of a share.

    A share: the smallest n with (1 - allowed)^n <= 5 %, so that n requests without a bad one prove it; 1 where nothing
    or everything is allowed, since then no sample proves it or none is needed.
    """
    if objective.percentile is not None:
        p = objective.percentile if objective.op == "<=" else 100 - objective.percentile
        return needed_to_certify(p)
    allowed = objective.allowed_bad
    if not 0 < allowed < 1:
        return 1
    return math.ceil(math.log(SHARE_ALPHA) / math.log1p(-allowed))


def _share(number: float, unit: str | None) -> float:
    bound = number / (100 if unit == "%" else 1)
    if not 0 <= bound <= 1:
        raise Problem(f"{bound:g} is not a share", "give 0 to 100 %, or 0 to 1 without a unit")
    return bound
