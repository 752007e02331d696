"""What an explanation says, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from telemetry.compare.result import Comparison
from telemetry.explain.causes import UNKNOWN


@dataclass(frozen=True, slots=True)
class Contribution:
    """Layer 1: one phase's part (s) of a percentile on both sides.  low, high: of the change, over the repeats; None
    with a single pair."""

    phase: str
    a_s: float
    b_s: float
    low_s: float | None = None
    high_s: float | None = None

    @property
    def change_s(self) -> float:
        return self.b_s - self.a_s


@dataclass(frozen=True, slots=True)
class Phases:
    """Layer 1 of one percentile: the parts' changes sum to ``b_s - a_s``.  from_server: with the server's account."""

    measure: str
    p: float
    a_s: float
    b_s: float
    parts: tuple[Contribution, ...]
    from_server: bool

    @property
    def change_s(self) -> float:
        return self.b_s - self.a_s


@dataclass(frozen=True, slots=True)
class CauseShare:
    """Layer 2: what one factor makes of the change (s), as its Shapley value over the what-if replays.  low, high: over
    the pairs; None with one.  evidence: the factor's own figures on both sides, in words."""

    factor: str
    change_s: float
    low_s: float | None = None
    high_s: float | None = None
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Causes:
    """Layer 2.  observed_s: change of the figure; modelled_s: what the model of the server makes of it, the sum of the
    shares.  through: what replayed ("queue model" or the engine's twin).  replays: how many.  sample: requests in
    each.  error: |modelled A - measured A| / measured A."""

    figure: str
    observed_s: float
    modelled_s: float
    shares: tuple[CauseShare, ...]
    through: str
    replays: int
    sample: int
    error: float

    @property
    def largest(self) -> CauseShare | None:
        return max(self.shares, key=lambda one: one.change_s, default=None)


@dataclass(frozen=True, slots=True)
class Cell:
    """One group of requests of a partition.  share: of all requests; exceed: share of the group beyond the
    threshold."""

    name: str
    n_a: int
    n_b: int
    share_a: float
    share_b: float
    exceed_a: float
    exceed_b: float

    @property
    def mix(self) -> float:
        return (self.share_b - self.share_a) * (self.exceed_a + self.exceed_b) / 2

    @property
    def within(self) -> float:
        return (self.exceed_b - self.exceed_a) * (self.share_a + self.share_b) / 2


@dataclass(frozen=True, slots=True)
class Partition:
    """Layer 3: the change of the exceedance divided over an attribute, or two: mix + within is all of it, exactly.

    p_mix, p_within: by permutation; found: kept by the false-discovery control."""

    attributes: tuple[str, ...]
    change: float
    mix: float
    within: float
    p_mix: float
    p_within: float
    found: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """cause: a code of ``causes.CAUSES`` or ``UNKNOWN``.  share: of the change that it explains, where that can be
    said.  requests: indices that show it; steps: ids of engine steps."""

    cause: str
    words: str
    layer: str
    evidence: tuple[str, ...]
    disprove: str
    share: float | None = None
    requests: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """label: late, dropped, wrong, invalid or none.  figure: what was explained, "e2e p99" or "dropped".

    hypotheses: at most three, most likely first; never empty (``UNKNOWN`` where none stands out, "no_change" where
    nothing changed).  drill: (run id of B's first run) requests and steps to look at.  limits: what this explanation
    cannot know, in sentences.
    """

    label: str
    figure: str
    a: float | None
    b: float | None
    hypotheses: tuple[Hypothesis, ...]
    comparison: Comparison
    phases: tuple[Phases, ...] = ()
    causes: Causes | None = None
    partitions: tuple[Partition, ...] = ()
    limits: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def cause(self) -> str:
        """The first hypothesis' code."""
        return self.hypotheses[0].cause if self.hypotheses else UNKNOWN

    @property
    def verdict(self) -> tuple[str, str]:
        """(label, cause): what the lab's confusion matrix counts."""
        return self.label, self.cause

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "cause": self.cause, "comparison": self.comparison.to_dict()}
