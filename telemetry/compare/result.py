"""What a comparison says: an effect a figure, and the refusals that stand before them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from telemetry import names
from telemetry.compare.refusals import Refusal

PAIRED: Final = "paired"  # K >= 6 pairs: sign flips, exact
STUDENT: Final = "student"  # 2 .. 5 pairs: Student's t with Bonferroni's correction, which takes normal differences
BLOCKS: Final = "blocks"  # no repeats: blocks of time, approximate
NONE: Final = "none"  # nothing was tested

WORSE: Final = "worse"
BETTER: Final = "better"
SAME: Final = "no significant change"
UNTESTED: Final = "not compared"


@dataclass(frozen=True, slots=True)
class Effect:
    """One figure on both sides.

    figure: its name, "ttft p99" or "dropped".  a, b: geometric mean over the repeats in seconds, or mean share; None:
    unbounded (too many requests without an answer) or unknown.  change: relative (0.1 is 10 % longer) or, of a share,
    in points (0.01 is one per cent of the requests more).  low, high: simultaneous interval of the change over all
    figures shown; None: open end.  p: adjusted for all figures.  band_a, band_b: 95 % order-statistic bands (s) of the
    requests of a side taken together.  n: requests a repeat, the least.  verdict: WORSE, BETTER, SAME or UNTESTED.
    note: why it was not compared, or what to keep in mind.
    """

    figure: str
    relative: bool
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    p: float | None
    verdict: str
    n: int
    band_a: tuple[float | None, float | None] | None = None
    band_b: tuple[float | None, float | None] | None = None
    note: str | None = None
    pairs: tuple[tuple[float | None, float | None], ...] = ()  # value in A and B of each repeat; None: unbounded
    bound_from: int | None = None  # too few pairs for an interval: so many would bound it; None: enough

    @property
    def significant(self) -> bool:
        """Is the change told from noise, at the level of the comparison?"""
        return self.verdict in (WORSE, BETTER)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it.  alpha: of the comparison as a whole.  needed: pairs for ``power`` to see ``effect`` (relative, in the
    figure that needs most of those whose noise is known); None: cannot be said."""

    a: tuple[str, ...]  # run ids, in order of the repeats
    b: tuple[str, ...]
    method: str
    alpha: float
    effects: tuple[Effect, ...]
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    effect: float = 0.10
    power: float = 0.95
    needed: int | None = None
    warm_up: float = 0.0
    same_load: bool = True
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """May nothing be said on the whole?"""
        return any(one.whole for one in self.refusals)

    @property
    def approximate(self) -> bool:
        return self.method == BLOCKS

    @property
    def worse(self) -> list[Effect]:
        """What got worse, largest change first."""
        found = [one for one in self.effects if one.verdict == WORSE]
        return sorted(found, key=lambda one: -abs(one.change) if one.change is not None else float("-inf"))

    @property
    def changed(self) -> list[Effect]:
        return [one for one in self.effects if one.significant]

    @property
    def exit_code(self) -> int:
        """2: something got worse; 3: a run is not valid, nothing may be said; 4: the sides cannot be compared."""
        whole = [one for one in self.refusals if one.whole]
        if any(one.usage for one in whole):
            return names.EXIT_USAGE
        if whole:
            return names.EXIT_RUN_NOT_VALID
        return names.EXIT_REGRESSION if self.worse else names.EXIT_OK

    def of(self, figure: str) -> Effect:
        """The effect of a figure.  KeyError: it is not among them."""
        for one in self.effects:
            if one.figure == figure:
                return one
        raise KeyError(figure)

    @property
    def sentence(self) -> str:
        """What a person reads first."""
        if self.refused:
            return "Cannot tell: " + "; ".join(one.message for one in self.refusals if one.whole)
        if not self.changed:
            return "No significant change in any of the figures shown"
        from telemetry.compare.text import change_words

        words = [f"{one.figure} {change_words(one)}" for one in (*self.worse, *self.changed) if one.significant]
        return ("Worse: " if self.worse else "Changed: ") + ", ".join(list(dict.fromkeys(words))[:4])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, no NaN and no infinity."""
        return {
            **asdict(self),
            "refused": self.refused,
            "approximate": self.approximate,
            "sentence": self.sentence,
            "exit_code": self.exit_code,
        }
