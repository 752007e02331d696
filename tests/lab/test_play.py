"""Trials in virtual time: the real engine in virtual time, real bundles, and nothing in them that tells the fault."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.replay import TWIN
from loadgen.lab import wire
from loadgen.lab.changes import BEFORE, CHANGES, apply
from loadgen.lab.play import Played, change_draw, play
from loadgen.lab.scenario import find
from loadgen.lab.sides import _healthy
from loadgen.lab.trial import record, virtual
from loadgen.lab.world import Wire, World, base
from telemetry import names, slo
from telemetry.check import check
from telemetry.summary import summarize

SEED, LOAD, REQUESTS = 3, 0.7, 80


@lru_cache(maxsize=1)
def healthy() -> World:
    return base(TWIN, SEED, LOAD, REQUESTS)


@lru_cache(maxsize=32)
def played(change: str, size: float) -> tuple[World, World, Played, Played]:
    """Both sides of a change."""
    world = BEFORE[change](healthy()) if change in BEFORE else healthy()
    faulty = apply(world, change, size, change_draw(SEED))
    return world, faulty, play(TWIN, world, 1, SEED), play(TWIN, faulty, 2, SEED)


def column(one: Played, name: str) -> Any:
    values = one.tables["requests"].column(name).to_pylist()
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def reasons(one: Played) -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for reason in one.tables["requests"].column("error").to_pylist():
        found[reason] = found.get(reason, 0) + 1
    return found


def test_the_same_seed_gives_the_same_trial() -> None:
    again = play(TWIN, healthy(), 1, SEED)
    assert again.tables["requests"].equals(played("nothing", 1.0)[2].tables["requests"])


def test_both_sides_get_the_same_requests_and_other_noise() -> None:
    _, _, a, b = played("nothing", 1.0)
    for name in ("intended_s", "input_tokens", "expected_output_tokens"):
        assert (column(a, name) == column(b, name)).all()
    assert not (column(a, "end_s") == column(b, "end_s")).all()
    assert abs(np.log(column(b, "server_duration_s").mean() / column(a, "server_duration_s").mean())) < 0.05


def test_the_load_is_the_share_of_capacity_that_was_asked() -> None:
    world = healthy()
    rate = len(world.load) / world.load.at_s[-1]
    assert rate == pytest.approx(LOAD * world.notes["capacity"], rel=1e-6)


@pytest.mark.parametrize("before", ["", *BEFORE])
@pytest.mark.parametrize("seed", [3, 201, 205])
def test_the_healthy_side_of_every_scenario_carries_its_load(before: str, seed: int) -> None:
    world = _healthy(TWIN, seed, 0.8, 160, before)
    side = play(TWIN, world, 1, seed)
    assert reasons(side) == {None: 160}
    took = column(side, "end_s") - column(side, "intended_s")
    late, early = took[-60:], took[:60]
    assert np.median(late) < 4 * np.median(early), "no queue that grows without end"


def mean_rise(change: str, size: float, name: str) -> float:
    _, _, a, b = played(change, size)
    return float(np.nanmean(column(b, name)) / np.nanmean(column(a, name)))


def test_engine_speed_lengthens_every_step() -> None:
    _, _, a, b = played("engine_speed", 1.5)
    steps = [
        np.array(one.tables["steps"].column("end_ns")) - np.array(one.tables["steps"].column("start_ns"))
        for one in (a, b)
    ]
    assert np.median(steps[1]) / np.median(steps[0]) > 1.3


def test_a_smaller_pool_preempts_or_makes_wait_and_a_stall_stands_in_the_gaps() -> None:
    _, faulty, a, b = played("kv_pool", 0.35)
    assert faulty.setting.kv_blocks is not None
    assert np.max(np.array(b.tables["steps"].column("kv_used"))) <= faulty.setting.kv_blocks
    assert np.nanmean(column(b, "server_duration_s")) > np.nanmean(column(a, "server_duration_s"))
    _, _, a, b = played("host_stall", 0.3)
    assert np.max(np.array(b.tables["steps"].column("gap_ns"))) >= 0.29e9
    assert np.max(np.array(a.tables["steps"].column("gap_ns"))) == 0
    assert np.nansum(column(b, "phase_stall_s")) > 1


def test_cache_misses_are_fewer_cached_tokens_of_the_same_prompts() -> None:
    _, _, a, b = played("cache_misses", 1.0)
    assert np.nansum(column(a, "cached_tokens")) > 0 == np.nansum(column(b, "cached_tokens"))


def test_a_cold_start_is_long_steps_not_gaps() -> None:
    _, faulty, a, b = played("cold_start", 1.0)
    longest = [
        np.max(np.array(one.tables["steps"].column("end_ns")) - np.array(one.tables["steps"].column("start_ns")))
        for one in (a, b)
    ]
    assert longest[1] >= 1e9 > longest[0]
    steps = b.tables["steps"].to_pylist()
    slow = [step for step in steps if step["end_ns"] - step["start_ns"] >= 1e9]
    assert all(step["start_ns"] / 1e9 >= faulty.setting.cold_at_s for step in slow)
    assert 2 <= len(slow) <= 60


def test_refusals_have_the_reason_a_client_is_told() -> None:
    _, _, a, b = played("queue_limit", 1.0)
    assert reasons(a) == {None: REQUESTS}
    assert reasons(b).get(names.REJECTED, 0) >= 1
    _, _, a, b = played("kv_pool_too_small", 0.9)
    assert reasons(a) == {None: REQUESTS}
    assert set(reasons(b)) == {None, names.KV_OOM}


def test_nobody_waits_longer_than_a_hung_server_is_worth() -> None:
    _, faulty, _, b = played("hang", 0.5)
    assert set(reasons(b)) <= {None, names.TIMEOUT_FIRST_TOKEN, names.TIMEOUT_TOTAL}
    stay = column(b, "end_s") - column(b, "sent_s")
    assert np.max(stay) == pytest.approx(faulty.timeout_s)
    assert np.nanmax(column(b, "first_token_s")) <= np.max(column(b, "end_s"))
    steps = b.tables["steps"].to_pylist()
    assert steps[-1]["start_ns"] / 1e9 <= np.max(column(b, "end_s"))


def test_retries_follow_failures_of_the_same_run() -> None:
    world, _, a, b = played("retries", 4.0)
    assert world.patience is not None
    assert np.max(column(a, "attempts")) == 1
    attempts = b.tables["attempts"].to_pylist()
    assert len(attempts) == np.sum(column(b, "attempts")) > 1.2 * REQUESTS
    by = {(one["index"], one["attempt"]): one for one in attempts}
    for (index, number), one in by.items():
        if number:
            before = by[(index, number - 1)]
            assert before["error"] in world.patience.retry_on and before["verdict"] == "retried"
            assert one["sent_s"] >= before["end_s"] - 1e-3
            assert one["pause_s"] == pytest.approx(one["sent_s"] - before["end_s"], abs=1e-9)
        assert one["attempt"] <= world.patience.retries
    rows = {row["index"]: row for row in b.tables["requests"].to_pylist()}
    for index, row in rows.items():
        last = by[(index, row["attempts"] - 1)]
        assert last["end_s"] == row["end_s"] and last["error"] == row["error"]


def test_a_stall_with_retries_is_over_while_clients_still_ask() -> None:
    for size in (4.0, 6.0):
        world, faulty, *_ = played("retries", size)
        assert world.patience is not None and world.patience.total_s is not None
        [(at, pause)] = faulty.setting.pauses
        assert at + pause <= world.load.at_s[-1] + world.patience.retries * world.patience.total_s
        assert pause >= 2 * world.patience.total_s


def test_a_starved_client_sends_late_and_the_run_is_not_valid(tmp_path: Path) -> None:
    _, _, a, b = played("client", 1.8)
    assert np.max(column(a, "lag_s")) == 0
    assert np.max(column(b, "lag_s")) > 1
    assert (column(b, "sent_s") >= column(b, "intended_s")).all()
    _, [bundle], _ = record(
        find(["S6"])[0], TWIN, slo.load("chat"), tmp_path, load=LOAD, seed=SEED, pairs=1, requests=80
    )
    assert summarize(bundle, slo.load("chat")).validity.verdict == names.CLIENT_LIMITED


def test_a_wrong_reading_is_counted_in_real_texts() -> None:
    _, _, a, b = played("template", 1.0)
    off = column(b, "prompt_tokens_reported") - column(b, "prompt_tokens_expected")
    assert len(set(off)) <= 3 and np.all(off != 0)  # the template's own tokens, whatever the prompt
    assert (column(a, "prompt_tokens_reported") == column(a, "prompt_tokens_expected")).all()
    _, _, _, b = played("tokenizer", 0.5)
    ratio = column(b, "prompt_tokens_reported") / column(b, "prompt_tokens_expected")
    assert ratio.min() > 1 and np.median(ratio) > 1.02  # more tokens in every text


def test_a_cap_shortens_answers_that_nobody_asked_to_be_short() -> None:
    _, _, _, b = played("output_cap", 0.8)
    reported, asked = column(b, "completion_tokens_reported"), column(b, "expected_output_tokens")
    assert (reported < asked).sum() >= REQUESTS // 3
    assert len(set(reported[reported < asked])) == 1


def test_replicas_are_asked_in_turn_and_one_may_be_slow() -> None:
    _, _, a, b = played("slow_replica", 2.0)
    found: dict[tuple[str, str], list[float]] = {}
    for one, name in ((a, "a"), (b, "b")):
        for row in one.tables["requests"].to_pylist():
            found.setdefault((name, row["replica"]), []).append(row["server_duration_s"])
    assert {replica for _, replica in found} == {"replica-0", "replica-1", "replica-2"}
    rise = {r: np.mean(found[("b", r)]) / np.mean(found[("a", r)]) for r in ("replica-0", "replica-1", "replica-2")}
    assert rise["replica-2"] > 1.6 and rise["replica-0"] < 1.1 and rise["replica-1"] < 1.1
    ids = [row["server_request_id"] for row in b.tables["requests"].to_pylist()]
    assert len(set(ids)) == REQUESTS
    inside = {name for step in b.tables["steps"].to_pylist() for name in step["requests"]}
    assert inside == set(ids)


# --- the wire ---
def test_the_wire_meets_its_share_and_the_same_requests_every_time() -> None:
    met = [wire.hits(5, "cut", index, 0.02) for index in range(20_000)]
    assert 330 <= sum(met) <= 470
    assert met == [wire.hits(5, "cut", index, 0.02) for index in range(20_000)]
    assert met != [wire.hits(6, "cut", index, 0.02) for index in range(20_000)]


def test_a_cut_stream_has_no_finish_reason_and_no_account() -> None:
    row = played("nothing", 1.0)[2].tables["requests"].to_pylist()[5]
    wire.apply((Wire("cut", 1.0, 0.5),), row, 5, 600.0)
    assert row["error"] == names.STREAM_CUT and row["finish_reason"] is None and row["server_duration_s"] is None
    assert row["first_token_s"] < row["end_s"] == row["last_token_s"]


def test_a_longer_way_moves_what_the_client_saw_and_nothing_of_the_server() -> None:
    before = played("nothing", 1.0)[2].tables["requests"].to_pylist()[5]
    row = dict(before)
    wire.apply((Wire("delay", 1.0, 0.25),), row, 5, 600.0)
    for name in ("first_token_s", "last_token_s", "end_s"):
        assert row[name] == pytest.approx(before[name] + 0.25)
    assert row["server_duration_s"] == before["server_duration_s"] and row["sent_s"] == before["sent_s"]


# --- bundles ---
class Blank:
    verdict = ("late", "unknown")

    def to_dict(self) -> dict[str, Any]:
        return {"hypotheses": [{"cause": "unknown"}, {"cause": "network"}]}


def test_bundles_check_out_and_do_not_tell_what_was_done(tmp_path: Path) -> None:
    policy = slo.load("chat")
    scenario = find(["S9"])[0]
    a, b, size = record(scenario, TWIN, policy, tmp_path, load=LOAD, seed=SEED, pairs=2, requests=60)
    assert len(a) == len(b) == 2 and 1.25 <= size <= 1.6
    for one in (*a, *b):
        assert all(finding.ok for finding in check(one, policy)), [f for f in check(one, policy) if not f.ok]
        text = json.dumps(one.manifest).lower()
        for word in ("s9", "speed", "slow", "fault", "scenario", *(name for name in CHANGES if name != "client")):
            assert f'"{word}' not in text, word
    assert a[0].manifest["hashes"] == b[0].manifest["hashes"]


def test_a_trial_keeps_what_was_wrong_and_deletes_what_was_right(tmp_path: Path) -> None:
    policy = slo.load("chat")
    scenario = find(["S29"])[0]
    said = Blank()
    wrong = virtual(scenario, TWIN, lambda a, b: said, policy, tmp_path, load=LOAD, seed=0, pairs=1, requests=60)
    assert not wrong.right and wrong.second == "network" and len(list(Path(wrong.folder).iterdir())) == 2
    said.verdict = scenario.truth
    right = virtual(scenario, TWIN, lambda a, b: said, policy, tmp_path, load=LOAD, seed=1, pairs=1, requests=60)
    assert right.right and right.folder == "" and len(list(tmp_path.iterdir())) == 1
    assert "S29" not in wrong.folder
