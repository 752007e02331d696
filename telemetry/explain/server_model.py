"""A server as a few numbers, and the replay of a load through it: the contract between explain and its models.

``explain`` asks "what would the percentile be with A's arrivals and B's steps?" many times.  Whoever answers is a
``Replay``: the queue model of ``queue_model``, or the engine's own scheduler in virtual time, which ``tailspan.py``
hands in, since telemetry knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives: arrays of equal length, in order of arrival.

    at_s: moment at the server's queue.  prompt, output, cached: tokens; cached are those that the prefix cache spares.
    """

    at_s: Floats
    prompt: Ints
    output: Ints
    cached: Ints

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What serves.  coefficients: seconds per unit of each of ``step_times.FEATURES``; speed: factor on them.

    max_batch: requests that run together.  token_budget: tokens a step.  kv_blocks: pages of ``block_size`` tokens;
    None: no limit.  gap_s: between two steps with work at hand.  stalls: (moment, length) in seconds on the load's
    clock, in which no step runs.
    """

    coefficients: tuple[float, ...]
    max_batch: int
    token_budget: int
    kv_blocks: int | None = None
    block_size: int = 16
    gap_s: float = 0.0
    speed: float = 1.0
    stalls: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """Per request of the load, seconds from its arrival; NaN: never answered."""

    ttft_s: Floats
    e2e_s: Floats


#: (load, server) -> times.  Deterministic.
Replay = Callable[[Load, ServerModel], Replayed]
