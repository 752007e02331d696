"""W3: the same questions before and after; is the score worse?  McNemar's exact test on the questions that changed.

Owns the test and its power.  Must always hold: questions answered alike by both sides carry no weight; the p-value is
the exact binomial one, one-sided (worse), since a handful of changed answers is the usual case. Source: McNemar 1947;
the exact form is a sign test on the discordant pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from telemetry.distributions import binomial_at_least

ALPHA: Final = 0.01  # one-sided; a task score is no suspicion but a verdict


@dataclass(frozen=True, slots=True)
class Paired:
    """before, after: right answers of ``questions``.  lost: right before, wrong now; won: the other way round.

    could_see: the least number of lost questions (with none won) that would have been called worse.
    """

    questions: int
    before: int
    after: int
    lost: int
    won: int
    p_value: float
    worse: bool
    could_see: int

    @property
    def sentence(self) -> str:
        change = f"{self.before} of {self.questions} right before, {self.after} now ({self.lost} lost, {self.won} won)"
        if self.worse:
            return f"{change}: worse, p = {self.p_value:.2g}"
        return (
            f"{change}: not called worse, p = {self.p_value:.2g}; {self.could_see} lost with none won would have been"
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def compare(before: Mapping[str, bool], after: Mapping[str, bool], alpha: float = ALPHA) -> Paired:
    """Scores by question id; only ids that both have count.  ValueError where they share none."""
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise ValueError("the two sides share no question")
    lost = sum(before[key] and not after[key] for key in shared)
    won = sum(after[key] and not before[key] for key in shared)
    p = binomial_at_least(lost, lost + won, 0.5) if lost + won else 1.0
    return Paired(
        questions=len(shared),
        before=sum(before[key] for key in shared),
        after=sum(after[key] for key in shared),
        lost=lost,
        won=won,
        p_value=p,
        worse=p <= alpha and lost > won,
        could_see=least_lost(alpha),
    )


def least_lost(alpha: float = ALPHA, won: int = 0) -> int:
    """How many questions have to be lost, with so many won, to be called worse."""
    lost = won + 1
    while binomial_at_least(lost, lost + won, 0.5) > alpha:
        lost += 1
    return lost


def power(questions: int, lost_share: float, won_share: float = 0.0, alpha: float = ALPHA) -> float:
    """Probability that a loss of ``lost_share`` of the questions is called worse, while ``won_share`` get right by
    luck.

    Exact: the number of changed questions is binomial, and the lost among them too.
    """
    changed = lost_share + won_share
    if changed <= 0:
        return 0.0
    total = 0.0
    for n in range(questions + 1):
        here = binomial_at_least(n, questions, changed) - binomial_at_least(n + 1, questions, changed)
        if here < 1e-12 or n == 0:
            continue
        limit = next((k for k in range(n // 2 + 1, n + 1) if binomial_at_least(k, n, 0.5) <= alpha), None)
        if limit is not None:
            total += here * binomial_at_least(limit, n, lost_share / changed)
    return total
