"""A server as a few numbers, and the replay of a load through it: the contract between explain and its models.

``explain`` asks "what would the percentile be with A's arrivals and B's steps?" many times.  Whoever answers is a
``Replay``: the queue model of ``queue_model``, or the engine's own scheduler in virtual time (``through_twin``), which
``tailspan.py`` hands in, since telemetry knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.explain.step_times import FEATURES
from telemetry.twin import Twin, TwinLoad, TwinSetting

#: The shape whose engine replays; with a fit given it decides nothing but the largest context.
SHAPE: Final = "llama-3.1-8b"
DEVICE: Final = "h100"
UNLIMITED: Final = 1 << 14

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
    """What serves.  coefficients: seconds per unit of each of ``step_times.FEATURES``.

    max_batch: requests that run together.  token_budget: tokens a step.  kv_blocks: pages of ``block_size`` tokens;
    None: no limit.  gap_s: between two steps with work at hand.  stalls: (moment, length) in seconds on the load's
    clock: the first step after the moment starts so much later.
    """

    coefficients: tuple[float, ...]
    max_batch: int
    token_budget: int
    kv_blocks: int | None = None
    block_size: int = 16
    gap_s: float = 0.0
    stalls: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """Per request of the load, seconds from its arrival; NaN: never answered."""

    ttft_s: Floats
    e2e_s: Floats


#: (load, server) -> times.  Deterministic.
Replay = Callable[[Load, ServerModel], Replayed]


def through_twin(twin: Twin) -> Replay:
    """The engine's own scheduler as a replay."""

    def replay(load: Load, server: ServerModel) -> Replayed:
        at = np.maximum.accumulate(load.at_s)
        start = float(at[0]) if len(at) else 0.0
        blocks = server.kv_blocks
        if blocks is not None:  # a pool must hold the longest request
            blocks = max(blocks, int((load.prompt + load.output).max(initial=1)) // server.block_size + 2)
        setting = TwinSetting(
            SHAPE,
            DEVICE,
            max_batch=server.max_batch,
            token_budget=max(server.token_budget, server.max_batch),
            kv_blocks=blocks,
            block_size=server.block_size,
            prefix_cache=False,
            fit={
                "kind": "tailspan step fit",
                "version": 1,
                "about": "explain",
                "steps": 0,
                "error": 0.0,
                "gap_s": server.gap_s,
                "coefficients": dict(zip(FEATURES, server.coefficients, strict=True)),
                "noise": {"sigma": 0.0, "autocorrelation": 0.0, "stall_rate": 0.0, "stall_s": 0.0},
            },
            pauses=tuple((moment - start, length) for moment, length in server.stalls if moment >= start),
        )
        found = twin.replay(TwinLoad(at - start, load.prompt, load.output, cached_tokens=load.cached), setting)
        return Replayed(found.ttft_s, found.e2e_s)

    return replay
