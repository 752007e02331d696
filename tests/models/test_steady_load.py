"""The bound of a device under a steady load: by hand, and which limit ends it."""

from __future__ import annotations

import numpy as np
import pytest

from models.devices import DEVICES
from models.known_shapes import SHAPES
from models.roofline import StepCost
from models.steady_load import Limits, SteadyLoad

COST = StepCost(SHAPES["llama-3.1-8b"].shape, DEVICES["H100"], 2.0, 2.0)
LOAD = SteadyLoad(COST, np.full(100, 1000), np.full(100, 200), 0.6)


def test_a_step_is_the_iron_law_of_what_is_in_it() -> None:
    # 200 residents with answers of 200 tokens: one prompt of 1,000 is prefilled in each step, 199 decode
    step = COST.floor_ns(1000, 199, 200 * LOAD.context, 200, 200 * LOAD.context + 1000**2 / 2)
    assert LOAD.step_s(200) == pytest.approx(COST.iron_law_ns(step, 0.6) / 1e9, rel=1e-6)
    assert LOAD.context == pytest.approx(1000 + 100 + 8)
    assert LOAD.rate_of(200) == pytest.approx(200 / (200 * LOAD.step_s(200)))


@pytest.mark.parametrize(
    ("limits", "token_s", "binds", "residents"),
    [
        (Limits(max_batch=50), None, "batch", 50.0),
        (Limits(max_batch=500, token_budget=600), None, "token budget", 100.0),  # 600 / (1 + 1000 / 200)
        (Limits(kv_tokens=110_800), None, "KV pool", 100.0),
    ],
)
def test_the_first_limit_that_is_reached_binds(
    limits: Limits, token_s: float | None, binds: str, residents: float
) -> None:
    found = LOAD.bound(limits, token_s)
    assert (found.binds, found.residents) == (binds, pytest.approx(residents))
    assert found.rate == pytest.approx(LOAD.rate_of(residents))


def test_an_slo_on_the_time_per_token_bounds_the_batch() -> None:
    found = LOAD.bound(Limits(), token_s=0.020)
    assert found.binds == "time per token" and found.step_s == pytest.approx(0.020)
    assert LOAD.bound(Limits(), token_s=1e-4).rate < 1e-3, "not even the weights are read in that time"


def test_without_a_limit_the_device_ends_it() -> None:
    found = LOAD.bound(Limits())
    assert found.binds == "device"
    assert found.rate == pytest.approx(LOAD.rate_of(10 * found.residents), rel=2e-3), "more residents bring nothing"
    whole = SteadyLoad(COST, LOAD.inputs, LOAD.outputs, 1.0).bound(Limits())
    assert whole.rate > found.rate
