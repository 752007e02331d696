"""The two sides of a virtual trial: a healthy world drawn from the seed, and the same with the scenario's faults.

Must always hold: what is drawn for a fault depends on the scenario, the seed and its place alone, so that each of
several faults is the same whether it is played by itself or with the others.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np

from loadgen.lab.changes import BEFORE, apply
from loadgen.lab.play import Played, change_draw, play
from loadgen.lab.scenario import Scenario, drawn
from loadgen.lab.world import World, base, settled
from telemetry.twin import Twin


def sizes(scenario: Scenario, seed: int) -> list[float]:
    """Of its faults, as drawn."""
    draw = random.Random(f"lab size {scenario.id} {seed}")
    return [float(drawn(one.get("size", 1.0), draw)) for one in (scenario.virtual, *scenario.virtual.get("also", ()))]


def healthy(scenario: Scenario, twin: Twin, load: float, seed: int, requests: int) -> World:
    """Side A."""
    return _healthy(twin, seed, load, requests, _before(scenario))


def faulty(
    scenario: Scenario, twin: Twin, load: float, seed: int, requests: int, chosen: Collection[int] | None = None
) -> World:
    """Side B.  chosen: places of the faults that are played; None: all."""
    world = healthy(scenario, twin, load, seed, requests)
    played = (scenario.virtual, *scenario.virtual.get("also", ()))
    for at, (one, size) in enumerate(zip(played, sizes(scenario, seed), strict=True)):
        if chosen is None or at in chosen:
            world = apply(world, one["change"], size, change_draw(seed, at))
    return world


def noise(seed: int, pair: int, *, of_b: bool) -> int:
    """The seed of the noise of one replay."""
    return (seed * 1000 + pair) * 2 + of_b


def replay_a(scenario: Scenario, twin: Twin, load: float, seed: int, requests: int, pair: int) -> Played:
    """Side A of a pair, played once for all scenarios of a seed and a load."""
    return _replay_a(twin, seed, load, requests, _before(scenario), pair)


def replay_b(world: World, twin: Twin, seed: int, pair: int) -> Played:
    """Side B of a pair."""
    return play(twin, world, noise(seed, pair, of_b=True), seed)


def _before(scenario: Scenario) -> str:
    """The change whose preparation both sides have, "" where none has one."""
    change = str(scenario.virtual["change"])
    return change if change in BEFORE else ""


@lru_cache(maxsize=8)
def _healthy(twin: Twin, seed: int, load: float, requests: int, before: str) -> World:
    world = base(twin, seed, load, requests)
    if not before:
        return world
    prepared = BEFORE[before](world)
    # requests that were made longer are more work: the load is to be what it is called all the same
    same = np.array_equal(prepared.load.input_tokens, world.load.input_tokens)
    return prepared if same else settled(twin, prepared, load)


@lru_cache(maxsize=16)
def _replay_a(twin: Twin, seed: int, load: float, requests: int, before: str, pair: int) -> Played:
    return play(twin, _healthy(twin, seed, load, requests, before), noise(seed, pair, of_b=False), seed)


def size_of(scenario: Scenario, seed: int) -> Any:
    """For people: the size of the one fault, or the list of several."""
    found = sizes(scenario, seed)
    return found[0] if len(found) == 1 else found
