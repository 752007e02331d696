"""Floors in the engine: every step and request has one, made from the plan that ran; they reach log, wire and row."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from engine.core import Engine
from engine.runner_cpu import CpuRunner
from engine.server.tracing import clock_attributes
from engine.steplog import to_arrow
from loadgen.rows import server_columns
from models.devices import DEVICES
from models.roofline import StepCost, pairs
from telemetry import names
from telemetry.schema import STEPS
from tests.engine.conftest import HandDriven


def on_device(rig: HandDriven) -> StepCost:
    """The same engine, which knows what it runs on."""
    runner = CpuRunner(rig.engine.model, rig.config)
    cost = StepCost(rig.engine.model.shape, DEVICES["L4"], runner.weight_bytes, runner.kv_bytes)
    rig.engine = Engine(rig.config, rig.engine.model, runner, cost)
    return cost


def test_a_step_is_accounted_for_by_what_it_computed(drive: Callable[..., HandDriven]) -> None:
    rig = drive(token_budget=16, prefix_cache=False)
    cost = on_device(rig)
    first = rig.submit(list(range(3, 13)), max_tokens=6)
    rig.step()
    second = rig.submit(list(range(20, 40)), max_tokens=2)
    rig.run()
    log = rig.engine.steps.since(-1)
    assert first.finish == second.finish == "length"
    # step 0: a prompt of 10; step 1: its decode and a chunk of 15; step 2: its decode and the last 5
    expected = [(10, 0, 10, 1, pairs(0, 10)), (15, 1, 11 + 15, 1, 11 + pairs(0, 15)),
                (5, 1, 12 + 20, 2, 12 + pairs(15, 5)), (0, 2, 13 + 21, 2, 13 + 21)]  # fmt: skip
    for record, arguments in zip(log, expected, strict=False):
        want = cost.floor_ns(*arguments)
        assert (record.floor_ns, record.bytes, record.flops) == (want.floor_ns, want.bytes, want.flops)
        assert record.efficiency == pytest.approx(want.floor_ns / (record.end_ns - record.start_ns))
        # a tiny model on two cores cannot outrun a data-centre card: most of its time is beyond that floor
        assert (record.efficiency or 1) < 0.5 and record.wall == "overhead"


def test_a_request_carries_its_floors_to_span_wire_and_row(drive: Callable[..., HandDriven]) -> None:
    rig = drive()
    cost = on_device(rig)
    prompt = list(range(3, 40))
    rig.submit(prompt, max_tokens=2)
    rig.run()
    answer = rig.submit(prompt, max_tokens=5)  # two pages of it are cached now
    rig.run()
    clock = answer.request.clock
    clock.sent(clock.last_token_ns or 0)
    account = clock.account()
    assert account["cached_tokens"] == 32
    assert account["floor_ttft_ns"] == cost.ttft_ns(37, 32)
    assert account["floor_tpot_ns"] == cost.tpot_ns(37, 5)
    assert account["floor_ttft_ns"] <= account["phases"]["prefill"]
    assert account["floor_tpot_ns"] * 4 <= account["phases"]["decode"]
    attributes = clock_attributes(clock)
    assert attributes[names.ATTR_FLOOR_TTFT] == account["floor_ttft_ns"] / 1e9
    assert attributes[names.ATTR_FLOOR_TPOT] == account["floor_tpot_ns"] / 1e9
    row = server_columns(account)
    assert (row["floor_ttft_s"], row["floor_tpot_s"]) == (cost.ttft_ns(37, 32) / 1e9, (cost.tpot_ns(37, 5) or 0) / 1e9)


def test_one_token_has_no_time_per_token(drive: Callable[..., HandDriven]) -> None:
    rig = drive()
    on_device(rig)
    answer = rig.submit([5, 6, 7], max_tokens=1)
    rig.run()
    facts = answer.request.clock.facts
    assert facts.floor_ttft_ns is not None and facts.floor_tpot_ns is None


def test_without_a_device_nothing_is_said(drive: Callable[..., HandDriven]) -> None:
    rig = drive()
    answer = rig.submit([5, 6, 7], max_tokens=3)
    rig.run()
    table = to_arrow(rig.engine.steps.since(-1), "r", simulated=False)
    assert table.schema.equals(STEPS)
    assert all(table.column(name).null_count == table.num_rows for name in ("bytes", "flops", "floor_ns", "wall"))
    clock = answer.request.clock
    clock.sent(clock.last_token_ns or 0)
    assert clock.account()["floor_ttft_ns"] is None
    assert names.ATTR_FLOOR_TTFT not in clock_attributes(clock)
    assert isinstance(table, pa.Table) and table.num_rows == 3
