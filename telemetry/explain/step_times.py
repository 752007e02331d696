"""What the step log says: how long a step of a given load takes, where it took longer, and when no step ran.

    seconds(step) = sum of coefficient * feature, fitted to A's steps as the engine's twin is (``engine.step_fit``)

B's steps beside that formula: the part that it explains is composition (larger batches, longer prompts), the rest is
speed, told apart for prompt tokens and the rest.  Steps far beyond both are slow steps; gaps between steps with work at
hand are stalls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.explain.side import Steps
from telemetry.least_squares import non_negative, robust, spread

FEATURES: Final = ("step", "tokens_8", "tokens_32", "prefill_tokens", "decode_seqs", "context_tokens", "attended")
PROMPT: Final = (3, 6)  # the features that prompt tokens alone make
LEAST_STEPS: Final = 100
FITTED: Final = 20_000  # steps: more teach nothing
SLOW_RATIO: Final = 1.5  # beyond so many times the formula and SLOW_SIGMAS robust deviations: a slow step
SLOW_SIGMAS: Final = 5.0
STALL_FLOOR_S: Final = 0.010
STALL_RATIO: Final = 10.0  # times the usual gap
COLD_P: Final = 0.01
SEED: Final = 20_240_505

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Speed:
    """Beside a formula: factors on the time of prompt tokens and of all else (1: as fast), and on all together.

    predicted_s, measured_s: of the steps that are not slow, summed.  mean_batch, mean_prompt: per step.
    """

    prompt: float
    rest: float
    total: float
    predicted_s: float
    measured_s: float
    mean_batch: float
    mean_prompt: float


def features(steps: Steps) -> Floats:
    """[steps, FEATURES]."""
    prompt, decodes = np.nan_to_num(steps["prefill_tokens"]), np.nan_to_num(steps["decode_seqs"])
    tokens = prompt + decodes
    found: Floats = np.stack(
        [
            np.ones(len(steps)), np.minimum(tokens, 8), np.minimum(tokens, 32), prompt, decodes,
            np.nan_to_num(steps["context_tokens"]), np.nan_to_num(steps["attended"]),
        ],
        axis=1,
    )  # fmt: skip
    return found


def fit(logs: Sequence[Steps]) -> tuple[float, ...] | None:
    """The coefficients of the formula (s); None: fewer than LEAST_STEPS steps."""
    logs = [one for one in logs if len(one)]
    n = sum(len(one) for one in logs)
    if n < LEAST_STEPS:
        return None
    x = np.concatenate([features(one) for one in logs])
    seconds = np.concatenate([one.seconds for one in logs])
    known = seconds > 0
    x, seconds = x[known], seconds[known]
    if len(seconds) > FITTED:
        chosen = np.random.default_rng(SEED).choice(len(seconds), FITTED, replace=False)
        x, seconds = x[chosen], seconds[chosen]
    coefficients = robust(x, seconds)
    guess = np.maximum(x @ coefficients, 1e-9)
    calm = ~_slow(np.log(seconds / guess))
    # so that times add up to the measured ones, not to their median
    level = float(seconds[calm].sum() / guess[calm].sum())
    return tuple(float(one) * level for one in coefficients)


def slow(steps: Steps, coefficients: Sequence[float]) -> Bools:
    """Steps far beyond the formula, once the level of the log as a whole is taken out."""
    return _slow(np.log(np.maximum(steps.seconds, 1e-9) / predicted(steps, coefficients)))


def predicted(steps: Steps, coefficients: Sequence[float]) -> Floats:
    """Seconds of each step by the formula."""
    found: Floats = np.maximum(features(steps) @ np.asarray(coefficients), 1e-9)
    return found


def speed(logs: Sequence[Steps], coefficients: Sequence[float]) -> Speed | None:
    """How fast a side's steps are beside the formula; None: no steps."""
    logs = [one for one in logs if len(one)]
    if not logs:
        return None
    x = np.concatenate([features(one) for one in logs])
    seconds = np.concatenate([one.seconds for one in logs])
    calm = ~np.concatenate([slow(one, coefficients) for one in logs]) & (seconds > 0)
    x, seconds = x[calm], seconds[calm]
    if not len(seconds):
        return None
    weights = np.asarray(coefficients)
    prompt = x[:, PROMPT] @ weights[list(PROMPT)]
    rest = x @ weights - prompt
    guess = np.maximum(prompt + rest, 1e-9)
    factors = non_negative(np.stack([prompt, rest], axis=1) / guess[:, None], seconds / guess)
    # the prompt's share of a side that reads next to no prompts says nothing of its speed
    told = prompt.sum() > 0.02 * guess.sum()
    total = float(seconds.sum() / guess.sum())
    batch = (x[:, 4] + (x[:, 3] > 0)).mean()
    return Speed(
        float(factors[0]) if told else total, float(factors[1]) if rest.sum() > 0 else total, total,
        float(guess.sum()), float(seconds.sum()), float(batch), float(x[:, 3].mean()),
    )  # fmt: skip


def stalls(steps: Steps) -> Bools:
    """Steps before which the engine stood still though work was at hand, for much longer than it usually does."""
    gaps = np.nan_to_num(steps["gap_ns"]) / 1e9
    # of all steps: where hardly any has a gap, those that have one are what is looked for
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    found: Bools = gaps > max(STALL_FLOOR_S, STALL_RATIO * usual)
    return found


def usual_gap(logs: Sequence[Steps]) -> float:
    """Median time between two steps with work at hand (s), over the steps that are no stalls."""
    gaps = np.concatenate([np.nan_to_num(one["gap_ns"])[~stalls(one)] for one in logs] or [np.zeros(0)]) / 1e9
    return float(np.median(gaps)) if len(gaps) else 0.0


def cold(steps: Steps, slow_ones: Bools) -> float:
    """The probability of so many different loads among the slow steps, had slowness struck steps at random.

    What is compiled or loaded anew makes the first step of each shape slow and no other; a busy neighbour strikes the
    common shapes most.  1 where fewer than three steps are slow.
    """
    hit = int(slow_ones.sum())
    if hit < 3:
        return 1.0
    prompt, decodes = np.nan_to_num(steps["prefill_tokens"]), np.nan_to_num(steps["decode_seqs"])
    shape = np.ceil(np.log2(prompt + 1)) * 64 + np.ceil(np.log2(decodes + 1))
    _, shape = np.unique(shape, return_inverse=True)
    seen = len(np.unique(shape[slow_ones]))
    rng = np.random.default_rng(SEED)
    drawn = np.array([len(np.unique(shape[rng.choice(len(shape), hit, replace=False)])) for _ in range(500)])
    return float((1 + (drawn >= seen).sum()) / 501) if seen > 1 else 1.0


def _slow(ratio: Floats) -> Bools:
    if not len(ratio):
        return np.zeros(0, dtype=np.bool_)
    level = float(np.median(ratio))
    found: Bools = ratio - level > max(math.log(SLOW_RATIO), SLOW_SIGMAS * spread(ratio))
    return found
