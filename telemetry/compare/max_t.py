"""One test for many figures: is any mean of paired differences other than zero, and by how much?

    differences     [pairs, figures]: log q_B - log q_A, or share_B - share_A, of each repeat
    sign flips      if nothing changed, A and B of a pair could as well have been exchanged, which changes the signs of
                    its row; all 2^K exchanges are made, and the largest |T| over the figures is compared with those
                    (max-T: Westfall and Young 1993; exact for any dependence of the figures and any distribution)

With K pairs no two-sided p-value lies below 2 / 2^K: 0.0625 at K = 5, 0.031 at K = 6.  Below six pairs Student's t with
Bonferroni's correction stands in, which takes the differences for normal.

Intervals are mean +- c * standard error with one c for all figures: the largest of the flips' critical value, of that
of the flips of the residuals (which a large effect does not widen), and of Student's t for a single figure.  So an
interval that leaves out zero implies that the test rejects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.distributions import student_quantile, student_tail

LEAST_FLIPPED: Final = 6  # pairs from which sign flips can say anything at 5 %
ALL_FLIPS_UP_TO: Final = 13  # pairs: 4,096 flips up to the sign of all
WIDEST: Final = 10.0  # half an interval, in standard deviations of a pair's difference: a wider one bounds nothing
DRAWN_FLIPS: Final = 4095  # beyond, and the one that was seen
SEED: Final = 20_240_502
_TIE: Final = 1e-9
_POWER_DRAWS: Final = 4000
MOST_PAIRS: Final = 500

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tested:
    """Per figure: mean difference, its interval, adjusted p.  critical: c.  exact: by sign flips."""

    mean: Floats
    low: Floats
    high: Floats
    p: Floats
    critical: float
    exact: bool


def test(differences: Floats, alpha: float) -> Tested:
    """differences: [pairs >= 2, figures], finite.  ValueError for fewer pairs."""
    pairs, figures = differences.shape
    if pairs < 2:
        raise ValueError(f"{pairs} pairs: a mean without a spread cannot be tested")
    mean = differences.mean(axis=0)
    error = differences.std(axis=0, ddof=1) / math.sqrt(pairs)
    single = student_quantile(1 - alpha / 2, pairs - 1)
    if pairs < LEAST_FLIPPED:
        critical = student_quantile(1 - alpha / (2 * max(1, figures)), pairs - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(error > 0, np.abs(mean) / error, np.where(mean == 0, 0.0, np.inf))
        p = np.array(
            [min(1.0, figures * 2 * (student_tail(float(one), pairs - 1) if one < np.inf else 0.0)) for one in t]
        )
        return Tested(mean, mean - critical * error, mean + critical * error, p, critical, False)
    seen = _ratio(mean, (differences**2).sum(axis=0), pairs)
    largest = _largest(differences)
    p = (largest[:, None] >= seen[None, :] - _TIE).mean(axis=0)
    rank = int(alpha * len(largest) + _TIE)  # so many flips may lie above the critical value
    critical = max(_t(_nth(largest, rank), pairs), _t(_nth(_largest(differences - mean), rank), pairs), single)
    return Tested(mean, mean - critical * error, mean + critical * error, p, critical, True)


def pairs_needed(spread: float, effect: float, power: float, level: float) -> int | None:
    """Pairs with which a mean difference ``effect`` is found with ``power``; None: more than MOST_PAIRS.

    spread: standard deviation of the differences of a pair, taken for normal.  level: of the figure's own test, see
    ``effective_level``.
    """
    if effect <= 0:
        return None
    if spread <= 0:
        return LEAST_FLIPPED
    rng = np.random.default_rng(SEED)
    normal = rng.standard_normal(_POWER_DRAWS)
    pairs: int
    for pairs in chain(range(LEAST_FLIPPED, 41), range(44, MOST_PAIRS + 1, 4)):
        critical = student_quantile(1 - level / 2, pairs - 1)
        chi = rng.chisquare(pairs - 1, _POWER_DRAWS)
        t = (normal + effect * math.sqrt(pairs) / spread) / np.sqrt(chi / (pairs - 1))
        if float((t > critical).mean()) >= power:
            return pairs
    return None


def pairs_to_bound(alpha: float, figures: int) -> int:
    """Pairs from which the interval of so many figures together is no wider than WIDEST: 3 for the figures of compare.

    With two pairs Student's t has one degree of freedom: twelve intervals at 5 % would be 108 standard deviations wide.
    """
    for pairs in range(2, LEAST_FLIPPED):
        if student_quantile(1 - alpha / (2 * max(1, figures)), pairs - 1) <= WIDEST * math.sqrt(pairs):
            return pairs
    return LEAST_FLIPPED


def effective_level(tested: Tested, pairs: int, alpha: float, figures: int) -> float:
    """The level of one figure's own test that the joint critical value amounts to."""
    level = 2 * student_tail(tested.critical, pairs - 1)
    return min(alpha, max(level, alpha / max(1, figures)))


def _largest(differences: Floats) -> Floats:
    """Per flip, the largest ratio over the figures."""
    pairs = len(differences)
    means = flips(pairs) @ differences / pairs
    squares = (differences**2).sum(axis=0)
    found: Floats = _ratio(means, squares, pairs).max(axis=1, initial=0.0)
    return found


def _ratio(mean: Floats, squares: Floats, pairs: int) -> Floats:
    """K mean^2 / sum of squares: grows with |T|, lies in 0..1, and a spread of zero does no harm."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(squares > 0, pairs * mean**2 / squares, 0.0)
    return found


def _t(ratio: float, pairs: int) -> float:
    # a hair wider, so that a value that equals the critical one does not pass it by rounding
    return (1 + 1e-9) * math.sqrt((pairs - 1) * ratio / max(1 - ratio, 1e-12))


def _nth(values: Floats, rank: int) -> float:
    """The value that ``rank`` others lie above, counted from 0."""
    return float(np.sort(values)[::-1][min(rank, len(values) - 1)])


@lru_cache(maxsize=16)
def flips(pairs: int) -> Floats:
    """[flips, pairs] of +-1, the first all +1.  The first pair keeps its sign: |T| does not know the other half."""
    if pairs <= ALL_FLIPS_UP_TO:
        bits = np.arange(2 ** (pairs - 1))[:, None] >> np.arange(pairs - 1)[None, :]
        rest = 1.0 - 2.0 * (bits & 1)
        return np.hstack([np.ones((len(rest), 1)), rest])
    rng = np.random.default_rng(SEED)
    drawn = rng.integers(0, 2, (DRAWN_FLIPS, pairs)) * 2.0 - 1.0
    return np.vstack([np.ones((1, pairs)), drawn])


def least_p(pairs: int) -> float:
    """The smallest two-sided p-value that sign flips of so many pairs can give."""
    return float(2.0 ** (1 - pairs))
