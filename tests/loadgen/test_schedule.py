"""The schedule: every transform by its numbers, the same for any number of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.arrivals import ArrivalModel
from loadgen.schedule import Schedule, build
from loadgen.traces.trace import Rows, Trace
from loadgen.transforms import Mix, Transforms
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


# --- sessions, loops, clocks, models, classes ---
def talks(n: int = 300) -> Trace:
    """Sessions of three turns 4 s apart, one beginning each second; rows without a session in between."""
    rows = Rows(Path("made.csv"))
    for k in range(n):
        for turn in range(3):
            rows.keep((k + 4 * turn) * SECOND, 100 + turn, 10, session=k)
        rows.keep(k * SECOND + SECOND // 2, 50, 5)
    return rows.trace("made", "burstgpt-3", "0", [])


def turns_of(schedule: Schedule) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = {}
    assert schedule.session is not None
    rows = zip(schedule.session.tolist(), schedule.copy.tolist(), schedule.intended_s.tolist(), strict=True)
    for session, copy, at in rows:
        if session >= 0:
            found.setdefault((session, copy), []).append(at)
    return found


def test_thinning_keeps_or_drops_whole_sessions() -> None:
    schedule = build(talks(), replace(PLAIN, rate_scale=0.4))
    turns = turns_of(schedule)
    assert {len(times) for times in turns.values()} == {3}
    assert len(turns) == pytest.approx(120, abs=25)


def test_superposition_moves_whole_sessions_and_cuts_only_at_the_end_of_the_window() -> None:
    schedule = build(talks(), replace(PLAIN, rate_scale=2.0))
    assert (np.diff(schedule.intended_s) >= 0).all()
    for (_, copy), times in turns_of(schedule).items():
        assert times == pytest.approx([times[0] + 4 * turn for turn in range(len(times))])
        assert len(times) == 3 or (copy and times[0] + 4 * len(times) >= schedule.length_s - 1e-6)
    record = schedule.records[1]
    assert record["turns_cut"] == record["before"] * 2 - record["after"] > 0


def test_a_loop_repeats_the_window_with_copies_of_its_own() -> None:
    once = build(TRACE, replace(PLAIN, duration_s=60))
    thrice = build(TRACE, replace(PLAIN, duration_s=60, loop=3))
    assert thrice.length_s == 180 and len(thrice) == 3 * len(once)
    assert np.allclose(thrice.intended_s[len(once) : 2 * len(once)], once.intended_s + 60)
    assert np.unique(thrice.copy).tolist() == [0, 1, 2]


def test_de_quantising_makes_ticks_poisson_and_keeps_the_order_of_a_tick() -> None:
    rng = np.random.default_rng(11)
    rows = Rows(Path("made.csv"))
    for tick, count in enumerate(rng.poisson(9, 400)):
        for n in range(count):
            rows.keep(tick * 3 * SECOND, 10 + n, 5)
    trace = rows.trace("made", "mooncake", "0", [])
    raw, spread = build(trace, PLAIN), build(trace, replace(PLAIN, dequantise_s=3.0))
    gaps = np.diff(spread.intended_s)
    assert np.diff(raw.intended_s).std() / np.diff(raw.intended_s).mean() > 2
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.06)
    assert spread.trace_row.tolist() == raw.trace_row.tolist(), "rows of one tick keep their order"
    assert (spread.intended_s - raw.intended_s >= 0).all() and (spread.intended_s - raw.intended_s < 3.0).all()
    record = next(one for one in spread.records if one["name"] == "dequantise")
    assert record["tick_s"] == 3.0 and record["equal_before"] > 2000
    other = build(trace, replace(PLAIN, dequantise_s=3.0, seed=8))
    assert not np.array_equal(other.intended_s, spread.intended_s)


@pytest.mark.parametrize(
    ("model", "rates"),
    [
        ("ramp:from=1,to=9,cv=0", [2, 4, 6, 8]),
        ("steps:2x25,8x25,0x25,4x25", [2, 8, 0, 4]),
        ("spike:rate=2,peak=40,at=25,for=25", [2, 40, 2, 2]),
    ],
)
def test_a_model_has_its_rate_at_every_moment(model: str, rates: list[float]) -> None:
    asked = replace(PLAIN, duration_s=100, arrivals=ArrivalModel.parse(model, "--arrivals"))
    schedule = build(TRACE, asked)
    counts = np.bincount((schedule.intended_s // 25).astype(int), minlength=4) / 25
    for found, rate in zip(counts, rates, strict=True):
        assert found == pytest.approx(rate, abs=3.5 * np.sqrt(rate / 25) + 0.05)
    assert schedule.length_s == 100
    assert schedule.input_tokens.tolist() == TRACE.input_tokens[: len(schedule)].tolist()


def test_a_model_takes_the_rows_again_when_they_end() -> None:
    asked = replace(PLAIN, duration_s=50, start_s=390.0, arrivals=ArrivalModel.parse("constant:rate=10", "x"))
    schedule = build(TRACE, asked)
    rows = int((TRACE.arrival_ns >= 390 * SECOND).sum())
    assert 0 < rows < 500 == len(schedule)
    assert schedule.trace_row[rows] == schedule.trace_row[0]
    assert (schedule.copy[0], schedule.copy[rows]) == (0, 1)
    assert np.diff(schedule.intended_s) == pytest.approx(0.1)


def test_classes_have_their_shares_and_thinning_changes_none() -> None:
    mix = (Mix("a", 0.7), Mix("b", 0.3))
    whole, thin = (build(TRACE, replace(PLAIN, mix=mix, rate_scale=scale)) for scale in (1.0, 0.5))
    assert np.mean(whole.klass == 1) == pytest.approx(0.3, abs=0.04)
    by_row = dict(zip(whole.trace_row.tolist(), whole.klass.tolist(), strict=True))
    assert all(by_row[row] == klass for row, klass in zip(thin.trace_row.tolist(), thin.klass.tolist(), strict=True))
    assert whole.class_names == ("a", "b")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"dequantise_s": 0.0}, "--dequantise"),
        ({"loop": 0}, "--loop"),
        ({"loop": 1_000_000}, "--loop"),
        ({"mix": (Mix("a", 0.7), Mix("a", 0.3))}, "classes"),
        ({"mix": (Mix("a", 0.7), Mix("b", 0.7))}, "classes"),
        ({"rate_scale": 0.5, "arrivals": ArrivalModel.parse("poisson:rate=1", "x")}, "--rate-scale"),
        ({"duration_s": 1e-3, "arrivals": ArrivalModel.parse("poisson:rate=1", "x")}, "--arrivals"),
    ],
)
def test_what_cannot_be_done_to_a_trace_is_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        build(TRACE, replace(PLAIN, **changes))
    assert caught.value.where == where


@pytest.mark.parametrize(
    "text", ["burst:rate=1", "poisson", "poisson:rate=x", "poisson:rate=-1", "gamma:rate=1", "ramp:from=1,to=2,rate=3"]
)
def test_a_model_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        ArrivalModel.parse(text, "--arrivals")
    assert caught.value.where == "--arrivals" and caught.value.remedy


@pytest.mark.parametrize("text", ["constant:rate=5", "gamma:rate=5,cv=3", "steps:2x60,8x60,cv=2"])
def test_a_model_survives_its_plan(text: str) -> None:
    if text.startswith("steps"):
        made = ArrivalModel.parse({"model": "steps", "steps": [[2, 60], [8, 60]], "cv": 2}, "x")
    else:
        made = ArrivalModel.parse(text, "x")
    assert ArrivalModel.parse(made.to_dict(), "x") == made
    assert str(made) == text
