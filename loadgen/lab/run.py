"""Trials in a row: every scenario asked for, at every load, with every seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from loadgen.lab.kept import Kept, question_of
from loadgen.lab.processes import Servers
from loadgen.lab.scenario import REAL, SERVER, VIRTUAL, WAYS, Scenario, find, shipped
from loadgen.lab.trial import Explain, Trial, virtual
from models.errors import UserError
from telemetry import slo
from telemetry.twin import Twin

KEEP = ("all", "wrong", "none")
#: Pairs of a trial: sign flips can say something from six on, and with real noise one pair may fall out of line.
PAIRS: Final[Mapping[str, int]] = {VIRTUAL: 5, SERVER: 7, REAL: 7}


def chosen(names: list[str], *, every: bool, way: str) -> list[Scenario]:
    """The scenarios asked for.  Raises UserError where there are none, or where one cannot be played this way."""
    if way not in WAYS:
        raise UserError(f"{way!r} is no way to play", where="--way", remedy=f"one of {', '.join(WAYS)}")
    if every:
        return [one for one in shipped() if way in one.ways]
    if not names:
        raise UserError("no scenario is named", remedy="name some of `tailspan lab list`, or give --all")
    found = find(names)
    for one in found:
        if way not in one.ways:
            raise UserError(
                f"{one.id} cannot be played this way", where=f"--way {way}", remedy=f"one of {', '.join(one.ways)}"
            )
    return found


def trials(
    scenarios: Sequence[Scenario],
    twin: Twin,
    explain: Explain,
    root: Path,
    *,
    way: str,
    seeds: Sequence[int],
    loads: Sequence[float] | None,
    pairs: int,
    requests: int,
    keep: str,
    kept: Kept,
    through_twin: bool,
    say: Callable[[str], None],
) -> Iterator[Trial]:
    """Play them all; each is kept and told as it ends.  What ``kept`` knows is not played again."""
    if keep not in KEEP:
        raise UserError(f"{keep!r} is no choice", where="--keep", remedy=f"one of {', '.join(KEEP)}")
    policy = slo.load("chat")
    servers: Servers | None = None
    try:
        for scenario, load, seed in in_turn(scenarios, loads, seeds):
            question = question_of(
                scenario, way, load=load, seed=seed, pairs=pairs, requests=requests, twin=through_twin
            )
            trial = kept.known(question)
            if trial is not None:
                say(f"{_line(trial)} (kept)")
                yield trial
                continue
            if way == VIRTUAL:
                trial = virtual(
                    scenario, twin, explain, policy, root, load=load, seed=seed, pairs=pairs, requests=requests,
                    keep=keep,
                )  # fmt: skip
            else:
                servers = servers or Servers(way, root)
                trial = servers.trial(scenario, explain, load=load, seed=seed, pairs=pairs, keep=keep)
            kept.add(question, trial)
            where = f" {trial.folder}" if trial.folder and not trial.right else ""
            say(f"{_line(trial)} ({trial.seconds:.1f} s){where}")
            yield trial
    finally:
        if servers is not None:
            servers.close()


def in_turn(
    scenarios: Sequence[Scenario], loads: Sequence[float] | None, seeds: Sequence[int]
) -> Iterator[tuple[Scenario, float, int]]:
    """Seed by seed, so that a run that is stopped has some of every scenario; then by load, since scenarios share
    their healthy side."""
    for seed in seeds:
        for load in dict.fromkeys(load for one in scenarios for load in loads or one.loads):
            for one in scenarios:
                if load in (loads or one.loads):
                    yield one, load, seed


def _line(trial: Trial) -> str:
    mark = "right" if trial.right else f"WRONG, said {' · '.join(trial.said)}"
    return f"{trial.scenario:<5}load {trial.load:g} seed {trial.seed}: {' · '.join(trial.truth)}: {mark}"
