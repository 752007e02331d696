"""Play one side of a virtual trial: attempts into the engine's twin, what came back into rows, attempts and series.

Must always hold: a request has one row, with the facts of its last attempt and its own intended time; a retry is sent
because an attempt failed in the very run that it is part of.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from loadgen.lab import wire
from loadgen.lab.reading import misread
from loadgen.lab.world import World
from loadgen.retries import ANSWERED, GAVE_UP, NOT_RETRIED
from loadgen.retries import RETRIED as TRIED_AGAIN
from telemetry.schema import ATTEMPTS, REQUESTS, SERIES, STEPS
from telemetry.twin import Twin, TwinRun
from telemetry.twin_bundle import TARGET, rows
from telemetry.twin_series import left_s, series

ROUNDS: Final = 40  # of retries that cause others; a storm settles in far fewer


@dataclass(frozen=True, slots=True)
class Attempt:
    """One send.  at_s: after zero."""

    owner: int
    number: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """Tables by name, what the manifest says of the generator, and one of the runs (its setting and label)."""

    tables: dict[str, pa.Table]
    generator: dict[str, Any]
    run: TwinRun


def play(twin: Twin, world: World, seed: int, prompt_seed: int) -> Played:
    """seed: of the noise.  prompt_seed: of the texts, where a wrong reading is played."""
    world = replace(world, setting=replace(world.setting, seed=seed))
    read = world.load
    if world.reading is not None:
        read = replace(world.load, input_tokens=misread(world.load.input_tokens, world.reading, prompt_seed))
    sent = _sent(world)
    attempts = [Attempt(at, 0, float(sent[at])) for at in range(len(sent))]
    for _ in range(ROUNDS):
        runs, found = _round(twin, replace(world, load=read), attempts)
        more = _retries(world, attempts, found)
        if more == attempts:
            break
        attempts = more
    table = _requests(world, sent, attempts, found)
    tables = {
        "requests": table,
        "steps": pa.concat_tables([_named(run, at) for at, run in enumerate(runs)]),
        "series": pa.concat_tables([series(run, _target(at, world)).cast(SERIES) for at, run in enumerate(runs)]),
    }
    if world.patience is not None:
        tables["attempts"] = pa.Table.from_pylist(_attempt_rows(world, attempts, found), schema=ATTEMPTS)
    busy = min(1.0, 0.1 if not world.client_s else 1.0)
    lag = float(np.percentile(sent - world.load.at_s, 99))
    generator = {"cpu_ratio": busy, "loop_lag_p99_s": world.client_s or 0.0005, "lag_p99_s": lag}
    return Played(tables, generator, runs[0])


def _sent(world: World) -> np.ndarray:
    """When a client that needs ``client_s`` for each request gets round to it."""
    at: np.ndarray = np.asarray(world.load.at_s, dtype=np.float64)
    if not world.client_s:
        return at
    sent, free = np.empty_like(at), 0.0
    for place, due in enumerate(at.tolist()):
        sent[place] = max(due, free)
        free = sent[place] + world.client_s
    return sent


def _target(replica: int, world: World) -> str:
    return TARGET if world.replicas == 1 else f"{TARGET}-{replica}"


def _round(
    twin: Twin, world: World, attempts: list[Attempt]
) -> tuple[list[TwinRun], dict[tuple[int, int], dict[str, Any]]]:
    """The runs of all replicas, and (owner, number) -> the row of that attempt."""
    load, runs = world.load, []
    found: dict[tuple[int, int], dict[str, Any]] = {}
    limit = world.patience.total_s if world.patience is not None and world.patience.total_s else world.timeout_s
    for replica in range(world.replicas):
        mine = sorted((one for one in attempts if (one.owner + one.number) % world.replicas == replica), key=_when)
        owners = np.array([one.owner for one in mine], dtype=np.int64)
        part = replace(
            load,
            at_s=np.array([one.at_s for one in mine]),
            input_tokens=load.input_tokens[owners],
            output_tokens=load.output_tokens[owners],
            prefixes=None if load.prefixes is None else [load.prefixes[owner] for owner in owners],
            patience_s=np.full(len(mine), limit),
        )
        slow = world.slow_replica if replica == world.replicas - 1 else 1.0
        setting = replace(
            world.setting, speed=world.setting.speed / slow, seed=world.setting.seed * world.replicas + replica
        )
        run = twin.replay(part, setting, steps=True)
        runs.append(run)
        for one, row in zip(mine, rows(run).to_pylist(), strict=True):
            row["replica"] = f"replica-{replica}"
            row["server_request_id"] = f"{replica}-{row['server_request_id']}"
            row["target"] = _target(replica, world)
            wire.out_of_patience(row, limit)
            wire.apply(world.wires, row, one.owner, limit)
            found[(one.owner, one.number)] = row
    return runs, found


def _when(one: Attempt) -> tuple[float, int]:
    return one.at_s, one.owner


def _retries(world: World, attempts: list[Attempt], found: dict[tuple[int, int], dict[str, Any]]) -> list[Attempt]:
    """The attempts that users would have made, given what became of these: retries of what failed, and no others."""
    patience = world.patience
    if patience is None:
        return attempts
    made = [one for one in attempts if one.number == 0]
    place = 0
    while place < len(made):
        one = made[place]
        place += 1
        row = found.get((one.owner, one.number))
        if row is None or row["error"] not in patience.retry_on or one.number >= patience.retries:
            continue
        pause = patience.pause_s(world.setting.seed, one.owner, one.number + 1, row["retry_after_s"])
        if pause is not None:
            # to the millisecond: rounds that agree so far are the same
            made.append(Attempt(one.owner, one.number + 1, round(row["end_s"] + pause, 3)))
    return sorted(made, key=lambda one: (one.owner, one.number))


def _requests(
    world: World, sent: np.ndarray, attempts: list[Attempt], found: dict[tuple[int, int], dict[str, Any]]
) -> pa.Table:
    last: dict[int, int] = {}
    for one in attempts:
        last[one.owner] = max(last.get(one.owner, 0), one.number)
    made = []
    for owner in range(len(world.load)):
        row = found[(owner, last[owner])]
        intended = float(world.load.at_s[owner])
        row |= {
            "index": owner,
            "trace_row": owner,
            "intended_s": intended,
            "lag_s": float(sent[owner]) - intended,
            "attempts": last[owner] + 1,
            "input_tokens": int(world.load.input_tokens[owner]),
            "prompt_tokens_expected": int(world.load.input_tokens[owner]),
            "expected_output_tokens": int(world.asked_tokens[owner]),
        }
        made.append(row)
    return pa.Table.from_pylist(made, schema=REQUESTS)


def _attempt_rows(
    world: World, attempts: list[Attempt], found: dict[tuple[int, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    assert world.patience is not None
    there = {(one.owner, one.number) for one in attempts}
    ends: dict[tuple[int, int], float] = {}
    made = []
    for one in sorted(attempts, key=lambda one: (one.owner, one.number)):
        row = found[(one.owner, one.number)]
        ends[(one.owner, one.number)] = row["end_s"]
        again = (one.owner, one.number + 1) in there
        tried = row["error"] in world.patience.retry_on
        verdict = ANSWERED if row["error"] is None else TRIED_AGAIN if again else GAVE_UP if tried else NOT_RETRIED
        before = ends.get((one.owner, one.number - 1))
        made.append(
            {
                "index": one.owner,
                "attempt": one.number,
                "worker": 0,
                "target": row["target"],
                "replica": row["replica"],
                "due_s": one.at_s,
                "pause_s": None if before is None else one.at_s - before,
                "sent_s": one.at_s,
                "first_token_s": row["first_token_s"],
                "end_s": row["end_s"],
                "status": row["status"],
                "error": row["error"],
                "error_detail": row["error_detail"],
                "verdict": verdict,
            }
        )
    return made


def _named(run: TwinRun, replica: int) -> pa.Table:
    """The step log of a replica, its request ids as the rows have them."""
    assert run.steps is not None
    last = left_s(run).max() if len(run.load) else 0.0
    steps = [step for step in run.steps.to_pylist() if step["start_ns"] / 1e9 <= last]  # nobody reads it any more then
    for step in steps:
        step["replica"] = f"replica-{replica}"
        for column in ("requests", "admitted", "preempted_requests"):
            step[column] = [f"{replica}-{name}" for name in step[column] or ()]
    return pa.Table.from_pylist(steps, schema=STEPS)


def change_draw(seed: int, at: int = 0) -> random.Random:
    """Moments and places of a change, the at-th of several; apart from what the world is drawn by."""
    return random.Random(f"lab change {seed} {at}" if at else f"lab change {seed}")
