"""Two faults at once: which is the larger is measured on the engine, and scored against what is said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from engine.replay import TWIN
from loadgen.lab.order import DUE, EQUAL, Order, order, quantile
from loadgen.lab.scenario import Scenario, find
from loadgen.lab.sides import faulty, healthy, replay_b, sizes
from loadgen.lab.trial import Trial, scored

SEED, LOAD, REQUESTS, PAIRS = 3, 0.7, 80, 2


def two(speed: float, arrivals: float) -> Scenario:
    """Slower steps, called the larger by the file, and more arrivals."""
    also = [{"change": "arrivals", "size": arrivals}]
    return Scenario(
        "Q", "t", "late", "engine_speed", virtual={"change": "engine_speed", "size": speed, "also": also},
        then="arrivals",
    )  # fmt: skip


def measured(scenario: Scenario, figure: str = "e2e p90") -> Order | None:
    return order(scenario, TWIN, figure, load=LOAD, seed=SEED, pairs=PAIRS, requests=REQUESTS)


def test_the_larger_is_measured_whatever_the_file_has_first() -> None:
    one = measured(two(2.0, 1.02))
    assert one is not None and one.causes == ("engine_speed", "arrivals") and not one.tied
    assert one.shares[0] > 0.8 and sum(one.shares) == pytest.approx(1.0)
    other = measured(two(1.01, 3.0), "ttft p90")
    assert other is not None and other.causes == ("arrivals", "engine_speed") and other.shares[0] > 0.8
    assert measured(two(2.0, 1.02), "dropped") is None  # no percentile, no size


def test_shares_are_those_of_the_definition() -> None:
    scenario = two(1.3, 1.5)
    found = measured(scenario)
    assert found is not None
    total = [0.0, 0.0]
    for pair in range(PAIRS):
        none, speed, load, both = (
            quantile(replay_b(faulty(scenario, TWIN, LOAD, SEED, REQUESTS, chosen), TWIN, SEED, pair), "e2e", 90.0)
            for chosen in ((), (0,), (1,), (0, 1))
        )
        total[0] += (speed - none + both - load) / 2
        total[1] += (load - none + both - speed) / 2
    by = dict(zip(found.causes, found.shares, strict=True))
    assert by["engine_speed"] == pytest.approx(total[0] / sum(total))
    assert found.tied or abs(found.shares[0] - found.shares[1]) >= EQUAL


def test_each_fault_is_the_same_alone_and_with_the_other() -> None:
    [scenario] = find(["D2"])
    both = faulty(scenario, TWIN, LOAD, SEED, REQUESTS)
    misses, stalls = (faulty(scenario, TWIN, LOAD, SEED, REQUESTS, [at]) for at in (0, 1))
    plain = healthy(scenario, TWIN, LOAD, SEED, REQUESTS)
    assert both.load.prefixes == misses.load.prefixes != plain.load.prefixes == stalls.load.prefixes
    assert both.setting.pauses == stalls.setting.pauses != () == misses.setting.pauses
    assert len(sizes(scenario, SEED)) == 2


class Said:
    def __init__(self, first: str, second: str) -> None:
        self.verdict = ("late", first)
        self.second = second

    def to_dict(self) -> dict[str, Any]:
        return {"figure": "e2e p90", "hypotheses": [{"cause": self.verdict[1]}, {"cause": self.second}]}


def trial_of(tmp_path: Path, said: Said, found: Order | None) -> Trial:
    return scored(
        two(1.3, 1.5), lambda a, b: said, [], [], way="virtual", load=LOAD, seed=0, size=1.0, folder=tmp_path,
        keep="all", began=time.monotonic(), larger=lambda figure: found if figure == "e2e p90" else None,
    )  # fmt: skip


def test_what_was_said_is_scored_against_the_measured_order(tmp_path: Path) -> None:
    said = Said("arrivals", "engine_speed")
    clear = trial_of(tmp_path, said, Order(("engine_speed", "arrivals"), (0.6, 0.4), tied=False))
    assert not clear.right and clear.then == "arrivals"
    other = trial_of(tmp_path, said, Order(("arrivals", "engine_speed"), (0.6, 0.4), tied=False))
    assert other.right and other.then == other.second == "engine_speed" and other.shares == (0.6, 0.4)
    tied = trial_of(tmp_path, said, Order(("engine_speed", "arrivals"), (0.52, 0.48), tied=True))
    assert tied.right and tied.tied and tied.then == "engine_speed"
    small = trial_of(tmp_path, said, Order(("arrivals", "engine_speed"), (1 - DUE / 2, DUE / 2), tied=False))
    assert small.right and small.then == ""  # too small to be due
    unknown = trial_of(tmp_path, said, None)
    assert not unknown.right and unknown.truth == ("late", "engine_speed")
    assert Trial.of(clear.to_dict()).to_dict() == clear.to_dict()
