"""Layer 2: why the queue or the decode grew, by replaying what-ifs through a model of the server.

Each side is a load (arrivals, prompts, answers, cache hits) and a server (step times, limits, KV pool, stalls), measured
from its bundle.  The factors in which the sides differ are exchanged one after the other, and the change of the figure
that each exchange makes is averaged over all orders: its Shapley value.  The values sum to the modelled change.

It stands beside the measured change, so that a model that explains nothing shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry import names, stats
from telemetry.explain import step_times
from telemetry.explain.contributions import interval
from telemetry.explain.result import Causes, CauseShare
from telemetry.explain.server_model import UNLIMITED, Load, Replay, ServerModel
from telemetry.explain.side import Run, Steps, same_requests

ARRIVALS: Final = "arrivals"
PROMPTS: Final = "prompt_lengths"
ANSWERS: Final = "output_lengths"
CACHE: Final = "cache_misses"
SPEED: Final = "engine_speed"
LIMITS: Final = "batch"  # becomes batch_size or batch_limit by its direction
POOL: Final = "kv_pressure"
STALLS: Final = "host_stall"
COLD: Final = "cold_start"
FACTORS: Final = (ARRIVALS, PROMPTS, ANSWERS, CACHE, SPEED, LIMITS, POOL, STALLS, COLD)

PAIRS: Final = 3  # of the repeats that are replayed
BUDGET: Final = 300_000  # requests replayed in all
SAMPLE: Final = (200, 4000)  # requests in a replay
PRE_ROLL: Final = 0.1  # of them fill the queue and are not counted
KNOWN_LIMIT: Final = 0.05  # share of the steps at the largest value, from which it is taken for a limit
SAME_SHARE: Final = 0.02  # sides closer than that are the same in a factor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Measured:
    """One replica of one run, ready to be replayed.  at, prompt, output, cached: of its answered requests in order of
    arrival; ttft, e2e: seconds that they took from there; index: theirs."""

    index: Ints
    load: Load
    ttft_s: Floats
    e2e_s: Floats
    server: ServerModel
    cold: tuple[tuple[float, float], ...]

    def __len__(self) -> int:
        return len(self.load)

    def part(self, chosen: npt.NDArray[np.int64] | slice) -> Measured:
        load = self.load
        return replace(
            self,
            index=self.index[chosen],
            load=Load(load.at_s[chosen], load.prompt[chosen], load.output[chosen], load.cached[chosen]),
            ttft_s=self.ttft_s[chosen],
            e2e_s=self.e2e_s[chosen],
        )


def causes(
    a: Sequence[Run], b: Sequence[Run], figure: str, replay: Replay, through: str, warm_up: float = 0.0
) -> Causes | None:
    """Shapley values of the factors for a percentile figure ("ttft p99"); None: a side has no step log to fit."""
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
    size = int(np.clip(BUDGET / (replays * len(measured)), *SAMPLE))
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
        through, replays * len(found), size, float(np.mean([one.error for one in found])),
    )  # fmt: skip


@dataclass(frozen=True)
class _Values:
    values: Floats
    observed: float
    error: float


Pair = list[tuple[Measured, Measured]]  # one entry a replica


def measure_pair(a: Run, b: Run, coefficients: Sequence[float], warm_up: float) -> Pair:
    """The replicas that both sides have, ready to be replayed; empty: none has requests on both."""
    found = []
    same = same_requests([a], [b])
    for steps_a, steps_b in zip(_logs(a), _logs(b), strict=False):
        one = measure(a, steps_a, coefficients, warm_up, coefficients)
        factors = step_times.speed([steps_b], coefficients)
        own = coefficients if factors is None else scaled(coefficients, factors)
        two = measure(b, steps_b, own, warm_up, coefficients)
        if len(one) < 20 or len(two) < 20:
            continue
        if same and len(a.steps) == 1:
            common = np.intersect1d(one.index, two.index)
            one, two = (side.part(np.flatnonzero(np.isin(side.index, common))) for side in (one, two))
            order = [np.argsort(side.index, kind="stable") for side in (one, two)]
            one, two = one.part(order[0]), two.part(order[1])
        found.append((one, two))
    return found


def _logs(run: Run) -> list[Steps]:
    return [one for one in run.steps if len(one)]


def scaled(coefficients: Sequence[float], speed: step_times.Speed) -> tuple[float, ...]:
    """The formula with B's factors on prompt tokens and on the rest."""
    return tuple(
        one * (speed.prompt if at in step_times.PROMPT else speed.rest) for at, one in enumerate(coefficients)
    )  # fmt: skip


def measure(run: Run, steps: Steps, own: Sequence[float], warm_up: float, formula: Sequence[float]) -> Measured:
    """Load and server of one replica.  own: its step times; formula: A's, against which slow steps are told."""
    counts = run.answered & run.of_replica(steps.replica)
    counts &= (run["intended_s"] >= warm_up * run.facts.length_s) & ~np.isnan(run["first_token_s"])
    at = run.arrived_s
    rows = np.flatnonzero(counts)
    rows = rows[np.argsort(at[rows], kind="stable")]
    prompt = np.where(np.isnan(run["prompt_tokens_reported"]), run["input_tokens"], run["prompt_tokens_reported"])
    output = np.where(
        np.isnan(run["completion_tokens_reported"]), run["expected_output_tokens"], run["completion_tokens_reported"]
    )
    last = np.where(np.isnan(run["last_token_s"]), run["end_s"], run["last_token_s"])
    cached = np.nan_to_num(run["cached_tokens"])
    load = Load(
        at[rows], *(np.maximum(np.nan_to_num(one[rows], nan=1.0), least).astype(np.int64)
                    for one, least in ((prompt, 1), (output, 1), (cached, 0))),
    )  # fmt: skip
    slow = step_times.slow(steps, formula)
    stalled = step_times.stalls(steps)
    clock = run.clock_s(steps)
    began = steps["start_ns"] / 1e9 + clock
    gaps = np.nan_to_num(steps["gap_ns"]) / 1e9
    over = steps.seconds - step_times.predicted(steps, own)
    slow &= over > 0
    slow_list = list(zip(began[slow].tolist(), over[slow].tolist(), strict=True))
    pauses = list(zip((began - gaps)[stalled].tolist(), gaps[stalled].tolist(), strict=True))
    is_cold = step_times.cold(steps, slow) < step_times.COLD_P
    if not is_cold:
        pauses += slow_list
    server = ServerModel(
        tuple(own), *limits(steps), gap_s=step_times.usual_gap([steps]), stalls=tuple(sorted(pauses)),
    )  # fmt: skip
    return Measured(
        run.index[rows], load, run["first_token_s"][rows] - at[rows], last[rows] - at[rows], server,
        tuple(sorted(slow_list)) if is_cold else (),
    )  # fmt: skip


def limits(steps: Steps) -> tuple[int, int, int | None]:
    """Largest batch, tokens a step and KV pages, as far as the log shows them: UNLIMITED where no step was held up."""
    running, waiting = np.nan_to_num(steps["running"]), np.nan_to_num(steps["waiting"])
    tokens = np.nan_to_num(steps["prefill_tokens"]) + np.nan_to_num(steps["decode_seqs"])
    total = steps["kv_used"] + steps["kv_free"]
    pages = int(np.nanmedian(total)) if np.isfinite(total).any() else None
    held_up = waiting > 0
    if pages is not None:  # held up by the pool is not held up by the batch
        held_up &= np.nan_to_num(steps["kv_free"], nan=1e9) > 0.05 * pages
    batch = budget = UNLIMITED
    if held_up.sum() >= 10:
        most = float(running[held_up].max())
        if most > 1 and (running[held_up] >= most).mean() >= KNOWN_LIMIT:
            batch = int(most)
    read = np.nan_to_num(steps["prefill_tokens"]) > 0
    if read.sum() >= 10:
        most = float(tokens[read].max())
        if (tokens[read] >= most).mean() >= KNOWN_LIMIT and most > 1:
            budget = int(most)
    return batch, budget, pages


def differ(factor: str, a: Measured, b: Measured) -> bool:
    """Do the sides differ in a factor, by more than its own noise?"""
    x, y = a.load, b.load
    same = len(x) == len(y) and bool((a.index == b.index).all())
    if factor == ARRIVALS:
        if same:  # the jitter of the network is no other load
            apart = np.abs((x.at_s - x.at_s[0]) - (y.at_s - y.at_s[0]))
            return bool(np.median(apart) > 0.02 * max(1e-3, float(np.ptp(x.at_s)) / len(x)))
        return True
    if factor in (PROMPTS, ANSWERS):
        left, right = (x.prompt, y.prompt) if factor == PROMPTS else (x.output, y.output)
        return not (same and bool((left == right).all()))
    if factor == CACHE:
        shares = [float(one.cached.sum()) / max(1.0, float(one.prompt.sum())) for one in (x, y)]
        return abs(shares[0] - shares[1]) > SAME_SHARE / 2
    if factor == SPEED:
        return _speed_ratio(a, b) != 1.0
    if factor == LIMITS:
        return (a.server.max_batch, a.server.token_budget) != (b.server.max_batch, b.server.token_budget)
    if factor == POOL:
        pools = (a.server.kv_blocks, b.server.kv_blocks)
        return None not in pools and abs(pools[0] - pools[1]) > SAME_SHARE * max(pools)  # type: ignore[operator, type-var, arg-type]
    return bool(a.server.stalls or b.server.stalls) if factor == STALLS else bool(a.cold or b.cold)


def _speed_ratio(a: Measured, b: Measured) -> float:
    total = [sum(one.server.coefficients) for one in (a, b)]
    return total[1] / total[0] if total[0] > 0 else 1.0


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
    return _Values(values, seen[1] - seen[0], error)


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
    of_cache = b if CACHE in chosen else a
    share = of_cache.load.cached / np.maximum(of_cache.load.prompt, 1)
    if len(share) != n:
        share = share[(np.arange(n) * len(share)) // n]
    load = Load(clock.load.at_s, prompt, column("output", ANSWERS), np.floor(share * prompt).astype(np.int64))
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
    of = (lambda one: one.server.stalls) if factor == STALLS else (lambda one: one.cold)
    counts = both(lambda one: float(len(of(one))))
    sums = both(lambda one: float(sum(length for _, length in of(one))))
    return f"{counts[0]:.0f} -> {counts[1]:.0f} of them, {sums[0]:.2f} -> {sums[1]:.2f} s in all"


def engine_phases() -> tuple[str, ...]:
    """The phases that a model of the server accounts for."""
    return (names.QUEUE, names.PREFILL, names.DECODE, names.PREEMPTED, names.RECOMPUTE, names.STALL)
