"""Why a percentile rose: layers 1 and 2 put together, each cause with its share of the change and its evidence.

Phases that lie outside the engine (client, network, front end) are causes themselves.  What lies inside is divided by
the what-if replays, since a queue is rarely its own cause; without a step log by what changed in the load and in the
phases' own rates.  Must always hold: the shares are of the measured change; what the model does not explain is named by
nobody, so "unknown" is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from telemetry import names
from telemetry.explain import measured, step_times
from telemetry.explain.causes import CAUSES, UNKNOWN
from telemetry.explain.loads import LoadChange
from telemetry.explain.result import Causes, Hypothesis, Partition, Phases
from telemetry.explain.side import Run
from telemetry.phases import OTHER
from telemetry.summary import format_seconds

AMPLIFIED: Final = 1.3  # attempts a request, against A's
NAMED: Final = 0.2  # share of the change from which a cause is named
MOST: Final = 3
EXAMPLES: Final = 5
#: Phases outside the engine, and whose they are.
OUTSIDE: Final = {
    names.CLIENT_WAIT: "network", names.NETWORK: "network", names.SEND: "network", OTHER: "network",
    names.INGRESS: "front_end", names.TOKENIZE: "front_end",
}  # fmt: skip
REPLICA_ALONE: Final = 0.7  # of the change of speed that one replica of several makes


def hypotheses(
    a: Sequence[Run],
    b: Sequence[Run],
    phases: Phases | None,
    causes: Causes | None,
    partitions: Sequence[Partition],
    change: LoadChange | None,
    figure: str,
) -> list[Hypothesis]:
    """At most three, most of the change first; one that says unknown where none makes enough of it."""
    shares: dict[str, float] = {}
    evidence: dict[str, list[str]] = {}
    inside = 1.0
    attempts = [_attempts(side) for side in (a, b)]
    retried = attempts[1] > AMPLIFIED * attempts[0]
    if retried:
        evidence["retries"] = [f"attempts a request {attempts[0]:.2f} -> {attempts[1]:.2f}"]
    if phases is not None and phases.change_s > 0:
        inside = 0.0
        for part in phases.parts:
            share = part.change_s / phases.change_s
            cause = OUTSIDE.get(part.phase)
            if part.phase == names.CLIENT_WAIT and retried:  # the moments of a row are those of its last attempt
                cause = "retries"
            if part.phase == OTHER:  # of a first token: network, and what of stalls and preemptions lies before it
                outside = min(max(0.0, _network_change(a, b) / phases.change_s), max(0.0, share))
                inside, share = inside + share - outside, outside
            if cause is None:
                inside += share
            else:
                shares[cause] = shares.get(cause, 0.0) + share
                evidence.setdefault(cause, []).append(_phase_words(part.phase, part.a_s, part.b_s))
    if causes is not None:
        _from_replays(causes, inside, shares, evidence)
    elif phases is not None:
        _from_rates(a, b, phases, change, inside, shares, evidence)
    _one_replica(a, b, shares, evidence)
    for one in partitions:
        _from_mix(one, shares, evidence)
    ranked = sorted((one for one in shares.items() if one[1] >= NAMED), key=lambda one: -one[1])
    found = [
        _hypothesis(name, share, [*evidence.get(name, []), *_beside(name, phases, change)], a, b, figure)
        for name, share in ranked[:MOST]
    ]  # fmt: skip
    return found or [unknown(phases, causes, change)]


def _attempts(side: Sequence[Run]) -> float:
    tries = np.concatenate([run["attempts"][run.counted] for run in side])
    return float(np.nan_to_num(tries, nan=1.0).mean()) if len(tries) else 1.0


def _network_change(a: Sequence[Run], b: Sequence[Run]) -> float:
    """By how much the mean time between client and server grew (s)."""
    means = []
    for side in (a, b):
        rows = [(run["end_s"] - run["sent_s"] - run["server_duration_s"])[run.answered] for run in side]
        known = np.concatenate(rows)
        known = known[~np.isnan(known)]
        means.append(float(known.mean()) if len(known) else 0.0)
    return means[1] - means[0]


def unknown(phases: Phases | None, causes: Causes | None, change: LoadChange | None) -> Hypothesis:
    """None stands out."""
    evidence = []
    if phases is not None:
        most = max(phases.parts, key=lambda one: one.change_s)
        evidence.append(_phase_words(most.phase, most.a_s, most.b_s))
    if causes is not None:
        evidence.append(
            f"the what-if replays explain {format_seconds(causes.modelled_s)} of {format_seconds(causes.observed_s)}"
        )
    if change is not None:
        evidence.append(change.sentence)
    return Hypothesis(
        UNKNOWN, "no cause stands out", "", tuple(evidence),
        "more pairs, a step log (tailspan's engine) or spans would tell more",
    )  # fmt: skip


def _from_replays(causes: Causes, inside: float, shares: dict[str, float], evidence: dict[str, list[str]]) -> None:
    """Inside the engine: each factor's part of the modelled change, as far as the model bears out what was measured."""
    if causes.observed_s <= 0 or causes.modelled_s <= 0:
        return
    borne_out = min(1.0, causes.modelled_s / causes.observed_s)
    up = sum(max(0.0, one.change_s) for one in causes.shares)
    for one in causes.shares:
        if one.change_s <= 0 or one.factor not in CAUSES:
            continue
        shares[one.factor] = shares.get(one.factor, 0.0) + inside * borne_out * one.change_s / max(
            up, causes.modelled_s
        )
        said = (
            f"replayed with B's {_factor_words(one.factor)}: {one.change_s:+.3g} s of {causes.observed_s:+.3g} s "
            f"measured ({causes.through}, {causes.replays} replays)"
        )
        evidence.setdefault(one.factor, []).extend([one.evidence, said])


def _factor_words(factor: str) -> str:
    return {
        "arrivals": "arrivals", "prompt_lengths": "prompts", "output_lengths": "answers",
        "cache_misses": "cache misses", "engine_speed": "step times", "batch_size": "batch limits",
        "batch_limit": "batch limits", "kv_pressure": "KV pool", "host_stall": "stalls",
        "cold_start": "slow first steps",
    }.get(factor, factor)  # fmt: skip


def _from_rates(
    a: Sequence[Run],
    b: Sequence[Run],
    phases: Phases,
    change: LoadChange | None,
    inside: float,
    shares: dict[str, float],
    evidence: dict[str, list[str]],
) -> None:
    """Without a step log: phases of pressure and stalls for themselves, the rest by what changed in the load."""
    left = inside
    for phase, cause in (
        (names.PREEMPTED, "kv_pressure"),
        (names.RECOMPUTE, "kv_pressure"),
        (names.STALL, "host_stall"),
    ):
        part = next((one for one in phases.parts if one.phase == phase), None)
        if part is not None and part.change_s > 0:
            share = part.change_s / phases.change_s
            shares[cause] = shares.get(cause, 0.0) + share
            evidence.setdefault(cause, []).append(_phase_words(phase, part.a_s, part.b_s))
            left -= share
    if change is None or left <= 0:
        return
    cached = [_cached_share(side) for side in (a, b)]
    grown = {
        "arrivals": change.arrivals,
        "engine_speed": -change.speed,
        ("cache_misses" if cached[0] - cached[1] > 0.01 else "prompt_lengths"): change.work,
    }
    up = {name: value for name, value in grown.items() if value > math.log(1.02)}
    total = sum(up.values())
    for name, value in up.items():
        shares[name] = shares.get(name, 0.0) + left * value / total
        evidence.setdefault(name, []).append(f"without a step log, by the load alone: {change.sentence}")


def _cached_share(runs: Sequence[Run]) -> float:
    cached = sum(float(np.nansum(run["cached_tokens"][run.answered])) for run in runs)
    prompt = sum(float(np.nansum(run["prompt_tokens_reported"][run.answered])) for run in runs)
    return cached / prompt if prompt else 0.0


def _one_replica(a: Sequence[Run], b: Sequence[Run], shares: dict[str, float], evidence: dict[str, list[str]]) -> None:
    """Slower steps on one replica of several are that replica, not the engine."""
    if "engine_speed" not in shares or min(len(one.steps) for one in (*a, *b)) < 2:
        return
    formula = step_times.fit([one for run in a for one in run.steps])
    if formula is None:
        return
    slower: dict[str, float] = {}  # by B's name; replicas of the two sides are paired in the order of their names
    for place, name in enumerate(one.replica for one in b[0].steps):
        logs = [[run.steps[place] for run in side if place < len(run.steps)] for side in (a, b)]
        before, after = (step_times.speed(one, formula) for one in logs)
        if before is not None and after is not None:
            slower[name] = max(0.0, math.log(after.total / before.total))
    total = sum(slower.values())
    if len(slower) < 2 or total <= 0:
        return
    worst = max(slower, key=lambda one: slower[one])
    if slower[worst] >= REPLICA_ALONE * total and slower[worst] > math.log(1.03):
        shares["replica"] = shares.pop("engine_speed")
        said = f"replica {worst}: step time x {math.exp(slower[worst]):.2f}; the others x " + ", ".join(
            f"{math.exp(value):.2f}" for name, value in sorted(slower.items()) if name != worst
        )
        evidence["replica"] = [said, *evidence.pop("engine_speed", [])]


def _from_mix(one: Partition, shares: dict[str, float], evidence: dict[str, list[str]]) -> None:
    """A shift of lengths shows in layer 3 as well: it is added to what the replays say as evidence."""
    cause = {"prompt tokens": "prompt_lengths", "answer tokens": "output_lengths"}.get(" x ".join(one.attributes))
    if cause is None or cause not in shares or not one.found or one.change <= 0:
        return
    evidence.setdefault(cause, []).append(
        f"by {one.attributes[0]}: mix makes {100 * one.mix:+.1f} of {100 * one.change:+.1f} points beyond A's figure"
    )


def _beside(name: str, phases: Phases | None, change: LoadChange | None) -> list[str]:
    found = []
    if phases is not None and name not in OUTSIDE.values():
        most = max(phases.parts, key=lambda one: one.change_s)
        found.append(_phase_words(most.phase, most.a_s, most.b_s))
    if change is not None and abs(change.load) > math.log(1.02) and name not in OUTSIDE.values():
        found.append(change.sentence)
    return found


def _phase_words(phase: str, a_s: float, b_s: float) -> str:
    return f"{phase.replace('_', ' ')} {format_seconds(a_s)} -> {format_seconds(b_s)}"


def _hypothesis(
    name: str, share: float, evidence: Sequence[str], a: Sequence[Run], b: Sequence[Run], figure: str
) -> Hypothesis:
    cause = CAUSES[name]
    requests = examples(a[0], b[0], figure)
    return Hypothesis(
        name, cause.words, cause.layer, tuple(dict.fromkeys(one for one in evidence if one)), cause.disprove,
        min(1.0, share), requests, steps_of(a, b[0], name, requests),
    )  # fmt: skip


def examples(a: Run, b: Run, figure: str) -> tuple[int, ...]:
    """Indices of the requests of B that lost most against themselves in A; where those differ, its slowest."""
    column = {"ttft": "first_token_s", "tpot": "tpot_s"}.get(figure.partition(" ")[0], "end_s")
    times = [one[column] - (0.0 if column == "tpot_s" else one["intended_s"]) for one in (a, b)]
    lost = np.where(b.answered, np.nan_to_num(times[1], nan=-np.inf), -np.inf)
    common, at, there = np.intersect1d(a.index, b.index, return_indices=True)
    if len(common) > 0.9 * len(b):
        lost[there] -= np.nan_to_num(times[0][at])
    order = np.argsort(-lost, kind="stable")[:EXAMPLES]
    return tuple(int(b.index[one]) for one in order if np.isfinite(lost[one]))


def steps_of(a: Sequence[Run], b: Run, name: str, requests: Sequence[int]) -> tuple[int, ...]:
    """Ids of the engine steps that show a cause: the stalled, the slow, else those of the first example's time."""
    logs = [one for one in b.steps if len(one)]
    if not logs:
        return ()
    if name == measured.STALLS:
        worst = max(logs, key=lambda one: float(np.nan_to_num(one["gap_ns"]).max()))
        order = np.argsort(-np.nan_to_num(worst["gap_ns"]), kind="stable")[:EXAMPLES]
        return tuple(int(worst["step"][one]) for one in order)
    formula = step_times.fit([one for run in a for one in run.steps])
    if name in (measured.SPEED, measured.COLD, "replica") and formula is not None:
        beyond = [one.seconds / step_times.predicted(one, formula) for one in logs]
        worst_at = max(range(len(logs)), key=lambda at: float(beyond[at].max()))
        order = np.argsort(-beyond[worst_at], kind="stable")[:EXAMPLES]
        return tuple(int(logs[worst_at]["step"][one]) for one in order)
    if requests:
        row = int(np.flatnonzero(b.index == requests[0])[0])
        return tuple(int(b[one][row]) for one in ("step_first", "step_last") if b[one][row] >= 0)
    return ()
