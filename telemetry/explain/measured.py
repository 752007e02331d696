"""A run as a load and a server, measured from its rows and its step log: what a what-if is put together from.

Must always hold: arrivals are those at the server's queue; a limit is one only where steps were held up by it; what
only one side ran into is the other side's too, unless that went beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.explain import step_times
from telemetry.explain.server_model import UNLIMITED, Load, ServerModel
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

KNOWN_LIMIT: Final = 0.05  # share of the steps at the largest value, from which it is taken for a limit
SAME_SHARE: Final = 0.02  # sides closer than that are the same in a factor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
    most: tuple[int, int] = (0, 0)  # requests that ran together, tokens in a step

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
        found.append(reconciled(one, two))
    return found


def reconciled(a: Measured, b: Measured) -> tuple[Measured, Measured]:
    """A limit that only one side ran into is the other's too, unless that one went beyond it."""
    found = []
    for own, other in ((a, b), (b, a)):
        batch, budget = own.server.max_batch, own.server.token_budget
        if batch >= UNLIMITED and own.most[0] <= other.server.max_batch:
            batch = other.server.max_batch
        if budget >= UNLIMITED and own.most[1] <= other.server.token_budget:
            budget = other.server.token_budget
        found.append(replace(own, server=replace(own.server, max_batch=batch, token_budget=budget)))
    return found[0], found[1]


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
        (int(np.nan_to_num(steps["running"]).max(initial=0)),
         int((np.nan_to_num(steps["prefill_tokens"]) + np.nan_to_num(steps["decode_seqs"])).max(initial=0))),
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
    if factor == CACHE:  # tokens, not shares: a longer prompt behind the same prefix is no miss
        return abs(float(x.cached.mean()) - float(y.cached.mean())) > SAME_SHARE / 2 * float(x.prompt.mean())
    if factor == SPEED:
        return _speed_ratio(a, b) != 1.0
    if factor == LIMITS:
        return (a.server.max_batch, a.server.token_budget) != (b.server.max_batch, b.server.token_budget)
    if factor == POOL:
        left_pool, right_pool = a.server.kv_blocks, b.server.kv_blocks
        if left_pool is None or right_pool is None:
            return False
        return abs(left_pool - right_pool) > SAME_SHARE * max(left_pool, right_pool)
    return bool(a.server.stalls or b.server.stalls) if factor == STALLS else bool(a.cold or b.cold)


def _speed_ratio(a: Measured, b: Measured) -> float:
    total = [sum(one.server.coefficients) for one in (a, b)]
    return total[1] / total[0] if total[0] > 0 else 1.0
