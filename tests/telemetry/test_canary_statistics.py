"""What canaries can tell: false alarms and detection over thousands of simulated runs, power, drift, population
shifts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from telemetry import drift, outcomes, paired, population, sequential, slo
from telemetry.canary_estimate import estimate
from telemetry.distributions import lower_bound, upper_bound
from telemetry.drift import BROKEN, NUMERIC, SAME, Position
from telemetry.population import Sample
from tests.bundles import answered_row, dropped_row
from tests.telemetry.test_summary import bundle_of

# --- W1: the sequential test ---

RUNS = 2000


def simulated(wrong: float, canaries: int, seed: int, runs: int = RUNS) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.random.default_rng(seed).random((runs, canaries)) < wrong


@pytest.mark.parametrize("seed", range(3))
def test_false_alarms_over_2000_healthy_runs_of_1000_canaries(seed: int) -> None:
    """At a flake rate of 0.1 % the upper 95 % bound of the false alarms has to stay at or below 1.5 %."""
    alarms = sequential.alarms(simulated(0.001, 1000, seed))
    count = int((alarms >= 0).sum())
    print(f"{count} of {RUNS} healthy runs alarm, upper 95 % bound {100 * upper_bound(count, RUNS):.2f} %")
    assert upper_bound(count, RUNS) <= 0.015


@pytest.mark.parametrize("seed", range(3))
def test_5_percent_wrong_are_found_within_150_canaries(seed: int) -> None:
    alarms = sequential.alarms(np.pad(simulated(0.05, 150, seed + 10), ((0, 0), (0, 850))))
    found = int(((alarms >= 0) & (alarms <= 150)).sum())
    print(f"{found} of {RUNS} found, lower 95 % bound {100 * lower_bound(found, RUNS):.1f} %")
    assert lower_bound(found, RUNS) >= 0.95


def test_a_server_that_turns_bad_in_the_middle_is_found_too() -> None:
    results = np.concatenate([simulated(0.001, 500, 20), simulated(0.10, 500, 21)], axis=1)
    alarms = sequential.alarms(results)
    assert ((alarms > 500) & (alarms <= 700)).mean() >= 0.95


def test_one_run_at_a_time_is_the_same_test() -> None:
    results = simulated(0.02, 1000, 30, runs=40)
    for row, expected in zip(results, sequential.alarms(results), strict=True):
        watch = sequential.Watch()
        for wrong in row:
            watch.see(bool(wrong))
        assert watch.alarm_at == (None if expected < 0 else expected)
        assert (watch.p_value <= sequential.ALPHA) == (expected >= 0)
        assert watch.seen == 1000 and watch.wrong == row.sum()


def test_the_stake_is_fair_under_the_flake_rate() -> None:
    """The mean of an e-process never exceeds 1; beyond the horizon it goes on as it was."""
    results = simulated(0.001, 1200, 40)
    final = []
    for row in results[:300]:
        watch = sequential.Watch(horizon=400)
        for wrong in row:
            watch.see(bool(wrong))
        final.append(watch.stake)
        assert watch.stake >= 0
    assert np.mean(final) < 1.5


def test_a_result_says_what_it_could_have_seen() -> None:
    watch = sequential.Watch()
    assert "could have seen nothing" in watch.sentence()
    for _ in range(124):
        watch.see(False)
    assert (
        watch.sentence()
        == "0 of 124 canaries wrong, no alarm; a share of 5 % wrong would have shown three or more with 95 %"
    )
    for _ in range(4):
        watch.see(True)
    assert "alarm at canary" in watch.sentence()
    with pytest.raises(ValueError, match="flake rate"):
        sequential.Watch(flake_rate=0.5)


def test_stable_canaries_are_worth_more_than_many() -> None:
    stable, flaky = (sequential.canaries_against_flakes(0.02, rate) for rate in (0.001, 0.01))
    assert stable.canaries < 400 < 1200 < flaky.canaries
    rng = np.random.default_rng(3)
    for plan, rate in ((stable, 0.001), (flaky, 0.01)):
        wrong = rng.binomial(plan.canaries, [[rate], [0.02]], (2, 4000))
        assert (wrong[0] > plan.limit).mean() <= 0.06
        assert (wrong[1] > plan.limit).mean() >= 0.94
    with pytest.raises(ValueError, match="above the flake rate"):
        sequential.canaries_against_flakes(0.001, 0.01)


# --- W3: McNemar ---


def test_mcnemar_by_hand() -> None:
    before = {f"q{i}": True for i in range(20)} | {"only before": True}
    after = {f"q{i}": i >= 8 for i in range(20)}
    found = paired.compare(before, after)
    assert (found.questions, found.before, found.after, found.lost, found.won) == (20, 20, 12, 8, 0)
    assert found.p_value == pytest.approx(2**-8) and found.worse
    assert found.could_see == 7 == paired.least_lost()
    same = paired.compare(before, {f"q{i}": True for i in range(20)})
    assert same.p_value == 1 and not same.worse and "7 lost with none won" in same.sentence
    better = paired.compare(after, before)
    assert not better.worse and better.won == 8
    with pytest.raises(ValueError, match="share no question"):
        paired.compare({"a": True}, {"b": True})


def test_mcnemar_keeps_its_level_and_has_the_power_it_states() -> None:
    rng = np.random.default_rng(8)
    alarms = {0.0: 0, 0.15: 0}
    for lost_share in alarms:
        for _ in range(1000):
            kind = rng.random(120)
            before = {str(i): bool(kind[i] < 0.6) for i in range(120)}
            noise = rng.random(120) < 0.04  # an answer that flips for no reason, either way
            loses = rng.random(120) < lost_share
            after = {
                str(i): (not before[str(i)] if noise[i] else before[str(i)]) and not (loses[i] and before[str(i)])
                for i in range(120)
            }
            alarms[lost_share] += paired.compare(before, after).worse
    assert upper_bound(alarms[0.0], 1000) <= 0.02
    stated = paired.power(120, lost_share=0.6 * (0.04 + 0.15 * 0.96), won_share=0.4 * 0.04)
    assert alarms[0.15] / 1000 == pytest.approx(stated, abs=0.05)
    assert paired.power(120, 0.0) == 0.0 and paired.power(120, 0.2) > 0.99


# --- W2: drift ---


def recording(
    seed: int, noise: float, positions: int = 400, vocabulary: int = 60, other: bool = False
) -> list[Position]:
    """The same text under the same model, its logits disturbed; other: another model altogether."""
    base = np.random.default_rng(1).normal(0, 3, (positions, vocabulary))
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, 3, base.shape) if other else base) + rng.normal(0, noise, base.shape)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    truth = base.argmax(axis=1)
    made = []
    for row, actual in zip(logp, truth, strict=True):
        top = np.argsort(-row)[:20]
        made.append(Position({str(token): float(row[token]) for token in top}, float(row[actual])))
    return made


def test_the_same_build_is_the_same_and_fewer_bits_are_drift_not_broken() -> None:
    trusted = recording(2, 0.001)
    spread = [drift.measure(trusted, recording(seed, 0.001)) for seed in range(3, 8)]
    for seed in range(10, 15):
        assert drift.judge(drift.measure(trusted, recording(seed, 0.001)), spread) == SAME
        fewer_bits = drift.measure(trusted, recording(seed, 0.3))
        assert drift.judge(fewer_bits, spread) == NUMERIC
        assert 0.8 < fewer_bits.agreement < 1 and fewer_bits.kl < 0.2
        assert drift.judge(drift.measure(trusted, recording(seed, 0.0, other=True)), spread) == BROKEN


def test_kl_is_a_lower_bound_and_exact_where_all_is_named() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = (rng.dirichlet(np.ones(8)) for _ in range(2))
        true = float(np.sum(p * np.log(p / q)))
        whole = [{str(i): math.log(side[i]) for i in range(8)} for side in (p, q)]
        assert drift.kl_divergence(whole[0], whole[1]) == pytest.approx(true, rel=1e-6)
        part = [{str(i): math.log(side[i]) for i in np.argsort(-side)[:4]} for side in (p, q)]
        assert 0 <= drift.kl_divergence(part[0], part[1]) <= true + 1e-9
    assert drift.kl_divergence({"a": 0.0}, {"a": 0.0}) == 0.0


def test_perplexity_alone_can_break_it() -> None:
    before = [Position({"a": math.log(0.9), "b": math.log(0.05)}, math.log(0.9))] * 50
    after = [Position({"a": math.log(0.9), "b": math.log(0.05)}, math.log(0.3))] * 50
    found = drift.measure(before, after)
    assert found.kl == 0 and found.agreement == 1 and found.perplexity_after == pytest.approx(1 / 0.3)
    assert drift.judge(found) == BROKEN
    with pytest.raises(ValueError, match="not of one text"):
        drift.measure(before, after[:-1])


# --- W4: population shifts ---


def sample(
    seed: int, n: int = 300, longer: float = 1.0, cached: float = 0.5, cyrillic: float = 0.02, token: int = 0
) -> Sample:
    rng = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(50)]
    weights = 1 / np.arange(1, 51)
    weights[10] += token / 50
    bags = []
    for _ in range(n):
        tilt = weights * rng.gamma(1.0, 1.0, 50)  # requests have topics: tokens of one are not independent
        bags.append({w: int(c) for w, c in zip(words, rng.multinomial(80, tilt / tilt.sum()), strict=True) if c})
    return Sample(
        numbers={
            "input tokens": (rng.lognormal(5, 0.8, n) * longer).round().tolist(),
            "output tokens": rng.lognormal(4, 0.7, n).round().tolist(),
            "cached share": (rng.random(n) < cached).astype(float).tolist(),
        },
        categories={
            "finish": rng.choice(["stop", "length"], n, p=[0.8, 0.2]).tolist(),
            "script": rng.choice(["LATIN", "CYRILLIC", "CJK"], n, p=[0.97 - cyrillic, 0.03, cyrillic]).tolist(),
        },
        bags={"tokens": bags},
    )


def suspicious(before: Sample, after: Sample) -> set[str]:
    return {one.feature for one in population.compare(before, after) if one.suspicious}


def test_two_runs_of_the_same_population_raise_little_suspicion() -> None:
    alarms = sum(bool(suspicious(sample(seed), sample(seed + 1000))) for seed in range(40))
    assert upper_bound(alarms, 40, 0.95) <= 0.2  # at most one in twenty, as far as forty pairs can tell


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"longer": 1.5}, "input tokens"),
        ({"cached": 0.1}, "cached share"),
        ({"cyrillic": 0.15}, "script"),
        ({"token": 30}, "tokens"),
    ],
)
def test_shifts_of_inputs_are_seen_by_their_name(change: dict[str, Any], feature: str) -> None:
    for seed in range(5):
        assert suspicious(sample(seed), sample(seed + 50, **change)) == {feature}


def test_what_is_too_small_or_too_slight_is_left_alone() -> None:
    assert population.compare(sample(1, n=20), sample(2, n=20)) == []
    huge_a, huge_b = (
        Sample({"x": np.random.default_rng(s).normal(0.02 * s, 1, 200_000).tolist()}, {}, {}) for s in (0, 1)
    )
    found = population.compare(huge_a, huge_b)[0]
    assert found.p_value < 1e-4 and not found.suspicious  # certain, and too little to mean anything


def test_scripts_are_read_from_letters() -> None:
    assert population.scripts("Hello, мир! 世界 12") == {"LATIN": 5, "CYRILLIC": 3, "CJK": 2}
    assert population.scripts("1 2 3 …") == {}


# --- the estimate in a run ---


def test_checked_answers_give_an_estimate_and_verify(tmp_path: Any) -> None:
    import pyarrow as pa

    rows = [answered_row(i, i * 0.1, **({"canary_kind": "golden"} if i < 100 else {})) for i in range(150)]
    rows[3] |= dropped_row(3, canary_kind="golden")
    bundle = bundle_of(tmp_path, rows)
    policy = slo.load("demo")
    table = bundle.table("requests")
    assert estimate(table, bundle.verdicts(policy)) is None
    found = [{"index": i, "check": "golden", "passed": i != 7} for i in range(100)]
    bundle.add_checks("golden", pa.Table.from_pylist(found, schema=outcomes.CHECKS))
    verdicts = bundle.verdicts(policy)
    seen = estimate(table, verdicts)
    assert seen is not None and (seen.checked, seen.wrong) == (99, 1)
    assert seen.low < 1 / 99 < seen.high and seen.could_see == pytest.approx(0.062, abs=0.002)
    by_index = {row["index"]: row for row in verdicts.to_pylist()}
    assert (by_index[7]["label"], by_index[7]["reason"], by_index[7]["correct"]) == ("wrong", "golden", "no")
    assert by_index[8]["verified"] and by_index[8]["correct"] == "yes" and not by_index[120]["verified"]
    assert by_index[3]["label"] == "dropped" and not by_index[3]["verified"]
    with pytest.raises(ValueError, match=r"outcomes\.CHECKS"):
        bundle.add_checks("Golden!", pa.Table.from_pylist(found, schema=outcomes.CHECKS))


def test_the_sample_of_a_run_leaves_out_canaries_errors_and_texts_of_wrong_answers_alone(tmp_path: Any) -> None:
    rows = [answered_row(i, i * 0.1, cached_tokens=50) for i in range(40)]
    rows += [answered_row(40, canary_kind="golden", prompt_tokens_reported=9), dropped_row(41)]
    rows[0] |= {"prompt_tokens_reported": None, "cached_tokens": None}
    table = bundle_of(tmp_path, rows).table("requests", population.SAMPLE_COLUMNS)  # texts are dropped by the default
    found = population.sample_of(table)
    assert found.numbers["prompt tokens"] == [100.0] * 40 and found.numbers["cached share"] == [0.5] * 39
    assert found.categories == {"finish reason": ["length"] * 40, "model name": ["toy"] * 40} and found.bags == {}
    kept = table.set_column(table.column_names.index("text"), "text", [["Привет, world"] * 42])
    assert population.sample_of(kept).bags["scripts of the answers"][0] == {"CYRILLIC": 6, "LATIN": 5}
    sketched = [{**row, "input_sketch": [3, 0, 9], "input_script": "LATIN", "fingerprint": "fp"} for row in rows]
    more = population.sample_of(bundle_of(tmp_path, sketched).table("requests", population.SAMPLE_COLUMNS))
    assert more.bags["bytes of the prompts"] == [{"0": 3, "2": 9}] * 40
    assert more.categories["script of the prompts"] == ["LATIN"] * 40 and len(more.categories["fingerprint"]) == 40
    assert population.compare(found, found) == population.compare(found, found)
    assert not any(one.suspicious for one in population.compare(found, found))


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"input_sketch": [9, 1, 1]}, "bytes of the prompts"),
        ({"output_sketch": [9, 1, 1]}, "tokens of the answers"),
        ({"input_script": "CYRILLIC"}, "script of the prompts"),
        ({"output_script": "CJK"}, "script of the answers"),
        ({"fingerprint": "fp_2"}, "fingerprint"),
        ({"prompt_tokens_reported": 130}, "prompt tokens"),
    ],
)
def test_what_moved_between_two_runs_is_named(tmp_path: Any, changes: dict[str, Any], feature: str) -> None:
    plain = {
        "input_sketch": [4, 4, 3], "output_sketch": [4, 3, 4], "input_script": "LATIN", "output_script": "LATIN",
        "fingerprint": "fp_1",
    }  # fmt: skip

    def sampled(more: dict[str, Any]) -> Sample:
        rows = [answered_row(i, i * 0.1, **{**plain, **(more if i % 3 else {})}) for i in range(60)]
        return population.sample_of(bundle_of(tmp_path, rows).table("requests", population.SAMPLE_COLUMNS))

    assert {one.feature for one in population.compare(sampled({}), sampled(changes)) if one.suspicious} == {feature}
