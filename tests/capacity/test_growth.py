"""A run is ended early when its queue is lost, and never because of a burst."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.capacity.growth import Growth, deadline_of
from loadgen.schedule import build
from loadgen.traces import registry
from loadgen.traces.catalogue import SHIPPED_FOLDER
from loadgen.transforms import Transforms
from telemetry import slo


def played(arrivals: np.ndarray, rate: float, stay: float, length_s: float, deadline_s: float) -> float | None:
    """When a server of one queue (rate/s, stay s of its own) is called lost; None: never."""
    free, ends = 0.0, []
    for at in arrivals:
        free = max(free, at) + 1 / rate
        ends.append(free + stay)
    finished = np.sort(ends)
    growth = Growth(deadline_s)
    for second in range(1, int(length_s)):
        due, over = int(np.searchsorted(arrivals, second)), int(np.searchsorted(finished, second))
        if growth(float(second), due, over):
            return float(second)
    return None


def poisson(rate: float, length_s: float, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.cumsum(draw.exponential(1 / rate, int(rate * length_s)))


@pytest.mark.parametrize("seed", range(20))
def test_a_load_that_is_carried_is_played_to_its_end(seed: int) -> None:
    assert played(poisson(9.0, 300.0, seed), 10.0, 2.0, 300.0, 5.0) is None


def test_a_burst_that_is_worked_off_is_no_reason() -> None:
    burst = np.sort(np.concatenate([poisson(5.0, 300.0), 60.0 + np.linspace(0, 1, 80)]))  # 8 s of work at once
    assert played(burst, 10.0, 2.0, 300.0, 5.0) is None


def test_an_overload_ends_as_soon_as_its_queue_is_twice_the_deadline() -> None:
    at = played(poisson(20.0, 300.0), 10.0, 1.0, 300.0, 5.0)
    assert at is not None and 25.0 <= at < 60.0
    patient = played(poisson(20.0, 300.0), 10.0, 1.0, 300.0, 30.0)
    assert patient is not None and patient > 2 * at, "longer deadlines leave it more time"


def test_nothing_is_said_of_a_beginning() -> None:
    growth = Growth(1.0)
    assert [growth(float(t), 100 * t, t // 2) for t in range(1, 25)] == [None] * 24
    assert [growth(float(t), 100 * t, t // 2) for t in range(25, 60)].count(None) < 30, "then it is said"


def test_the_deadline_is_that_of_whole_answers_where_the_slo_has_one() -> None:
    schedule = build(registry.read(SHIPPED_FOLDER / "synthetic-conv.csv"), Transforms(seed=0, duration_s=60.0))
    chat = slo.load("chat")
    found = [
        chat.deadlines(None, int(i), int(o)).e2e
        for i, o in zip(schedule.input_tokens, schedule.output_tokens, strict=True)
    ]
    assert deadline_of(schedule, chat) == pytest.approx(float(np.mean([one for one in found if one is not None])))
    text = "classes: {default: {ttft: {base_s: 1}}}\nobjectives: [%s]"
    assert deadline_of(schedule, slo.parse(text % "e2e p95 <= 9 s", "x")) == 9.0
    assert deadline_of(schedule, slo.parse(text % "goodput >= 95 %", "x")) == 60.0
