"""How long a step takes when nothing computes it: a base time, and the noise that real steps have.

    time = base(load) * exp(x) + stall
    x      AR(1) in log time: x' = rho x + sqrt(1 - rho^2) sigma e, shifted so that exp(x) is 1 in the mean
    stall  now and then (a rate per second of stepping) a pause, exponential with a given mean

The base is the account of a model on a device (``RooflineTime``), or what was measured (``engine.step_fit``).
What must hold: the same seed and the same steps give the same times; a time is never below one microsecond.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from engine.step_load import StepLoad
from models.roofline import StepCost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Share of the peak that large matrix products reach.  An assumption: reports of model FLOPs utilisation in prefill
#: on these cards lie between 0.4 and 0.7.
UTILISATION: Final = 0.6
SHORTEST_NS: Final = 1_000


class BaseTime(Protocol):
    """A step's time without noise."""

    def seconds(self, load: StepLoad) -> float:
        """Seconds, above 0."""

    def decodes(self, batch: int, contexts: Floats) -> Floats:
        """``seconds``, to the last bit, of steps that decode ``batch`` sequences; contexts: tokens with KV of each."""


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """The iron law: bytes / bandwidth + FLOPs / (peak * utilisation) + fixed cost.  Never below the step's floor."""

    cost: StepCost
    utilisation: float = UTILISATION

    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step on the device."""
        return self.cost.iron_law_ns(self.cost.floor_ns(*load), self.utilisation) / 1e9

    def decodes(self, batch: int, contexts: Floats) -> Floats:
        """Seconds of steps of decodes."""
        return self.cost.decodes_ns(batch, contexts, self.utilisation) / 1e9


@dataclass(frozen=True, slots=True)
class ScaledTime:
    """Another base, ``speed`` times as fast, and of that the part that prompt tokens make ``prefill_speed`` times.

    That part is the step's time less what it would take with the same KV and none of them; of a step without decodes
    it is the whole.
    """

    base: BaseTime
    speed: float = 1.0
    prefill_speed: float = 1.0

    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step."""
        whole = self.base.seconds(load)
        if load.prefill_tokens and self.prefill_speed != 1.0:
            without = StepLoad(0, load.decode_seqs, load.context_tokens, load.sampled_rows, load.context_tokens)
            rest = self.base.seconds(without) if load.decode_seqs else 0.0
            whole = rest + (whole - rest) / self.prefill_speed
        return whole / self.speed

    def decodes(self, batch: int, contexts: Floats) -> Floats:
        """Seconds of steps of decodes."""
        return self.base.decodes(batch, contexts) / self.speed


@dataclass(frozen=True, slots=True)
class Noise:
    """sigma: of log time.  autocorrelation: of one step's log time with the next one's, 0 .. 1.

    stall_rate: stalls per second of stepping.  stall_s: their mean length, seconds.
    """

    sigma: float = 0.0
    autocorrelation: float = 0.0
    stall_rate: float = 0.0
    stall_s: float = 0.0


QUIET: Final = Noise()


class StepTimes:
    """Times of one run of steps; has the state of the noise, so one for each engine."""

    def __init__(self, base: BaseTime, noise: Noise = QUIET, seed: int = 0) -> None:
        self.base, self.noise = base, noise
        self._draw = random.Random(seed)
        self._x = self._draw.gauss(0.0, noise.sigma) if noise.sigma else 0.0
        self._fresh = math.sqrt(1.0 - noise.autocorrelation**2) * noise.sigma
        self._shift = 0.5 * noise.sigma**2  # the mean of exp(x) is exp(sigma^2 / 2)
        self._drawn: int | None = None  # the next step's, which ``decodes_ns`` has drawn already

    def next_ns(self, load: StepLoad) -> int:
        """How long the next step takes (ns)."""
        if self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            return drawn
        return self._noisy_ns(self.base.seconds(load))

    def decodes_ns(self, batch: int, contexts: Floats, room_ns: int, gap_ns: int) -> Ints:
        """How long each of the next steps takes, which decode ``batch`` sequences: those that are over before room_ns.

        contexts: tokens with KV of each.  room_ns: from now; a step and the gap_ns after it must end before that.  What
        was drawn for the first that does not is kept: the next step must be that one.
        """
        base = self.base.decodes(batch, contexts)
        if not self.noise.sigma and not self.noise.stall_rate:
            quiet: Ints = np.maximum(SHORTEST_NS, np.rint(base * 1e9)).astype(np.int64)
            return quiet[: int(np.searchsorted(np.cumsum(quiet + gap_ns), room_ns))]
        found: list[int] = []
        for seconds in base.tolist():
            drawn = self._noisy_ns(seconds)
            room_ns -= drawn + gap_ns
            if room_ns <= 0:
                self._drawn = drawn
                break
            found.append(drawn)
        return np.array(found, dtype=np.int64)

    def _noisy_ns(self, seconds: float) -> int:
        noise = self.noise
        if noise.sigma:
            self._x = noise.autocorrelation * self._x + self._draw.gauss(0.0, self._fresh)
            seconds *= math.exp(self._x - self._shift)
        if noise.stall_rate and self._draw.random() < 1.0 - math.exp(-noise.stall_rate * seconds):
            seconds += self._draw.expovariate(1.0 / noise.stall_s)
        return max(SHORTEST_NS, round(seconds * 1e9))
