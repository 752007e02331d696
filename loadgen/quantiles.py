"""Quantiles of a stream of durations in constant memory: counts in logarithmic buckets.

Owns the generator's live figures (lag, loop lag).  Must always hold: a quantile is never below the true one and at
most 2 % above it; the maximum is exact.  Verdicts do not rest on these: they are derived from the rows.
"""

from __future__ import annotations

import math
from typing import Final

_LEAST_S: Final = 1e-6
_RATIO: Final = 1.02
_LOG_RATIO: Final = math.log(_RATIO)
_BUCKETS: Final = math.ceil(math.log(1e5 / _LEAST_S) / _LOG_RATIO) + 1  # up to a day and more


class Quantiles:
    """Durations in seconds; those below one microsecond (negative ones too) count as one microsecond."""

    def __init__(self) -> None:
        self._counts = [0] * (_BUCKETS + 1)
        self.count = 0
        self.maximum = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        if seconds > self.maximum:
            self.maximum = seconds
        bucket = 0 if seconds <= _LEAST_S else math.ceil(math.log(seconds / _LEAST_S) / _LOG_RATIO)
        self._counts[min(bucket, _BUCKETS)] += 1

    def quantile(self, q: float) -> float | None:
        """The smallest bound that at least `q` (0..1) of the durations keep; None without any."""
        if not self.count:
            return None
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return min(self.maximum, _LEAST_S * _RATIO**bucket) if self.maximum > _LEAST_S else _LEAST_S
        return self.maximum
