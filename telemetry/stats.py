"""Percentiles of a run: order statistics with their bands, and what they can certify.

Definitions.  The p-th percentile of n values is the order statistic of rank ceil(p/100 * n), the nearest rank: a value
that some request really had, never an interpolation.  Requests without an answer are values too, ranked last as +inf
(censored): if the rank falls among them the percentile is *unbounded*, a flag, never NaN or 0.
Must always hold: every percentile carries n; the percentiles of several workers are those of the union of their rows.

Band: the order statistics X(l) .. X(u) that enclose the true percentile with at least 95 %, from the binomial
distribution of the number of values below it; no assumption on the shape of the latencies.  It takes requests for
independent, which queueing makes them not quite, so between two runs compare repeats, not bands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

CONFIDENCE: Final = 0.95  # of the band, two-sided
#: A percentile is certified when even the second largest of n values bounds it from above with 99 % confidence:
#: P(Binomial(n, 1 - p) <= 1) <= 1 %.  That is the early-stopping rule of MLPerf LoadGen; it needs 64 values for p90,
#: 130 for p95 and 662 for p99, and it implies that the 95 % band has an upper end.
CERTIFY_ALPHA: Final = 0.01

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Percentile:
    """p: 0..100.  value: None when unbounded or when there are no values.  n: all values, those dropped included.

    low, high: the 95 % band; None where the sample is too small or the band's end lies among the dropped.
    """

    p: float
    value: float | None
    unbounded: bool
    n: int
    dropped: int
    low: float | None
    high: float | None
    certified: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float] | Floats, p: float, dropped: int = 0) -> Percentile:
    """The p-th percentile of values and ``dropped`` more at +inf.  ValueError for a NaN or p outside (0, 100)."""
    return percentiles(values, (p,), dropped)[0]


def percentiles(values: Sequence[float] | Floats, ps: Sequence[float], dropped: int = 0) -> list[Percentile]:
    """Several percentiles of one set of values, sorted once."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if len(ordered) and np.isnan(ordered[-1]):  # NaN sorts last
        raise ValueError("a percentile of NaN: leave undefined values out")
    n = len(ordered) + dropped

    def at(rank: int | None) -> float | None:
        return float(ordered[rank - 1]) if rank is not None and 1 <= rank <= len(ordered) else None

    found = []
    for p in ps:
        if not 0 < p < 100:
            raise ValueError(f"p must lie between 0 and 100, not {p}")
        if n == 0:
            found.append(Percentile(p, None, False, 0, 0, None, None, False))
            continue
        rank = nearest_rank(n, p)
        low, high = band_ranks(n, p)
        found.append(
            Percentile(p, at(rank), rank > len(ordered), n, dropped, at(low), at(high), n >= needed_to_certify(p))
        )
    return found


def nearest_rank(n: int, p: float) -> int:
    """ceil(p/100 * n), at least 1; a hair is taken off, so that 0.95 * 100 does not become rank 96 by rounding."""
    return max(1, math.ceil(p * n / 100 - 1e-9))


@lru_cache(maxsize=4096)
def band_ranks(n: int, p: float) -> tuple[int | None, int | None]:
    """Ranks l, u with P(X(l) <= true percentile) and P(true percentile <= X(u)) at least 97.5 % each; None: none does.

    The number B of values at or below the true percentile is Binomial(n, p): X(l) exceeds it when B < l, and X(u) lies
    below it when B >= u.
    """
    tail = (1 - CONFIDENCE) / 2
    q = p / 100
    low = binomial_quantile(tail, n, q)  # the smallest k with P(B <= k) > tail, so that P(B < k) <= tail
    high = binomial_quantile(1 - tail, n, q) + 1
    return (low if low >= 1 else None, high if high <= n else None)


@lru_cache(maxsize=64)
def needed_to_certify(p: float) -> int:
    """The smallest n that certifies the p-th percentile: n = 662 for p99."""
    q = p / 100

    def enough(n: int) -> bool:
        return q**n + n * (1 - q) * q ** (n - 1) <= CERTIFY_ALPHA

    high = 2
    while not enough(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def binomial_quantile(level: float, n: int, q: float) -> int:
    """The smallest k with P(Binomial(n, q) <= k) > level, by exact sums in a window of 12 standard deviations."""
    mean, spread = n * q, math.sqrt(n * q * (1 - q))
    first = max(0, int(mean - 12 * spread - 12))
    last = min(n, int(mean + 12 * spread + 12))
    k = np.arange(first, last)
    steps = np.log((n - k) / (k + 1)) + math.log(q / (1 - q))  # log pmf(k + 1) - log pmf(k)
    start = (
        math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1)
        + first * math.log(q) + (n - first) * math.log1p(-q)
    )  # fmt: skip
    cumulative = np.cumsum(np.exp(start + np.concatenate(([0.0], np.cumsum(steps)))))
    return min(first + int(np.searchsorted(cumulative, level, side="right")), n)
