"""Layer 2: why the queue or the decode grew, by replaying what-ifs through a model of the server.

Each side is a load and a server (``measured``).  The factors in which the sides differ are exchanged one after the
other, and the change of the figure that each exchange makes is averaged over all orders: its Shapley value (Shapley
1953).  The values sum to the modelled change.

It stands beside the measured change, so that a model that explains nothing shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry import stats
from telemetry.explain import step_times
from telemetry.explain.contributions import interval
from telemetry.explain.measured import (
    ANSWERS,
    ARRIVALS,
    CACHE,
    COLD,
    FACTORS,
    LIMITS,
    POOL,
    PROMPTS,
    SPEED,
    STALLS,
    Measured,
    Pair,
    differ,
    measure_pair,
)
from telemetry.explain.result import Causes, CauseShare
from telemetry.explain.server_model import UNLIMITED, Load, Replay, ServerModel
from telemetry.explain.side import Run

PAIRS: Final = 3  # of the repeats that are replayed
SAMPLE: Final = (200, 4000)  # requests in a replay
PRE_ROLL: Final = 0.1  # of them fill the queue and are not counted

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def causes(
    a: Sequence[Run],
    b: Sequence[Run],
    figure: str,
    replay: Replay,
    through: str,
    budget: int,
    warm_up: float = 0.0,
) -> Causes | None:
    """Shapley values of the factors for a percentile figure ("ttft p99"); None: a side has no step log to fit.

    budget: requests to replay in all, which sets how many of the run's are in each replay.
    """
    measure, _, p = figure.partition(" p")
    pairs = list(zip(a, b, strict=False))[:PAIRS]
    coefficients = step_times.fit([one for run, _ in pairs for one in run.steps])
    if coefficients is None or not all(two.steps for _, two in pairs):
        return None
    measured = [measure_pair(one, two, coefficients, warm_up) for one, two in pairs]
    measured = [one for one in measured if one]
    if not measured:
        return None
    factors = [one for one in FACTORS if any(differ(one, x, y) for pair in measured for x, y in pair)]
    if not factors:
        return None
    replays = 2 ** len(factors)
    size = int(np.clip(budget / (replays * len(measured)), *SAMPLE))
    found = [_shapley(pair, factors, measure, float(p), replay, size) for pair in measured]
    values = np.array([one.values for one in found])
    shares = []
    for at, factor in enumerate(factors):
        low, high = interval(values[:, at])
        said = describe(factor, [x for pair in measured for x, _ in pair], [y for pair in measured for _, y in pair])
        shares.append(CauseShare(_named(factor, measured), float(values[:, at].mean()), low, high, said))
    shares.sort(key=lambda one: -one.change_s)
    return Causes(
        figure, float(np.mean([one.observed for one in found])), float(values.sum(axis=1).mean()), tuple(shares),
        through, replays * len(found), found[0].sample, float(np.mean([one.error for one in found])),
    )  # fmt: skip


@dataclass(frozen=True)
class _Values:
    values: Floats
    observed: float
    error: float
    sample: int


def _shapley(pair: Pair, factors: Sequence[str], measure: str, p: float, replay: Replay, size: int) -> _Values:
    sampled = [_sampled(one, two, measure, size) for one, two in pair]
    counted = [_counted(one) for one, _ in sampled]

    def value(from_b: frozenset[str]) -> float:
        found = []
        for (one, two), keep in zip(sampled, counted, strict=True):
            load, server = mixed(one, two, from_b)
            result = replay(load, server)
            times = _times(result.ttft_s, result.e2e_s, load.output, measure)
            found.append(times[keep if len(times) == len(keep) else slice(None)])
        return quantile(np.concatenate(found), p)

    values = shapley(factors, value)
    seen = []
    for side in (0, 1):
        times = [_times(one[side].ttft_s, one[side].e2e_s, one[side].load.output, measure) for one in sampled]
        seen.append(quantile(np.concatenate(times), p))
    base = value(frozenset())
    error = abs(base - seen[0]) / seen[0] if seen[0] > 0 else 0.0
    return _Values(values, seen[1] - seen[0], error, sum(len(two) for _, two in sampled))


def shapley(factors: Sequence[str], value: Callable[[frozenset[str]], float]) -> Floats:
    """The Shapley value of each factor: its marginal change averaged over all orders; their sum is the whole change."""
    n = len(factors)
    worth = {
        chosen: value(chosen) for size in range(n + 1) for chosen in map(frozenset, combinations(factors, size))
    }  # fmt: skip
    found = np.zeros(n)
    for at, factor in enumerate(factors):
        others = [one for one in factors if one != factor]
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for chosen in map(frozenset, combinations(others, size)):
                found[at] += weight * (worth[chosen | {factor}] - worth[chosen])
    return found


def mixed(a: Measured, b: Measured, from_b: Iterable[str]) -> tuple[Load, ServerModel]:
    """A with some factors of B.  Where the sides have other requests, those of equal place in the row stand in."""
    chosen = frozenset(from_b)
    clock = b if ARRIVALS in chosen else a
    n = len(clock)

    def column(name: str, factor: str) -> Ints:
        side = b if factor in chosen else a
        values: Ints = getattr(side.load, name)
        return values if len(values) == n else values[(np.arange(n) * len(values)) // n]

    prompt = column("prompt", PROMPTS)
    cached = np.minimum(column("cached", CACHE), prompt - 1)
    load = Load(clock.load.at_s, prompt, column("output", ANSWERS), cached)
    times, room, pool = (b if one in chosen else a for one in (SPEED, LIMITS, POOL))
    pauses = [*(b if STALLS in chosen else a).server.stalls, *(b if COLD in chosen else a).cold]
    # stalls are moments of their own side's clock: put them at the same place of the load in use
    own = b if STALLS in chosen else a
    if own is not clock and len(own):
        begin, end = own.load.at_s[0], own.load.at_s[-1]
        scale = (clock.load.at_s[-1] - clock.load.at_s[0]) / max(1e-9, end - begin)
        pauses = [(float(clock.load.at_s[0] + (at - begin) * scale), length) for at, length in pauses]
    server = ServerModel(
        times.server.coefficients, room.server.max_batch, room.server.token_budget, pool.server.kv_blocks,
        gap_s=times.server.gap_s, stalls=tuple(sorted(pauses)),
    )  # fmt: skip
    return load, server


def _sampled(a: Measured, b: Measured, measure: str, size: int) -> tuple[Measured, Measured]:
    """A stretch of both sides in which B's slow requests are: neighbours, since a queue has a history."""
    n = len(b)
    if n <= size and len(a) <= size:
        return a, b
    times = _times(b.ttft_s, b.e2e_s, b.load.output, measure)
    slow = np.nan_to_num(times) > quantile(times, 95.0)
    sums = np.concatenate([[0], np.cumsum(slow)])
    size = min(size, n, len(a))
    begin = int(np.argmax(sums[size:] - sums[:-size]))
    share = begin / max(1, n)
    at_a = begin if len(a) == n else min(int(share * len(a)), len(a) - size)
    return a.part(slice(at_a, at_a + size)), b.part(slice(begin, begin + size))


def _counted(one: Measured) -> Bools:
    return np.arange(len(one)) >= PRE_ROLL * len(one)


def _times(ttft: Floats, e2e: Floats, output: Ints, measure: str) -> Floats:
    if measure == "ttft":
        return ttft
    if measure == "tpot":
        found: Floats = np.where(output > 1, (e2e - ttft) / np.maximum(output - 1, 1), np.nan)
        return found
    return e2e


def quantile(times: Floats, p: float) -> float:
    """Order statistic of nearest rank; NaN left out, 0 without values."""
    times = times[~np.isnan(times)]
    if not len(times):
        return 0.0
    rank = stats.nearest_rank(len(times), p) - 1
    return float(np.partition(times, rank)[rank])


def _named(factor: str, measured: Sequence[Pair]) -> str:
    """The code of the cause: of another batch limit, by its direction."""
    if factor != LIMITS:
        return factor
    a, b = ([pair[0][side].server.max_batch for pair in measured] for side in (0, 1))
    return "batch_size" if float(np.mean(b)) >= float(np.mean(a)) else "batch_limit"


def describe(factor: str, a: Sequence[Measured], b: Sequence[Measured]) -> str:
    """The factor's own figures on both sides."""

    def mean(side: Sequence[Measured], of: Callable[[Measured], float]) -> float:
        return float(np.mean([of(one) for one in side]))

    def both(of: Callable[[Measured], float]) -> tuple[float, float]:
        return mean(a, of), mean(b, of)

    if factor == ARRIVALS:
        x, y = both(lambda one: len(one) / max(1e-9, float(np.ptp(one.load.at_s))))
        return f"{x:.3g} -> {y:.3g} requests/s"
    if factor in (PROMPTS, ANSWERS):
        x, y = both(lambda one: float((one.load.prompt if factor == PROMPTS else one.load.output).mean()))
        return f"mean {'prompt' if factor == PROMPTS else 'answer'} {x:.0f} -> {y:.0f} tokens"
    if factor == CACHE:
        x, y = both(lambda one: float(one.load.cached.sum()) / max(1, int(one.load.prompt.sum())))
        u, v = both(lambda one: float((one.load.prompt - one.load.cached).mean()))
        return (
            f"from the cache {100 * x:.0f} % -> {100 * y:.0f} % of prompt tokens; computed {u:.0f} -> {v:.0f} a request"
        )
    if factor == SPEED:
        prompt = [
            y.server.coefficients[3] / x.server.coefficients[3]
            for x, y in zip(a, b, strict=True) if x.server.coefficients[3] > 0
        ]  # fmt: skip
        rest = [
            y.server.coefficients[0] / x.server.coefficients[0]
            for x, y in zip(a, b, strict=True) if x.server.coefficients[0] > 0
        ]  # fmt: skip
        said = [f"prompt tokens x {np.mean(prompt):.2f}"] if prompt else []
        said += [f"all else x {np.mean(rest):.2f}"] if rest else []
        return "step time at equal load: " + (", ".join(said) or "the same")
    if factor == LIMITS:
        shown = [
            ", ".join(
                "no limit seen" if limit >= UNLIMITED else str(limit)
                for limit in (side[0].server.max_batch, side[0].server.token_budget)
            )
            for side in (a, b)
        ]
        return f"largest batch, tokens a step: {shown[0]} -> {shown[1]}"
    if factor == POOL:
        return f"KV pages {a[0].server.kv_blocks} -> {b[0].server.kv_blocks}"

    def of(one: Measured) -> tuple[tuple[float, float], ...]:
        return one.server.stalls if factor == STALLS else one.cold

    counts = both(lambda one: float(len(of(one))))
    sums = both(lambda one: float(sum(length for _, length in of(one))))
    return f"{counts[0]:.0f} -> {counts[1]:.0f} of them, {sums[0]:.2f} -> {sums[1]:.2f} s in all"
