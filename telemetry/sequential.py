"""Watching canaries while a run goes: an alarm as soon as wrong answers are more than flakes, at a bound on false
alarms.

Owns the sequential test.  A canary that was admitted gives a wrong answer now and then all the same (its *flake rate*,
0.1 % by default).  The test bets against "wrong at most at the flake rate" and alarms when the bet has multiplied its
stake by ``1 / alpha``.

The stake (an e-process) is a mixture of likelihood ratios over alternatives (2 %, 5 %, 20 % and 90 % wrong) and over
the moment at which the trouble begins: half of it from the first canary on, half spread evenly over the horizon, so
that a server which turns bad in mid-run is seen too.

    stake_n = sum_j prior_j sum_k weight_k prod_{i=j..n} f_k(x_i) / f_0(x_i)   (+ the priors of starts still to come)

Must always hold, whatever the horizon, the order and how often one looks: P(stake ever >= 1 / alpha) <= alpha while the
rate of wrong answers is at most the flake rate (Ville's inequality; a rate below it only makes the ratios smaller).
Each canary costs a few multiplications; nothing is kept per canary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.canary_estimate import could_have_seen
from telemetry.distributions import binomial_at_least

FLAKE_RATE: Final = 0.001
HORIZON: Final = 1000
ALPHA: Final = 0.01
ALTERNATIVES: Final = (0.02, 0.05, 0.2, 0.9)
WEIGHTS: Final = (0.2, 0.5, 0.2, 0.1)
HIGHEST: Final = 1e250  # a stake is cut here, long after the alarm
AT_START: Final = 0.5  # of the stake; the rest is spread over later starts


class Watch:
    """The test in progress.  ``see`` each canary's result in the order in which they end."""

    def __init__(self, *, flake_rate: float = FLAKE_RATE, horizon: int = HORIZON, alpha: float = ALPHA) -> None:
        if not 0 < flake_rate < min(ALTERNATIVES) or horizon < 1 or not 0 < alpha < 1:
            raise ValueError(f"flake rate {flake_rate}, horizon {horizon}, alpha {alpha}: see telemetry.sequential")
        self.flake_rate, self.horizon, self.alpha = flake_rate, horizon, alpha
        self.seen = self.wrong = 0
        self.alarm_at: int | None = None  # canaries seen when the alarm came
        self.highest = 1.0
        self._rates = np.array(ALTERNATIVES)
        self._weights = np.array(WEIGHTS)
        self._stakes = AT_START * self._weights
        self._waiting = 1 - AT_START  # of the prior: starts still to come

    def see(self, wrong: bool) -> bool:
        """One more canary; true once the alarm has come."""
        start = (1 - AT_START) / self.horizon if self.seen < self.horizon else 0.0
        self._stakes = self._stakes + start * self._weights
        self._waiting = max(0.0, self._waiting - start)
        ratio = self._rates / self.flake_rate if wrong else (1 - self._rates) / (1 - self.flake_rate)
        self._stakes = np.minimum(self._stakes * ratio, HIGHEST)
        self.seen += 1
        self.wrong += wrong
        self.highest = max(self.highest, self.stake)
        if self.alarm_at is None and self.stake >= 1 / self.alpha:
            self.alarm_at = self.seen
        return self.alarm_at is not None

    @property
    def stake(self) -> float:
        """By how much the bet has multiplied; 1 at the start."""
        return float(self._stakes.sum()) + self._waiting

    @property
    def p_value(self) -> float:
        """Valid at any moment of looking: 1 over the highest stake so far."""
        return min(1.0, 1 / self.highest)

    def sentence(self) -> str:
        """What was seen, and what could have been seen: both belong to the result."""
        told = f"{self.wrong} of {self.seen} canaries wrong"
        if self.alarm_at is not None:
            return f"{told}: alarm at canary {self.alarm_at} (more than flakes of {100 * self.flake_rate:g} %)"
        visible = could_have_seen(self.seen)
        told += ", no alarm"
        if visible is None:
            return f"{told}; so few could have seen nothing"
        return f"{told}; a share of {100 * visible:.2g} % wrong would have shown three or more with 95 %"


def alarms(
    results: npt.NDArray[np.bool_], *, flake_rate: float = FLAKE_RATE, alpha: float = ALPHA
) -> npt.NDArray[np.int64]:
    """``Watch`` over many runs at once.  results: runs x canaries.  Canaries seen at the alarm, -1: none came."""
    runs, horizon = results.shape
    rates, weights = np.array(ALTERNATIVES), np.array(WEIGHTS)
    stakes = np.tile(AT_START * weights, (runs, 1))
    waiting = 1 - AT_START
    found = np.full(runs, -1, dtype=np.int64)
    for number in range(horizon):
        start = (1 - AT_START) / horizon
        waiting -= start
        stakes = (stakes + start * weights) * np.where(
            results[:, number, None], rates / flake_rate, (1 - rates) / (1 - flake_rate)
        )
        stakes = np.minimum(stakes, HIGHEST)
        found[(found < 0) & (stakes.sum(axis=1) + max(0.0, waiting) >= 1 / alpha)] = number + 1
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """A fixed number of canaries against flakes.  canaries: how many; limit: more wrong than this is an alarm."""

    canaries: int
    limit: int


def canaries_against_flakes(share: float, flake_rate: float, alpha: float = 0.05, power: float = 0.95) -> Plan:
    """The least canaries with which wrong answers at ``share`` stand out from flakes, looked at once, at the end.

    More than ``limit`` wrong has probability at most alpha under the flake rate and at least ``power`` under the share.
    It is why stable canaries are worth more than many: near the flake rate the number explodes.  ValueError unless
    0 < flake_rate < share <= 1.
    """
    if not 0 < flake_rate < share <= 1:
        raise ValueError(f"share {share} has to lie above the flake rate {flake_rate}, both in (0, 1]")
    for limit in range(10_000):
        # The fewest canaries that show more than `limit` with the power asked; then: are they few enough for alpha?
        low, high = limit, max(1, limit + 1)
        while binomial_at_least(limit + 1, high, share) < power:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if binomial_at_least(limit + 1, middle, share) >= power else (middle, high)
        if binomial_at_least(limit + 1, high, flake_rate) <= alpha:
            return Plan(high, limit)
    raise ValueError(f"share {share} is too close to the flake rate {flake_rate}")
