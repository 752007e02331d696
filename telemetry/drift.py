"""W2: does the model still assign the probabilities it did?  Teacher-forced, so without the noise of sampling.

Owns the comparison of two recordings of one reference text: at each position the log-probabilities of the top tokens
and of the token that really comes next.  Must always hold: two recordings of the same build give "same"; "numeric" says
that arithmetic changed (another kernel, fewer bits), "broken" that the model says something else.

* KL per position over the tokens that both recordings name, with the rest of the mass as one more outcome: a lower
  bound of the true KL (log-sum inequality), in nats.
* Top-1 agreement; perplexity of the reference text, exp of the mean negative log-probability.
* Thresholds: "numeric" is beyond what baseline recordings differ among themselves (their largest mean KL, three
  standard errors added, never below ``NUMERIC_FLOOR``).  "broken" is an absolute bound with room for 4-bit weights,
  which stay below 0.2 nats and above 80 % agreement even on models of 0.1B: mean KL >= 0.5, or agreement < 60 %, or a
  perplexity 1.5 times that of the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

SAME: Final = "same"
NUMERIC: Final = "numeric drift"
BROKEN: Final = "broken"

NUMERIC_FLOOR: Final = 1e-4  # nats; float32 against itself in another order of summing stays below
BROKEN_KL: Final = 0.5
BROKEN_AGREEMENT: Final = 0.6
BROKEN_PERPLEXITY: Final = 1.5


@dataclass(frozen=True, slots=True)
class Position:
    """One position of the reference text.  top: token -> log-probability; actual: log-probability of what comes
    next."""

    top: Mapping[str, float]
    actual: float

    @property
    def first(self) -> str:
        """The most probable token; of several alike the first by name, so that a tie is no disagreement by chance."""
        return min(self.top, key=lambda token: (-self.top[token], token))


@dataclass(frozen=True, slots=True)
class Drift:
    """kl: mean, its standard error, 99th percentile and largest, in nats.  perplexity: of each side."""

    positions: int
    kl: float
    kl_error: float
    kl_p99: float
    kl_max: float
    agreement: float
    perplexity_before: float
    perplexity_after: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def kl_divergence(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """KL(before || after) in nats from two top lists of log-probabilities; a lower bound, 0 for equal lists."""
    shared = before.keys() & after.keys()
    rest_before = max(1e-12, 1 - math.fsum(math.exp(before[token]) for token in shared))
    rest_after = max(1e-12, 1 - math.fsum(math.exp(after[token]) for token in shared))
    named = math.fsum(math.exp(before[token]) * (before[token] - after[token]) for token in shared)
    rest = rest_before * math.log(rest_before / rest_after) if rest_before > 1e-9 else 0.0
    return max(0.0, named + rest)


def measure(before: Sequence[Position], after: Sequence[Position]) -> Drift:
    """Compare two recordings.  ValueError where they are empty or of different length: not the same text."""
    if not before or len(before) != len(after):
        raise ValueError(f"recordings of {len(before)} and {len(after)} positions are not of one text")
    values = np.array([kl_divergence(a.top, b.top) for a, b in zip(before, after, strict=True)])
    agreed = sum(a.first == b.first for a, b in zip(before, after, strict=True))
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
    return Drift(
        positions=len(values),
        kl=float(values.mean()),
        kl_error=error,
        kl_p99=float(np.quantile(values, 0.99, method="inverted_cdf")),
        kl_max=float(values.max()),
        agreement=agreed / len(values),
        perplexity_before=_perplexity(before),
        perplexity_after=_perplexity(after),
    )


def numeric_threshold(baselines: Sequence[Drift]) -> float:
    """Mean KL beyond which a recording differs from the baseline more than baseline recordings do among themselves."""
    spread = max((one.kl + 3 * one.kl_error for one in baselines), default=0.0)
    return max(NUMERIC_FLOOR, spread)


def judge(found: Drift, baselines: Sequence[Drift] = ()) -> str:
    """same, numeric drift or broken.  baselines: drifts between recordings of the trusted build."""
    ratio = found.perplexity_after / found.perplexity_before
    if found.kl >= BROKEN_KL or found.agreement < BROKEN_AGREEMENT or ratio >= BROKEN_PERPLEXITY:
        return BROKEN
    return NUMERIC if found.kl - 3 * found.kl_error > numeric_threshold(baselines) else SAME


def _perplexity(positions: Sequence[Position]) -> float:
    mean = math.fsum(-one.actual for one in positions) / len(positions)
    return math.exp(min(mean, 700.0))
