"""The layers of explain one by one: sums that are exact for any input, and models that know what they are of."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.replay import TWIN
from telemetry import names
from telemetry.bundle import Bundle
from telemetry.explain import queue_model, step_times
from telemetry.explain.attributes import partitions, split
from telemetry.explain.contributions import contributions
from telemetry.explain.counterfactual import shapley
from telemetry.explain.server_model import Load, ServerModel, through_twin
from telemetry.explain.side import Run, Steps
from tests.bundles import answered_row

SLOW = settings(max_examples=60, deadline=None)
SERVER = ServerModel((0.006, 0.0004, 0.0001, 0.0005, 0.0006, 1e-7, 0.0), max_batch=24, token_budget=160, kv_blocks=900)


def bundle_of(root: Path, rows: list[dict[str, object]]) -> Bundle:
    bundle = Bundle.create(root, {}, scheduled=len(rows), length_s=60.0, trace={"name": "made"})
    with bundle.writer("requests", "w") as writer:
        writer.append(rows)
    bundle.update(status="complete", validity={"verdict": "VALID"})
    bundle.compact()
    return bundle


# --- layer 1 ---


def random_rows(rng: np.random.Generator, n: int) -> list[dict[str, object]]:
    """Answered rows whose server phases are random and whose moments agree with them."""
    rows: list[dict[str, object]] = []
    for index in range(n):
        at = float(rng.uniform(0, 60))
        phases = {f"phase_{name}_s": round(float(rng.exponential(0.1)), 9) for name in names.PHASES}
        duration = sum(phases.values())
        sent = at + float(rng.exponential(0.001))
        network = float(rng.exponential(0.002))
        first = sent + network / 2 + sum(phases[f"phase_{name}_s"] for name in names.PHASES[:4])
        end = sent + network + duration
        rows.append(
            answered_row(
                index,
                at,
                sent_s=sent,
                server_duration_s=duration,
                end_s=end,
                first_token_s=first,
                last_token_s=end,
                text=None,
                chunk_s=None,
                chunk_tokens=None,
                **phases,
            )
        )
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_phases_sum_to_the_change_of_the_percentile(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, 60, 4)
    runs = [Run.of(bundle_of(tmp_path, random_rows(rng, int(n)))) for n in sizes]
    a, b = runs[:2], runs[2:]
    for measure in ("e2e", "ttft"):
        for p in (1.0, 50.0, 90.0, 99.0):
            found = contributions(a, b, measure, p)
            assert found is not None
            assert sum(one.change_s for one in found.parts) == pytest.approx(found.change_s, abs=1e-12)
            assert sum(one.a_s for one in found.parts) == pytest.approx(found.a_s, abs=1e-12)
            column = "end_s" if measure == "e2e" else "first_token_s"
            wanted = []
            for run in b:
                times = np.sort(run[column] - run["intended_s"])
                wanted.append(times[max(1, math.ceil(p * len(times) / 100 - 1e-9)) - 1])
            assert found.b_s == pytest.approx(float(np.mean(wanted)))
            assert all(one.low_s is not None and one.low_s <= one.change_s <= one.high_s for one in found.parts)  # type: ignore[operator]


# --- layer 3 ---


@SLOW
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_mix_and_within_sum_to_the_change_of_the_exceedance(n_a: int, n_b: int, cells: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, rng.integers(1, cells + 1), n) for n in (n_a, n_b)]
    slow = [rng.random(n) < rng.random() for n in (n_a, n_b)]
    found = split(codes, slow, [f"c{k}" for k in range(cells)])
    total = sum(one.mix + one.within for one in found)
    assert total == pytest.approx(float(slow[1].mean() - slow[0].mean()), abs=1e-12)
    assert sum(one.n_a for one in found) == n_a and sum(one.n_b for one in found) == n_b


def grouped(root: Path, seed: int, shares: dict[str, float], slow: dict[str, float], n: int = 600) -> Run:
    """A run of two classes; slow: probability that a request of a class takes 3 s, not 1 s."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(n):
        klass = str(rng.choice(list(shares), p=list(shares.values())))
        took = 3.0 if rng.random() < slow[klass] else 1.0
        at = index * 0.1
        rows.append(answered_row(index, at, end_s=at + took, text=None, **{"class": klass}))
    return Run.of(bundle_of(root, rows))


def test_other_requests_are_mix_and_slower_ones_are_within(tmp_path: Path) -> None:
    even, uneven = {"chat": 0.5, "code": 0.5}, {"chat": 0.2, "code": 0.8}
    slow = {"chat": 0.02, "code": 0.5}
    base = grouped(tmp_path, 1, even, slow)
    mixed = next(iter(partitions([base], [grouped(tmp_path, 2, uneven, slow)], "e2e", 2.0)))
    assert mixed.attributes == ("class",) and mixed.found and mixed.p_mix < 0.05
    assert mixed.mix > 0.8 * mixed.change > 0
    slower = next(iter(partitions([base], [grouped(tmp_path, 3, even, {"chat": 0.6, "code": 0.5})], "e2e", 2.0)))
    assert slower.found and slower.within > 0.8 * slower.change and slower.p_within < 0.05
    worst = max(slower.cells, key=lambda one: one.within)
    assert worst.name == "chat"
    same = partitions([base], [grouped(tmp_path, 4, even, slow)], "e2e", 2.0)
    assert not any(one.found for one in same)


def test_an_attribute_that_only_says_which_side_it_is_divides_nothing(tmp_path: Path) -> None:
    chances = {"chat": 0.1, "code": 0.1, "a": 0.1, "b": 0.6}
    one, other = (grouped(tmp_path, seed, {name: 1.0}, chances) for seed, name in ((1, "a"), (2, "b")))
    assert all("class" not in found.attributes for found in partitions([one], [other], "e2e", 2.0))


# --- layer 2 ---


@SLOW
@given(st.lists(st.floats(-5, 5), min_size=16, max_size=16))
def test_shapley_values_are_the_mean_over_all_orders_and_sum_to_the_whole(worth: list[float]) -> None:
    factors = ["a", "b", "c", "d"]

    def value(chosen: frozenset[str]) -> float:
        return worth[sum(1 << k for k, name in enumerate(factors) if name in chosen)]

    found = shapley(factors, value)
    assert found.sum() == pytest.approx(worth[15] - worth[0], abs=1e-9)
    slowly = dict.fromkeys(factors, 0.0)
    for order in permutations(factors):
        for k, name in enumerate(order):
            slowly[name] += (value(frozenset(order[: k + 1])) - value(frozenset(order[:k]))) / 24
    assert found == pytest.approx(list(slowly.values()), abs=1e-9)


def load(seed: int, n: int, rate: float) -> Load:
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(4.6, 0.6, n), 10, 900).astype(np.int64)
    output = np.clip(rng.lognormal(3.2, 0.6, n), 1, 120).astype(np.int64)
    return Load(np.cumsum(rng.exponential(1 / rate, n)), prompt, output, np.where(rng.random(n) < 0.5, 64, 0))


@pytest.mark.parametrize(
    ("rate", "changes"),
    [
        (4.0, {}),
        (8.0, {}),
        (8.0, {"max_batch": 5}),
        (6.0, {"token_budget": 64}),
        (6.0, {"stalls": ((5.0, 2.0), (20.0, 1.0))}),
        (6.0, {"gap_s": 0.002}),
    ],
)
def test_the_queue_model_agrees_with_the_engine_s_own_scheduler(rate: float, changes: dict[str, object]) -> None:
    from dataclasses import replace

    server = replace(SERVER, **changes)
    one = load(3, 250, rate)
    fast, exact = queue_model.replay(one, server), through_twin(TWIN)(one, server)
    for mine, theirs in ((fast.ttft_s, exact.ttft_s), (fast.e2e_s, exact.e2e_s)):
        assert np.isfinite(mine).all() and len(mine) == len(theirs)
        for p in (50, 90):
            assert np.percentile(mine, p) == pytest.approx(np.percentile(theirs, p), rel=0.1)


def test_a_small_pool_makes_it_slower_and_everybody_is_answered_all_the_same() -> None:
    from dataclasses import replace

    one = load(3, 250, 8.0)
    wide, narrow = (queue_model.replay(one, replace(SERVER, kv_blocks=blocks)) for blocks in (900, 64))
    assert np.isfinite(narrow.e2e_s).all() and np.percentile(narrow.e2e_s, 90) > 1.2 * np.percentile(wide.e2e_s, 90)
    tiny = queue_model.replay(one, replace(SERVER, kv_blocks=8))  # prompts above 128 tokens can never run
    assert np.isnan(tiny.e2e_s).any() and np.isfinite(tiny.e2e_s[one.prompt < 40]).all()


# --- the step log ---


def steps_of(seed: int, n: int = 600, prompt: float = 1.0, rest: float = 1.0) -> Steps:
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random(n) < 0.3, rng.integers(8, 128, n), 0).astype(float)
    decodes = rng.integers(1, 24, n).astype(float)
    seconds = (prompt * 0.0005 * tokens + rest * (0.006 + 0.0006 * decodes)) * np.exp(rng.normal(0, 0.05, n))
    start = np.cumsum(seconds + 1e-4) * 1e9
    columns = {name: np.zeros(n) for name in ("recomputed_tokens", "attended", "preempted", "waiting")} | {
        "step": np.arange(n, dtype=float), "start_ns": start, "end_ns": start + seconds * 1e9,
        "gap_ns": np.full(n, 1e5), "running": decodes, "decode_seqs": decodes, "prefill_tokens": tokens,
        "context_tokens": decodes * 100, "kv_used": decodes * 7, "kv_free": 900 - decodes * 7,
    }  # fmt: skip
    return Steps("r", columns)


def test_speed_is_told_from_composition() -> None:
    formula = step_times.fit([steps_of(1)])
    assert formula is not None
    for prompt, rest in ((1.0, 1.0), (1.3, 1.0), (1.0, 1.3), (1.25, 1.25)):
        found = step_times.speed([steps_of(2, prompt=prompt, rest=rest)], formula)
        assert found is not None
        assert found.prompt == pytest.approx(prompt, abs=0.06) and found.rest == pytest.approx(rest, abs=0.06)
    larger = steps_of(3)
    larger.columns["decode_seqs"] = larger["decode_seqs"] * 2  # a larger batch, and steps as long as that makes them
    seconds = step_times.predicted(larger, formula)
    larger.columns["end_ns"] = larger["start_ns"] + seconds * 1e9
    again = step_times.speed([Steps("r", larger.columns)], formula)
    assert again is not None and again.total == pytest.approx(1.0, abs=0.02)
    assert step_times.fit([steps_of(1, n=50)]) is None


def test_stalls_slow_steps_and_cold_starts_are_told_apart() -> None:
    formula = step_times.fit([steps_of(1)])
    assert formula is not None
    calm = steps_of(4)
    assert not step_times.stalls(calm).any() and not step_times.slow(calm, formula).any()
    stalled = steps_of(4)
    stalled.columns["gap_ns"][[100, 200]] = 3e8
    assert np.flatnonzero(step_times.stalls(stalled)).tolist() == [100, 200]
    alone = steps_of(4)  # an engine whose steps follow each other without a gap, but for the stalls
    alone.columns["gap_ns"][:] = 0
    alone.columns["gap_ns"][[7, 70]] = 3e8
    assert np.flatnonzero(step_times.stalls(alone)).tolist() == [7, 70] and step_times.usual_gap([alone]) == 0
    shape = np.ceil(np.log2(calm["prefill_tokens"] + 1)) * 64 + np.ceil(np.log2(calm["decode_seqs"] + 1))
    first = np.unique(shape, return_index=True)[1]
    often = np.flatnonzero(shape == np.bincount(shape.astype(int)).argmax())[: len(first)]
    for hit, is_cold in ((first, True), (often, False)):
        steps = steps_of(4)
        steps.columns["end_ns"][hit] += 1e9
        slow = step_times.slow(Steps("r", steps.columns), formula)
        assert set(hit.tolist()) == set(np.flatnonzero(slow).tolist())
        assert (step_times.cold(steps, slow) < step_times.COLD_P) == is_cold
