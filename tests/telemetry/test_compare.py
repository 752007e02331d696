"""Comparing two sides: the test for many figures, refusals, the approximate mode, groups and change points."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tailspan
from models.errors import UserError
from telemetry import names
from telemetry.bundle import Bundle
from telemetry.compare import (
    FIGURES,
    Facts,
    Window,
    blocks,
    compare,
    compare_facts,
    compare_windows,
    history,
    max_t,
    resolve_sides,
)
from telemetry.compare.change_points import change_points
from telemetry.compare.figures import Figure, values
from telemetry.compare.refusals import (
    NOT_VALID,
    OTHER_LOAD,
    SAME_RUN,
    TOO_FEW_PAIRS,
    TOO_FEW_REQUESTS,
    UNEQUAL_SIDES,
)
from telemetry.compare.result import BETTER, BLOCKS, PAIRED, SAME, STUDENT, UNTESTED, WORSE
from telemetry.compare.sides import write_group
from telemetry.compare.text import markdown
from tests.bundles import make_bundle

GOOD, DROPPED = names.LABELS.index(names.GOOD), names.LABELS.index(names.DROPPED)


def facts(seed: int, n: int = 800, slower: float = 1.0, dropped: int = 0, run: str = "") -> Facts:
    """A replay whose load is always the same; its times carry the noise of the seed."""
    load = np.random.default_rng(0)
    intended = np.sort(load.uniform(0, 100, n))
    work = load.gamma(2.0, 0.1, n)
    rng = np.random.default_rng(1000 + seed)
    level = slower * math.exp(rng.normal(0, 0.03))
    ttft = work * level * np.exp(rng.normal(0, 0.05, n))
    label = np.full(n, GOOD, dtype=np.int8)
    label[np.arange(dropped) * n // max(1, dropped)] = DROPPED
    times = {"ttft": ttft, "e2e": 3 * ttft, "tpot": 0.02 * level * np.exp(rng.normal(0, 0.05, n))}
    for one in times.values():
        one[label == DROPPED] = np.inf
    index = np.arange(n)
    return Facts(run or f"r{seed}", index, intended, np.full(n, 10), np.full(n, 5), label, times, 100.0)


def sides(pairs: int, slower: float = 1.0, dropped: int = 0) -> tuple[list[Facts], list[Facts]]:
    a = [facts(2 * k) for k in range(pairs)]
    return a, [facts(2 * k + 1, slower=slower, dropped=dropped) for k in range(pairs)]


# --- the test ---


def test_the_flips_are_all_exchanges_up_to_the_sign_of_all() -> None:
    six = max_t.flips(6)
    assert six.shape == (32, 6) and (six[0] == 1).all() and (six[:, 0] == 1).all()
    assert len({tuple(row) for row in six}) == 32
    assert max_t.flips(20).shape == (4096, 20)


def test_the_p_value_is_the_share_of_exchanges_that_look_as_extreme() -> None:
    rng = np.random.default_rng(3)
    d = rng.normal(0.2, 1.0, (7, 3))
    found = max_t.test(d, 0.05)
    t = np.abs(d.mean(axis=0)) / d.std(axis=0, ddof=1)
    at_least = np.zeros(3)
    for bits in range(2**7):  # slowly, one exchange at a time
        signs = np.array([1.0 if bits >> k & 1 else -1.0 for k in range(7)])
        flipped = d * signs[:, None]
        largest = (np.abs(flipped.mean(axis=0)) / flipped.std(axis=0, ddof=1)).max()
        at_least += largest >= t - 1e-9
    assert found.p == pytest.approx(at_least / 2**7)


@pytest.mark.parametrize("pairs", [6, 7, 9])
def test_false_alarms_over_all_figures_stay_below_the_level(pairs: int) -> None:
    """With heavy tails and correlated figures; the bound is exact, up to the noise of 800 draws."""
    rng = np.random.default_rng(pairs)
    alarms = 0
    for _ in range(800):
        shared = rng.standard_t(2, (pairs, 1))
        d = 0.7 * shared + 0.3 * rng.standard_t(2, (pairs, 9))
        found = max_t.test(d, 0.05)
        alarms += bool(((found.low > 0) | (found.high < 0)).any())
    assert alarms <= 0.05 * 800 + 3 * math.sqrt(800 * 0.05 * 0.95)


def test_an_interval_that_leaves_out_zero_implies_that_the_test_rejects() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        d = rng.normal(rng.normal(0, 1), 1.0, (int(rng.integers(6, 12)), 4))
        found = max_t.test(d, 0.05)
        outside = (found.low > 0) | (found.high < 0)
        assert (found.p[outside] <= 0.05).all()


def test_five_pairs_cannot_be_tested_exactly_and_the_result_says_so() -> None:
    assert max_t.least_p(5) == 0.0625
    found = compare_facts(*sides(5, slower=1.5))
    assert found.method == STUDENT and any("cannot go below p = 0.062" in note for note in found.notes)
    assert found.of("ttft p50").verdict == WORSE  # a large change is seen all the same
    assert compare_facts(*sides(6, slower=1.5)).method == PAIRED


def test_with_too_few_pairs_for_an_interval_none_is_printed() -> None:
    assert [max_t.pairs_to_bound(0.05, figures) for figures in (1, 6, 12)] == [2, 3, 3]
    assert max_t.pairs_to_bound(0.0005, 12) == 5
    needed = max_t.pairs_to_bound(0.05, len(FIGURES))
    for pairs in (2, 3, 6):
        found = compare_facts(*sides(pairs))
        for one in found.effects:
            assert one.verdict == SAME and (one.low is None) == (one.high is None) == (pairs < needed)
            assert one.bound_from == (needed if pairs < needed else None)
        said = f"too few pairs for an interval ({needed} needed)"
        assert markdown(found).count(said) == (len(found.effects) if pairs < needed else 0)
    # A change that two pairs do show keeps its interval.
    a, b = sides(2, slower=3.0)
    same = [replace(one, times=a[0].times) for one in a], [replace(one, times=b[0].times) for one in b]
    changed = [one for one in compare_facts(*same).effects if one.verdict == WORSE]
    assert changed and all(one.low is not None and one.low > 0 and one.bound_from is None for one in changed)


def test_differences_without_any_spread_do_no_harm() -> None:
    same, moved = max_t.test(np.zeros((6, 2)), 0.05), max_t.test(np.full((6, 2), 0.3), 0.05)
    assert (same.p == 1).all() and (same.low == 0).all()
    assert moved.p == pytest.approx([1 / 32] * 2) and (moved.low == 0.3).all()


def test_pairs_needed_grow_with_the_noise_and_shrink_with_the_effect() -> None:
    def needed(spread: float, effect: float) -> int:
        found = max_t.pairs_needed(spread, effect, 0.95, 0.01)
        assert found is not None
        return found

    assert needed(0.0, 0.1) == 6 and needed(0.02, 0.1) <= needed(0.1, 0.1) < needed(0.2, 0.1)
    assert needed(0.1, 0.2) < needed(0.1, 0.1)
    assert max_t.pairs_needed(10.0, 0.01, 0.95, 0.01) is None
    # the formula of the normal case: (z + z')^2 (s / d)^2, Student's t adds a few
    plain = (2.576 + 1.645) ** 2 * 4
    assert plain <= needed(0.2, 0.1) <= plain + 8


# --- effects ---


def test_a_slowdown_is_found_in_every_time_and_exchanging_the_sides_turns_it_round() -> None:
    a, b = sides(8, slower=1.2)
    there, back = compare_facts(a, b), compare_facts(b, a)
    for name in ("ttft p50", "ttft p90", "e2e p99", "tpot p50"):
        one, two = there.of(name), back.of(name)
        assert one.verdict == WORSE and two.verdict == BETTER
        assert one.change is not None and two.change is not None and one.low is not None and one.high is not None
        assert one.low < 0.2 < one.high + 0.05
        assert (1 + one.change) * (1 + two.change) == pytest.approx(1.0)
    assert there.exit_code == names.EXIT_REGRESSION and back.exit_code == names.EXIT_OK
    assert there.worse[0].figure in there.sentence


def test_nothing_changed_is_no_regression() -> None:
    found = compare_facts(*sides(8))
    assert not found.changed and found.exit_code == names.EXIT_OK and found.needed is not None
    assert "No significant change" in found.sentence


def test_a_change_below_the_tolerance_is_none_however_certain() -> None:
    a = [facts(0, run=f"a{k}") for k in range(6)]
    b = [facts(0, slower=1.01, run=f"b{k}") for k in range(6)]
    assert compare_facts(a, b).of("ttft p50").verdict == SAME
    assert compare_facts(a, b, tolerance=0.005).of("ttft p50").verdict == WORSE


def test_dropped_requests_count_as_infinitely_slow() -> None:
    a, b = sides(6, dropped=24)  # 3 % dropped: p99 is unbounded on side B
    found = compare_facts(a, b)
    assert found.of("dropped").verdict == WORSE and found.of("dropped").b == pytest.approx(0.03, abs=0.002)
    p99 = found.of("e2e p99")
    assert p99.verdict == WORSE and p99.b is None and p99.change is None and "unbounded" in (p99.note or "")
    assert found.to_dict() and "now unbounded" in markdown(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_percentiles_that_too_few_requests_certify_are_not_compared() -> None:
    a = [facts(2 * k, n=200) for k in range(6)]
    b = [facts(2 * k + 1, n=200, slower=2.0) for k in range(6)]
    found = compare_facts(a, b)
    assert found.of("ttft p99").verdict == UNTESTED and found.of("ttft p90").verdict == WORSE
    short = [one for one in found.refusals if one.kind == TOO_FEW_REQUESTS]
    assert len(short) == 1 and not short[0].whole and "662" in short[0].remedy


def test_the_warm_up_has_no_part_in_it() -> None:
    a, b = sides(6)
    cold = [replace(one, times={k: np.where(one.intended_s < 10, 9.0, v) for k, v in one.times.items()}) for one in b]
    assert compare_facts(a, cold, warm_up=0.0).of("ttft p90").verdict == WORSE
    assert not compare_facts(a, cold, warm_up=0.1).changed


def test_the_figures_are_those_of_the_statistics() -> None:
    from telemetry import stats

    one = facts(1, dropped=10)
    found, counts = values(one)
    for at, figure in enumerate(FIGURES):
        if figure.p is None:
            assert found[at] == (one.label == names.LABELS.index(figure.measure)).mean()
        else:
            times = one.times[figure.measure]
            finite = times[np.isfinite(times)]
            wanted = stats.percentile(finite, figure.p, len(times) - len(finite))
            assert (None if math.isinf(found[at]) else found[at]) == wanted.value and counts[at] == wanted.n


# --- refusals ---


def refusal_kinds(a: Sequence[Facts], b: Sequence[Facts], exit_code: int) -> set[str]:
    found = compare_facts(a, b)
    assert found.refused and not found.effects and found.exit_code == exit_code
    assert all(one.remedy for one in found.refusals) and "Cannot tell" in found.sentence
    return {one.kind for one in found.refusals}


def test_what_cannot_be_compared_is_refused_with_what_would_be_needed() -> None:
    a, b = sides(6)
    assert refusal_kinds([], b, 4) == {TOO_FEW_PAIRS}
    assert refusal_kinds(a, b[:5], 4) == {UNEQUAL_SIDES}
    assert refusal_kinds(a, [*b[:5], a[0]], 4) == {SAME_RUN}
    limited = replace(b[2], valid=False, reasons=("lag p99 40.0 ms > 5.0 ms",))
    assert refusal_kinds(a, [*b[:2], limited, *b[3:]], 3) == {NOT_VALID}
    later = replace(b[0], intended_s=b[0].intended_s / 1.5)
    longer = replace(b[0], input_tokens=2 * b[0].input_tokens)
    answers = replace(b[0], output_tokens=b[0].output_tokens + 1)
    other_trace = [replace(one, load={"trace": x}) for one, x in ((a[0], "aa"), (b[0], "bb"))]
    other_seed = [replace(one, load={"seed": x}) for one, x in ((a[0], 1), (b[0], 2))]
    for one, two, why in (
        (a[0], later, "arrival times"), (a[0], longer, "prompt lengths"), (a[0], answers, "answer lengths"),
        (*other_trace, "another trace"), (*other_seed, "other prompts"), (a[0], facts(1, n=700), "700 requests"),
    ):  # fmt: skip
        assert refusal_kinds([one, *a[1:]], [two, *b[1:]], 4) == {OTHER_LOAD}
        assert why in compare_facts([one, *a[1:]], [two, *b[1:]]).refusals[0].message
    asked = compare_facts(a, [later, *b[1:]], same_load=False)
    assert not asked.refused and not asked.same_load and any("may be the load's" in note for note in asked.notes)


def test_options_out_of_range_are_named() -> None:
    a, b = sides(2)
    with pytest.raises(UserError, match="--alpha"):
        compare_facts(a, b, alpha=0.9)
    with pytest.raises(UserError, match="--warm-up"):
        compare_facts(a, b, warm_up=-0.1)


# --- without repeats ---


def test_a_single_pair_is_approximate_and_sees_a_large_change() -> None:
    found = compare_facts([facts(0)], [facts(1, slower=1.6)])
    assert found.method == BLOCKS and found.approximate and found.of("ttft p50").verdict == WORSE
    assert any("APPROXIMATE" in note for note in found.notes)
    assert not compare_facts([facts(2)], [facts(2, run="again")]).changed


def test_drawn_percentiles_are_those_of_the_drawn_requests() -> None:
    rng = np.random.default_rng(9)
    times, ids = rng.gamma(2, 1, 997), np.sort(rng.integers(0, blocks.BLOCKS, 997))
    weights = rng.multinomial(blocks.BLOCKS, [0.1] * 10, 20).astype(float)
    found = blocks._quantiles(times, ids, weights, [50.0, 90.0, 99.0])
    for row, w in zip(found, weights, strict=True):
        drawn = np.sort(np.concatenate([times[ids == k] for k in range(10) for _ in range(int(w[k]))]))
        for value, p in zip(row, (50.0, 90.0, 99.0), strict=True):
            assert value == drawn[max(1, math.ceil(p * len(drawn) / 100 - 1e-9)) - 1]


def test_windows_of_one_run(tmp_path: Path) -> None:
    quiet, loaded = make_bundle(tmp_path, 400, 1), make_bundle(tmp_path, 400, 1, overload=True)
    found = compare_windows(Window(quiet, 0, 30), Window(quiet, 30, 60))
    assert found.approximate and found.warm_up == 0 and not found.worse
    assert compare_windows(Window(quiet, 0, 60), Window(loaded, 10, 20)).of("e2e p50").verdict == WORSE
    with pytest.raises(UserError, match="overlap"):
        compare_windows(Window(quiet, 0, 30), Window(quiet, 20, 60))
    few = compare_windows(Window(quiet, 0, 5), Window(quiet, 30, 60))
    assert not few.effects and few.refusals[0].kind == TOO_FEW_REQUESTS


# --- bundles, groups, history ---


def copied(bundle: Bundle, name: str) -> str:
    """The same run under another id."""
    path = Path(shutil.copytree(bundle.path, bundle.path.parent / name))
    Bundle.open(path).update(run_id=name)
    return name


def test_bundles_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [make_bundle(tmp_path, 150, 4, overload=overload) for overload in (False, True)]
    ids = [copied(kinds[k % 2], f"run-{k}") for k in range(12)]
    left, right = ",".join(ids[::2]), ",".join(ids[1::2])
    root = ["--root", str(tmp_path)]
    assert tailspan.main(["compare", left, right, *root]) == 4  # the overload is another load
    assert "other arrival times" in capsys.readouterr().out
    assert tailspan.main(["compare", left, right, "--any-load", "--json", *root]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == PAIRED and len(found["a"]) == 6 and not found["same_load"]
    write_group("night", ids[::2], ids[1::2], tmp_path)
    a, b = resolve_sides("night", None, tmp_path)
    assert [one.run_id for one in a] == ids[::2] and [one.run_id for one in b] == ids[1::2]
    assert [one.run_id for one in resolve_sides("night:A", "night:B", tmp_path)[1]] == ids[1::2]
    out = tmp_path / "pr.md"
    assert tailspan.main(["compare", "night", "--any-load", "--markdown", str(out), *root]) == 2
    assert "| figure | A | B |" in out.read_text()
    with pytest.raises(UserError, match="two sides"):
        resolve_sides("night", ids[0], tmp_path)
    with pytest.raises(UserError, match="groups: night"):
        resolve_sides(ids[0], None, tmp_path)
    assert tailspan.main(["compare", ids[0], "--window", "0:30,30:60", *root]) == 3  # 75 requests a window
    assert "at least 100 requests each" in " ".join(capsys.readouterr().out.split())
    for wrong in ("0:30", "0:x,1:2"):
        assert tailspan.main(["compare", ids[0], "--window", wrong, *root]) == 4


def test_a_bundle_becomes_facts_without_invalid_requests_and_canaries(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, 300, 2)
    found = Facts.of(bundle)
    assert len(found) == 300 and found.valid and np.isinf(found.times["ttft"]).sum() == 3
    limited = make_bundle(tmp_path, 300, 2)
    limited.update(generator={"cpu_ratio": 0.97, "loop_lag_p99_s": 0.0006})
    assert not Facts.of(limited).valid and compare([bundle], [limited]).exit_code == names.EXIT_RUN_NOT_VALID


def test_since_when() -> None:
    rng = np.random.default_rng(6)
    table = np.tile(np.exp(rng.normal(0, 0.03, (14, 1))), (1, len(FIGURES)))
    table[:, [at for at, one in enumerate(FIGURES) if one.p is None]] = 0.0
    counts = np.full(len(FIGURES), 1000)
    runs = [f"run{k}" for k in range(14)]
    assert change_points(runs, table, counts) == []
    table[9:, 0] *= 1.4
    (found,) = change_points(runs, table, counts)
    assert found.run == "run9" and found.figure == "ttft p50" and 0.3 < found.change < 0.5 and found.p <= 0.05
    assert found.figures == ("ttft p50",)


def test_few_runs_have_no_history(tmp_path: Path) -> None:
    one = make_bundle(tmp_path, 20, 4)
    with pytest.raises(UserError, match="8 are needed"):
        history([one] * 7)


def test_a_figure_has_a_name() -> None:
    assert [one.name for one in FIGURES[:3]] == ["ttft p50", "ttft p90", "ttft p99"]
    assert Figure("dropped").name == "dropped" and Figure("ttft", 99.0).needed == 662
