"""The schedule: every transform by its numbers, the same for any number of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadgen.schedule import build
from loadgen.traces.trace import Rows, Trace
from loadgen.transforms import Transforms
from models.errors import UserError

SECOND = 1_000_000_000


def poisson_trace(n: int = 2000, rate: float = 5.0) -> Trace:
    rng = np.random.default_rng(7)
    rows = Rows(Path("made.csv"))
    stamps = np.cumsum(rng.exponential(1 / rate, n)) * 1e9
    for stamp in stamps.astype(np.int64):
        rows.keep(int(stamp), int(rng.integers(1, 2000)), int(rng.integers(1, 400)))
    return rows.trace("made", "azure-2023", "0" * 64, [])


TRACE = poisson_trace()
PLAIN = Transforms(seed=3)


def test_without_transforms_it_is_the_trace() -> None:
    schedule = build(TRACE, PLAIN)
    assert np.array_equal(schedule.intended_s, TRACE.arrival_ns / 1e9)
    assert np.array_equal(schedule.input_tokens, TRACE.input_tokens)
    assert schedule.trace_row.tolist() == list(range(len(TRACE)))
    assert [record["name"] for record in schedule.records] == ["window"]


def test_a_window_starts_at_its_own_start_and_not_at_its_first_arrival() -> None:
    schedule = build(TRACE, replace(PLAIN, start_s=60, duration_s=30))
    inside = (TRACE.arrival_ns >= 60 * SECOND) & (TRACE.arrival_ns < 90 * SECOND)
    assert len(schedule) == inside.sum() == schedule.records[0]["after"]
    assert np.allclose(schedule.intended_s, (TRACE.arrival_ns[inside] - 60 * SECOND) / 1e9)
    assert schedule.intended_s[0] > 0
    assert schedule.length_s == 30


def test_speed_divides_the_times() -> None:
    slow, fast = build(TRACE, PLAIN), build(TRACE, replace(PLAIN, speed=1.5))
    assert np.allclose(fast.intended_s * 1.5, slow.intended_s)
    assert fast.rate_per_s == pytest.approx(slow.rate_per_s * 1.5)


def test_thinning_is_seeded_counted_and_nested() -> None:
    few = build(TRACE, replace(PLAIN, rate_scale=0.3))
    more = build(TRACE, replace(PLAIN, rate_scale=0.4))
    assert len(few) == pytest.approx(0.3 * len(TRACE), rel=0.1)
    assert set(few.trace_row) <= set(more.trace_row), "a smaller scale keeps a part of what a larger one keeps"
    assert np.array_equal(few.trace_row, build(TRACE, replace(PLAIN, rate_scale=0.3)).trace_row)
    assert not np.array_equal(few.trace_row, build(TRACE, replace(PLAIN, rate_scale=0.3, seed=4)).trace_row)
    record = few.records[1]
    assert (record["kind"], record["before"], record["after"]) == ("thinning", len(TRACE), len(few))


def test_superposition_adds_shifted_copies_within_the_window() -> None:
    schedule = build(TRACE, replace(PLAIN, start_s=0, duration_s=100, rate_scale=2.5))
    base = build(TRACE, replace(PLAIN, start_s=0, duration_s=100))
    assert len(schedule) == pytest.approx(2.5 * len(base), rel=0.05)
    assert (np.diff(schedule.intended_s) >= 0).all()
    assert schedule.intended_s[0] >= 0
    assert schedule.intended_s[-1] < 100
    assert set(base.intended_s) <= set(schedule.intended_s)
    counts = np.bincount(schedule.trace_row)
    assert set(counts[counts > 0]) == {2, 3}


def test_lengths_are_scaled_with_floors_that_are_counted() -> None:
    schedule = build(TRACE, replace(PLAIN, length_scale=0.05, min_input=35))
    assert schedule.input_tokens.min() == 35
    assert schedule.output_tokens.min() == 1
    big = TRACE.input_tokens >= 1000
    assert np.array_equal(schedule.input_tokens[big], np.floor(TRACE.input_tokens[big] * 0.05 + 0.5))
    shortest = next(record for record in schedule.records if record["name"] == "shortest")
    assert shortest["inputs_raised"] == int((np.floor(TRACE.input_tokens * 0.05 + 0.5) < 35).sum())


@pytest.mark.parametrize("policy", ["skip", "clip", "fail"])
def test_requests_over_the_context_are_decided_and_counted_before_the_run(policy: str) -> None:
    asked = replace(PLAIN, over_limit=policy, max_context=1000, min_input=30)
    over = int((TRACE.input_tokens + TRACE.output_tokens > 1000).sum())
    if policy == "fail":
        with pytest.raises(UserError, match=f"{over} of {len(TRACE)} requests exceed"):
            build(TRACE, asked)
        return
    schedule = build(TRACE, asked)
    assert (schedule.input_tokens.astype(int) + schedule.output_tokens).max() <= 1000
    assert next(record for record in schedule.records if record["name"] == "over_limit")["count"] == over
    assert len(schedule) == (len(TRACE) - over if policy == "skip" else len(TRACE))


def test_clipping_an_answer_longer_than_the_context_leaves_the_shortest_prompt() -> None:
    rows = Rows(Path("made.csv"))
    rows.keep(0, 500, 4000)
    schedule = build(
        rows.trace("made", "x", "0", []), replace(PLAIN, over_limit="clip", max_context=1000, min_input=30)
    )
    assert (schedule.input_tokens[0], schedule.output_tokens[0]) == (30, 970)


def test_the_shards_of_workers_are_the_whole() -> None:
    schedule = build(TRACE, PLAIN)
    parts = [schedule.part(worker, 8) for worker in range(8)]
    assert sorted(np.concatenate(parts)) == list(range(len(schedule)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"speed": 0.0}, "--speed"),
        ({"speed": float("nan")}, "--speed"),
        ({"rate_scale": -1.0}, "--rate-scale"),
        ({"length_scale": 0.0}, "--length-scale"),
        ({"start_s": -5.0}, "--start"),
        ({"duration_s": 0.0}, "--duration"),
        ({"over_limit": "drop"}, "--over-limit"),
        ({"start_s": 1e6}, "--window"),
        ({"rate_scale": 1e-9}, "--rate-scale"),
        ({"min_input": 50, "max_context": 50}, "--model"),
    ],
)
def test_a_value_that_cannot_be_used_names_its_option(changes: dict[str, float], option: str) -> None:
    with pytest.raises(UserError) as caught:
        build(TRACE, replace(PLAIN, **changes))  # type: ignore[arg-type]
    assert caught.value.where == option
    assert caught.value.remedy
