"""One trial: a scenario under a load and a seed, played on both sides, explained, and scored against the truth.

Must always hold: the explanation is asked of the bundles alone; the truth is in the trial's result and nowhere in them.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from loadgen.lab.order import DUE, Order, order
from loadgen.lab.scenario import VIRTUAL, Scenario
from loadgen.lab.sides import faulty, healthy, replay_a, replay_b, size_of
from telemetry.bundle import Bundle
from telemetry.slo import Slo
from telemetry.twin import Twin
from telemetry.twin_bundle import write_bundle

REQUESTS: Final = 400
PAIRS: Final = 5


class Said(Protocol):
    """What is needed of an explanation (telemetry.explain.Explanation has it)."""

    @property
    def verdict(self) -> tuple[str, str]: ...

    def to_dict(self) -> dict[str, Any]: ...


Explain = Callable[[Sequence[Bundle], Sequence[Bundle]], Said]


@dataclass(frozen=True, slots=True)
class Trial:
    """truth and said: (label, cause); then, second: the second causes, "" where there is none.

    shares, tied: of two faults, as measured (``loadgen.lab.order``); of a tie the one that was said is the truth.
    size: as drawn.  a, b: run ids; folder: where they lie, "" where not kept.
    """

    scenario: str
    way: str
    load: float
    seed: int
    size: Any
    truth: tuple[str, str]
    said: tuple[str, str]
    second: str
    seconds: float
    folder: str
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    then: str = ""
    shares: tuple[float, ...] = ()
    tied: bool = False

    @property
    def right(self) -> bool:
        """Is the first cause the true one?"""
        return self.said == self.truth

    @property
    def label_right(self) -> bool:
        return self.said[0] == self.truth[0]

    def to_dict(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "way": self.way,
            "load": self.load,
            "seed": self.seed,
            "size": self.size,
            "truth": list(self.truth),
            "said": list(self.said),
            "second": self.second,
            "then": self.then,
            "shares": [round(one, 3) for one in self.shares],
            "tied": self.tied,
            "right": self.right,
            "seconds": round(self.seconds, 2),
            "folder": self.folder,
            "a": list(self.a),
            "b": list(self.b),
        }

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Trial:
        """From ``to_dict``."""
        pairs = {name: tuple(found[name]) for name in ("truth", "said", "shares", "a", "b")}
        return cls(**{name: value for name, value in found.items() if name != "right"} | pairs)


def record(
    scenario: Scenario,
    twin: Twin,
    slo: Slo,
    root: Path,
    *,
    load: float,
    seed: int,
    pairs: int = PAIRS,
    requests: int = REQUESTS,
) -> tuple[list[Bundle], list[Bundle], Any]:
    """Play all pairs of a virtual trial, interleaved; bundles of both sides and the size of the fault."""
    world_a = healthy(scenario, twin, load, seed, requests)
    world_b = faulty(scenario, twin, load, seed, requests)
    found: tuple[list[Bundle], list[Bundle]] = ([], [])
    for pair in range(pairs):
        for side, world in enumerate((world_a, world_b)):
            if side:
                played = replay_b(world, twin, seed, pair)
            else:
                played = replay_a(scenario, twin, load, seed, requests, pair)
            fields = {
                "plan": {"keep_text": "none"},
                "hashes": {"trace": f"lab-{seed}-{load:g}-{requests}"},  # the same load on both sides
                "trace": {"name": "drawn", "synthetic": True},
                "repeat": pair,
                "generator": played.generator,
                "scheduled": len(world.load),
                "length_s": float(world.load.at_s[-1]),
                "targets": sorted(set(played.tables["requests"].column("target").to_pylist())),
            }
            # the setting of a side is what the diagnosis is to find out
            fields["twin"] = None
            found[side].append(
                write_bundle(played.run, slo, root=root, name="lab", fields=fields, tables=played.tables)
            )
    return *found, size_of(scenario, seed)


def virtual(
    scenario: Scenario,
    twin: Twin,
    explain: Explain,
    slo: Slo,
    root: Path,
    *,
    load: float,
    seed: int,
    pairs: int = PAIRS,
    requests: int = REQUESTS,
    keep: str = "wrong",
) -> Trial:
    """One trial in virtual time.  keep: bundles of which trials stay on disk: all, wrong or none."""
    began = time.monotonic()
    # a folder's name must not say what was done to it
    folder = root / f"{random.Random(f'lab folder {scenario.id} {load} {seed}').getrandbits(40):010x}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run: the same trial, and no other's bundles beside it
    folder.mkdir(parents=True)
    try:
        a, b, size = record(scenario, twin, slo, folder, load=load, seed=seed, pairs=pairs, requests=requests)

        def larger(figure: str) -> Order | None:
            return order(scenario, twin, figure, load=load, seed=seed, pairs=pairs, requests=requests)

        return scored(
            scenario, explain, a, b, way=VIRTUAL, load=load, seed=seed, size=size, folder=folder, keep=keep,
            began=began, larger=larger if scenario.then else None,
        )  # fmt: skip
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half a trial tells nothing
        raise


def scored(
    scenario: Scenario,
    explain: Explain,
    a: Sequence[Bundle],
    b: Sequence[Bundle],
    *,
    way: str,
    load: float,
    seed: int,
    size: Any,
    folder: Path,
    keep: str,
    began: float,
    larger: Callable[[str], Order | None] | None = None,
) -> Trial:
    """What is said of both sides, beside the truth.  began: ``time.monotonic`` of the trial's start.

    larger: measures which of two faults is the larger in a figure; None: the first of the file.
    """
    said = explain(a, b)
    truth, then = scenario.truth, scenario.then
    measured = larger(str(said.to_dict().get("figure", ""))) if larger is not None else None
    if measured is not None:
        causes = measured.causes
        if measured.tied and said.verdict[1] == causes[1]:
            causes = (causes[1], causes[0])
        # what makes too little of the change need not be named
        truth, then = (scenario.label, causes[0]), causes[1] if min(measured.shares) >= DUE else ""
    trial = Trial(
        scenario=scenario.id,
        way=way,
        load=load,
        seed=seed,
        size=size,
        truth=truth,
        said=said.verdict,
        second=second_of(said),
        seconds=time.monotonic() - began,
        folder=str(folder),
        a=tuple(one.run_id for one in a),
        b=tuple(one.run_id for one in b),
        then=then,
        shares=measured.shares if measured is not None else (),
        tied=measured is not None and measured.tied,
    )
    if keep == "none" or (keep == "wrong" and trial.right):
        shutil.rmtree(folder)
        trial = replace(trial, folder="")
    return trial


def second_of(said: Said) -> str:
    hypotheses = said.to_dict().get("hypotheses", ())
    return str(hypotheses[1]["cause"]) if len(hypotheses) > 1 else ""
