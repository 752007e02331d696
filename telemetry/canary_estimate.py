"""What the checked answers of a run say about the share of wrong ones, with its interval, and what they could have
seen.

Owns the estimate.  Must always hold: only complete answers that a check with the right answer at hand has seen are
counted (verdict column ``correct`` yes or no, canaries, or requests with a known answer); the unchecked are not
guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names
from telemetry.distributions import binomial_at_least, binomial_interval

SEEN_AT_LEAST: Final = 3  # fewer wrong answers are no pattern
POWER: Final = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """wrong of checked answers; low, high: 95 % interval (Clopper and Pearson) of the share of wrong.

    could_see: the smallest share of wrong answers of which at least three would have been seen with 95 %; None: none.
    """

    checked: int
    wrong: int
    low: float
    high: float
    could_see: float | None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def estimate(requests: pa.Table, verdicts: pa.Table) -> Estimate | None:
    """From the verdicts of a run; None where no answer was checked."""
    canaries = requests.filter(pc.is_valid(requests.column("canary_kind"))).column("index").combine_chunks()
    verified = verdicts.column("verified")
    chosen = pc.or_(verified, pc.is_in(verdicts.column("index"), canaries))
    counted = verdicts.filter(
        pc.and_(
            chosen,
            pc.and_(
                pc.equal(verdicts.column("answered"), "yes"), pc.not_equal(verdicts.column("label"), names.INVALID)
            ),
        )
    )
    counted = counted.filter(pc.not_equal(counted.column("correct"), "unchecked"))
    n = counted.num_rows
    if n == 0:
        return None
    wrong = int(pc.sum(pc.equal(counted.column("correct"), "no")).as_py() or 0)
    low, high = binomial_interval(wrong, n)
    return Estimate(n, wrong, low, high, could_have_seen(n))


def could_have_seen(n: int, at_least: int = SEEN_AT_LEAST, power: float = POWER) -> float | None:
    """The smallest share of wrong answers of which n checks would show ``at_least`` with ``power``; None: no share."""
    if n < at_least:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if binomial_at_least(at_least, n, middle) >= power else (middle, high)
    return high


def checks_needed(share: float, at_least: int = SEEN_AT_LEAST, power: float = POWER) -> int:
    """Checks needed to see ``at_least`` wrong answers with ``power`` at a share of wrong in (0, 1]: about 6.3 /
    share."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of wrong answers lies in (0, 1], not {share}")
    low, high = at_least - 1, at_least
    while binomial_at_least(at_least, high, share) < power:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if binomial_at_least(at_least, middle, share) >= power else (middle, high)
    return high
