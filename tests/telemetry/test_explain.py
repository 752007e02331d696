"""From two sides to a verdict: injected changes on the engine's twin, and drops and wrong answers made by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tailspan
from engine.replay import TWIN
from models.errors import UserError
from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.explain import CAUSES, UNKNOWN, Explanation, explain
from telemetry.explain.text import headline, markdown
from telemetry.schema import TABLES
from telemetry.twin import TwinLoad, TwinSetting
from telemetry.twin_bundle import rows, write_bundle
from tests.bundles import answered_row, dropped_row

FIT = {
    "kind": "tailspan step fit", "version": 1, "about": "a test", "steps": 1000, "error": 0.05, "gap_s": 1e-4,
    "coefficients": {"step": 0.006, "tokens_8": 0.0004, "tokens_32": 0.0001, "prefill_tokens": 0.0005,
                     "decode_seqs": 0.0006, "context_tokens": 1e-7, "attended": 0.0},
    "noise": {"sigma": 0.08, "autocorrelation": 0.76, "stall_rate": 0.0, "stall_s": 0.0},
}  # fmt: skip
SETTING = TwinSetting(model="smollm2", device="h100", max_batch=24, token_budget=160, kv_blocks=900, fit=FIT)
POLICY = slo.load("chat")
N = 260


def load(*, speed: float = 1.0, longer: float = 1.0, answers: float = 1.0, shared: bool = True) -> TwinLoad:
    """Half of what the engine carries; every prompt begins with the same 64 tokens."""
    rng = np.random.default_rng(5)
    return TwinLoad(
        at_s=np.cumsum(rng.exponential(1 / 7.0, N)) / speed,
        input_tokens=(np.clip(rng.lognormal(4.6, 0.6, N), 10, 900) * longer).astype(np.int64) + 64,
        output_tokens=np.clip(rng.lognormal(3.2, 0.6, N) * answers, 2, 120).astype(np.int64),
        prefixes=[[7] if shared else [1000 + k] for k in range(N)],
        prefix_tokens=64,
    )


def run_of(root: Path, sent: TwinLoad, setting: TwinSetting) -> Bundle:
    return write_bundle(TWIN.replay(sent, setting, steps=True), POLICY, root=root)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return run_of(tmp_path_factory.mktemp("runs"), load(), replace(SETTING, seed=1))


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arrivals": ({"speed": 1.6}, {}),
    "prompt_lengths": ({"longer": 2.0}, {}),
    "output_lengths": ({"answers": 1.8}, {}),
    "cache_misses": ({"shared": False}, {}),
    "engine_speed": ({}, {"speed": 1 / 1.4}),
    "kv_pressure": ({}, {"kv_blocks": 80}),
    "batch_limit": ({}, {"max_batch": 4}),
    "host_stall": ({}, {"pauses": tuple((float(at), 0.4) for at in range(1, 60, 2))}),
}


@pytest.mark.parametrize("cause", list(CHANGES))
def test_an_injected_change_is_named(base: Bundle, tmp_path: Path, cause: str) -> None:
    sent, setting = CHANGES[cause]
    found = explain([base], [run_of(tmp_path, load(**sent), replace(SETTING, seed=2, **setting))])
    assert found.verdict == ("late", cause), markdown(found)
    first = found.hypotheses[0]
    assert first.share is not None and first.share > 0.5 and first.evidence and first.disprove and first.requests
    assert found.causes is not None and found.causes.error < 0.1
    main = found.phases[0]
    assert sum(one.change_s for one in main.parts) == pytest.approx(main.change_s)
    assert any("single pair" in one for one in found.limits)
    json.dumps(found.to_dict(), allow_nan=False)


def test_two_changes_at_once_are_named_in_the_order_of_size(base: Bundle, tmp_path: Path) -> None:
    both = run_of(tmp_path, load(shared=False), replace(SETTING, seed=2, speed=1 / 1.15))
    found = explain([base], [both])
    assert {one.cause for one in found.hypotheses} == {"cache_misses", "engine_speed"}
    shares = [one.share or 0.0 for one in found.hypotheses]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1.0, abs=0.15)


def test_nothing_changed_and_better_are_no_cause(base: Bundle, tmp_path: Path) -> None:
    same = explain([base], [run_of(tmp_path, load(), replace(SETTING, seed=2))])
    assert same.verdict == ("none", "no_change") and headline(same).startswith("Nothing got worse")
    faster = explain([base], [run_of(tmp_path, load(), replace(SETTING, seed=2, speed=1.5))])
    assert faster.verdict == ("none", "no_change") and "better" in faster.hypotheses[0].evidence[0]
    asked = explain([base], [base_again(base, tmp_path)], figure="e2e p90")
    assert asked.label == "none" and asked.figure == "e2e p90" and asked.phases


def test_what_few_pairs_leave_open_is_said(tmp_path: Path) -> None:
    a, b = (
        [run_of(tmp_path, load(), replace(SETTING, seed=seed + 10 * at, speed=by)) for at, by in enumerate(speeds)]
        for seed, speeds in ((1, (1.0, 1.0, 1.0)), (2, (1.0, 0.7, 0.85)))
    )
    found = explain(a, b)
    assert found.verdict == ("none", "no_change")
    (hypothesis,) = found.hypotheses
    assert any(one.startswith("not ruled out: ") and "(seen: +" in one for one in hypothesis.evidence)
    assert re.match(r"\d+ pairs see a change of 10 %, more see smaller changes", hypothesis.disprove)


def base_again(base: Bundle, root: Path) -> Bundle:
    return run_of(root, load(), replace(SETTING, seed=3))


def test_a_lower_queue_limit_is_a_policy_and_more_load_is_capacity(base: Bundle, tmp_path: Path) -> None:
    policy = run_of(tmp_path, load(), replace(SETTING, seed=2, max_batch=4, queue_limit=2))
    found = explain([base], [policy])
    assert found.verdict == ("dropped", "rejected") and found.hypotheses[0].requests
    more = run_of(tmp_path, load(speed=3.0), replace(SETTING, seed=2, queue_limit=8))
    assert explain([base], [more]).verdict == ("dropped", "capacity")


def test_windows_selections_and_the_twin(base: Bundle, tmp_path: Path) -> None:
    slow = run_of(tmp_path, load(), replace(SETTING, seed=2, speed=1 / 1.6))
    through_twin = explain([base], [slow], twin=TWIN)
    assert through_twin.cause == "engine_speed" and through_twin.causes is not None
    assert through_twin.causes.through == "engine's twin"
    windows = explain([base], [slow], windows=((0.0, 36.0), (0.0, 36.0)))
    assert windows.cause == "engine_speed"
    indices = list(range(20, 150))
    chosen = explain([base], [slow], chosen=indices)
    assert chosen.cause == "engine_speed" and set(chosen.hypotheses[0].requests) <= set(indices)
    with pytest.raises(UserError, match="chosen"):
        explain([base], [slow], chosen=[99_999])
    with pytest.raises(UserError, match="no figure"):
        explain([base], [slow], figure="dropped")
    with pytest.raises(UserError, match="no runs"):
        explain([], [slow])


def two_replicas(root: Path, side: str, seed: int, *speeds: float) -> Bundle:
    """One run over two engines, each with half of the requests, and names of this side's own."""
    whole = load(speed=1.6)
    tables, steps = [], []
    for k, speed in enumerate(speeds):
        half = TwinLoad(whole.at_s[k::2], whole.input_tokens[k::2], whole.output_tokens[k::2])
        run = TWIN.replay(half, replace(SETTING, seed=seed + k, speed=speed), steps=True)
        named = pa.array([f"{side}{k}"] * len(half))
        table = rows(run).set_column(rows(run).column_names.index("replica"), "replica", named)
        index = pa.array(np.arange(len(half)) * 2 + k)
        tables.append(table.set_column(0, table.schema.field(0), index))
        assert run.steps is not None
        steps.append(run.steps.set_column(0, "replica", pa.array([f"{side}{k}"] * run.steps.num_rows)))
    bundle = Bundle.create(root, {}, scheduled=N, length_s=float(whole.at_s[-1]), slo=POLICY.manifest_entry())
    for name, parts in (("requests", tables), ("steps", steps)):
        with bundle.writer(name, "w") as writer:
            for part in parts:
                writer.append_table(part.cast(TABLES[name]))
    bundle.update(status="complete", validity={"verdict": "VALID"})
    bundle.compact()
    return bundle


def test_one_slow_replica_is_told_from_a_slow_engine(tmp_path: Path) -> None:
    before = two_replicas(tmp_path, "a", 1, 1.0, 1.0)
    one = explain([before], [two_replicas(tmp_path, "b", 5, 1.0, 1 / 2.2)])
    assert one.verdict == ("late", "replica"), markdown(one)
    assert "replica b1" in one.hypotheses[0].evidence[0]
    assert explain([before], [two_replicas(tmp_path, "c", 5, 1 / 1.6, 1 / 1.6)]).verdict == ("late", "engine_speed")


def test_without_a_step_log_the_rates_tell_and_the_limit_is_stated(base: Bundle, tmp_path: Path) -> None:
    def bare(sent: TwinLoad, seed: int) -> Bundle:
        return write_bundle(TWIN.replay(sent, replace(SETTING, seed=seed)), POLICY, root=tmp_path)

    found = explain([bare(load(), 1)], [bare(load(speed=1.6), 2)])
    assert found.verdict == ("late", "arrivals") and found.causes is None
    assert any("no step log" in one for one in found.limits)


# --- drops and wrong answers, made by hand ---

Change = Callable[[int, dict[str, Any]], dict[str, Any]]


def made(root: Path, change: Change | None = None, n: int = 300, **manifest: Any) -> Bundle:
    made_rows = [answered_row(k, k * 0.1, text=None) for k in range(n)]
    made_rows = [row if change is None else change(k, row) for k, row in enumerate(made_rows)]
    bundle = Bundle.create(root, {}, scheduled=n, length_s=n * 0.1, trace={"name": "made"}, slo=POLICY.manifest_entry())
    with bundle.writer("requests", "w") as writer:
        writer.append(made_rows)
    bundle.update(**{"status": "complete", "validity": {"verdict": "VALID"}, **manifest})
    bundle.compact()
    return bundle


def dropped(error: str, every: int = 10, **more: Any) -> Change:
    return lambda k, row: dropped_row(k, k * 0.1, error, **more) if k % every == 3 else row


def verdict(root: Path, change: Change) -> Explanation:
    return explain([made(root)], [made(root, change)])


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (names.STREAM_CUT, "stream_cut"), (names.RESET, "reset"), (names.REFUSED, "refused"), (names.HANG, "hang"),
        (names.CONTEXT_OVERFLOW, "context_overflow"), (names.SERVER_ERROR, "server_error"),
        (names.REJECTED, "rejected"), (names.KV_OOM, "kv_oom"),
    ],
)  # fmt: skip
def test_the_reason_of_a_drop_leads_to_its_cause(tmp_path: Path, error: str, cause: str) -> None:
    found = verdict(tmp_path, dropped(error, status=503))
    assert found.verdict == ("dropped", cause) and found.hypotheses[0].requests[:2] == (3, 13)
    assert f"{error}: 0.0 % -> 10.0 %" in found.hypotheses[0].evidence[0]


@pytest.mark.parametrize(
    ("late", "lost", "error", "label"),
    [
        (150, 30, names.TIMEOUT_TOTAL, "late"),  # who waits is late first, and times out in the end
        (150, 60, names.TIMEOUT_TOTAL, "dropped"),
        (0, 30, names.TIMEOUT_TOTAL, "dropped"),
        (150, 30, names.REJECTED, "dropped"),  # who is refused has not waited
    ],
)
def test_a_few_time_outs_beside_many_that_are_late_are_the_far_end_of_them(
    tmp_path: Path, late: int, lost: int, error: str, label: str
) -> None:
    def crowd(k: int, row: dict[str, Any]) -> dict[str, Any]:
        if 100 <= k < 100 + lost:
            return dropped_row(k, k * 0.1, error, end_s=k * 0.1 + 60)
        if 100 + lost <= k < 100 + lost + late:
            longer = {name: row[name] + 20.0 for name in ("first_token_s", "first_content_s", "last_token_s", "end_s")}
            return row | longer | {"chunk_s": [moment + 20.0 for moment in row["chunk_s"]]}
        return row

    assert verdict(tmp_path, crowd).label == label


def test_retries_that_multiply_the_load_are_told_from_capacity(tmp_path: Path) -> None:
    def storm(k: int, row: dict[str, Any]) -> dict[str, Any]:
        return dropped_row(k, k * 0.1, names.TIMEOUT_FIRST_TOKEN, attempts=4) if 100 < k < 200 else row

    found = verdict(tmp_path, storm)
    assert (
        found.verdict == ("dropped", "retries") and "attempts a request 1.00 -> 1.99" in found.hypotheses[0].evidence[1]
    )


def test_drops_are_no_more_work_whatever_the_cache_did_for_the_others(tmp_path: Path) -> None:
    def hit(k: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"cached_tokens": row["input_tokens"] * 3 // 4}

    def storm(k: int, row: dict[str, Any]) -> dict[str, Any]:
        lost = 100 < k < 200
        return dropped_row(k, k * 0.1, names.HANG, attempts=4) if lost else hit(k, row)

    found = explain([made(tmp_path, hit)], [made(tmp_path, storm)])
    assert found.figures["load"]["work"] == pytest.approx(0.0, abs=0.02)
    assert found.verdict == ("dropped", "retries"), markdown(found)


@pytest.mark.parametrize(("ends", "cause"), [(True, "retries"), (False, "hang")])
def test_a_pause_that_ends_with_requests_asked_again_is_no_hang(tmp_path: Path, ends: bool, cause: str) -> None:
    def stall(k: int, row: dict[str, Any]) -> dict[str, Any]:
        lost = k > 100 and (k < 200 or not ends)
        return dropped_row(k, k * 0.1, names.HANG, attempts=4) if lost else row

    found = verdict(tmp_path, stall)
    assert found.verdict == ("dropped", cause), markdown(found)


def test_time_that_earlier_attempts_took_is_no_network(tmp_path: Path) -> None:
    def again(k: int, row: dict[str, Any]) -> dict[str, Any]:
        if k % 2:
            return row
        moments = ("sent_s", "headers_s", "first_chunk_s", "first_token_s", "first_content_s", "last_token_s", "end_s")
        return row | {name: row[name] + 4.0 for name in moments} | {"attempts": 3}

    found = verdict(tmp_path, again)
    assert found.verdict == ("late", "retries") and "attempts a request 1.00 -> 2.00" in found.hypotheses[0].evidence


def both_wrong(more: int, per_token: float = 0.0) -> Change:
    def change(k: int, row: dict[str, Any]) -> dict[str, Any]:
        tokens = 60 + k % 90
        off = more + round(per_token * tokens)
        return row | {"input_tokens": tokens, "prompt_tokens_expected": tokens, "prompt_tokens_reported": tokens + off}

    return change


def test_another_template_is_told_from_another_tokenizer(tmp_path: Path) -> None:
    assert verdict(tmp_path, both_wrong(7)).verdict == ("wrong", "template")
    assert verdict(tmp_path, both_wrong(0, 0.2)).verdict == ("wrong", "tokenizer")


def test_wrong_answers_by_what_their_checks_say(tmp_path: Path) -> None:
    def loops(k: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"repeat_share": 0.99, "output_chars": 900} if k % 9 == 0 else row

    assert verdict(tmp_path, loops).verdict == ("wrong", "loop")

    def garbled(k: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"replacement_chars": 5, "replica": "second"} if k % 9 == 0 else row

    found = verdict(tmp_path, garbled)
    assert found.verdict == ("wrong", "text") and any("replica second" in one for one in found.hypotheses[0].evidence)

    def capped(k: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"expected_output_tokens": 100, "completion_tokens_counted": 64, "completion_tokens_reported": 64}

    assert verdict(tmp_path, capped).cause == "truncated"


def test_canaries_and_counters_speak_where_the_rows_do_not(tmp_path: Path) -> None:
    goldens = {"first asked": [{"kind": "same"}] * 5, "asked again": [{"kind": "same"}] * 5}
    broken = {"verdict": "broken", "findings": [{"verdict": "broken", "said": "goldens: 4 of 15 broken"}], "probes": []}
    cases: dict[str, dict[str, Any]] = {
        "concurrency": broken | {"goldens": goldens | {"under load": [{"kind": "broken"}] * 4}},
        "prefix_cache": broken | {"goldens": {"first asked": [{"kind": "same"}], "asked again": [{"kind": "broken"}]}},
        "broken_model": broken | {"goldens": {"first asked": [{"kind": "broken"}]}},
        "loop": {
            "verdict": "broken",
            "findings": [
                {"verdict": "broken", "kind": "no-end", "said": "goldens: 17 of 62 broken; answers do not end"},
                {"verdict": "broken", "kind": "task", "said": "questions: 9 lost, 0 won"},
            ],
            "goldens": {"first asked": [{"kind": "broken"}]},
        },
        "numeric_drift": {
            "verdict": "numeric drift",
            "findings": [{"verdict": "numeric drift", "said": "drift: KL 0.02"}],
        },
        "sampling": broken | {"probes": [{"name": "temperature", "passed": False, "detail": "1 different text of 8"}]},
    }
    a = made(tmp_path)
    for cause, checked in cases.items():
        b = made(tmp_path)
        (b.path / "canaries.json").write_text(json.dumps(checked))
        assert explain([a], [b]).verdict == ("wrong", cause)
        (a.path / "canaries.json").write_text(json.dumps(checked))
        assert explain([a], [b]).label == "none", "A had it as well"
        (a.path / "canaries.json").unlink()
    b = made(tmp_path, dropped(names.SERVER_ERROR))
    with b.writer("series", "s") as series:
        for at, value in ((0.0, 0.0), (10.0, 12.0)):
            series.append(
                [{"t_s": at, "source": "x", "name": names.M_NONFINITE + "_total", "labels": "{}", "value": value}]
            )
    assert explain([a], [b]).verdict == ("wrong", "non_finite")


def test_a_generator_that_did_not_keep_up_is_no_verdict_on_the_server(tmp_path: Path) -> None:
    late = {"validity": {"verdict": "CLIENT_LIMITED", "reasons": ["lag p99 90.0 ms > 5.0 ms"]}}
    found = explain([made(tmp_path)], [made(tmp_path, **late)])
    assert found.verdict == ("invalid", "client") and "90.0 ms" in found.hypotheses[0].evidence[0]
    cut = {"status": "interrupted", "validity": {"verdict": "INCOMPLETE", "reasons": ["interrupted"]}}
    assert explain([made(tmp_path)], [made(tmp_path, **cut)]).verdict == ("invalid", UNKNOWN)


def test_the_command_prints_a_table_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path), made(tmp_path, dropped(names.STREAM_CUT))
    words = ["explain", a.run_id, b.run_id, "--root", str(tmp_path)]
    out = tmp_path / "why.md"
    assert tailspan.main([*words, "--markdown", str(out)]) == 0
    said = capsys.readouterr().out
    assert "streams end without a finish reason" in said and "go to: infrastructure" in said
    assert out.read_text().startswith("**More requests are dropped (0.0 % -> 10.0 %)")
    assert tailspan.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cause"] == "stream_cut" and len(found["hypotheses"]) <= 3
    assert tailspan.main([*words, "--requests", "3-x"]) == 4


def test_every_cause_has_words_a_layer_and_a_check() -> None:
    assert all(one.words and one.layer and one.disprove for one in CAUSES.values())
    assert {one.label for one in CAUSES.values()} == {"late", "dropped", "wrong"}
    assert {name for name, one in CAUSES.items() if one.workload} == {"arrivals", "prompt_lengths", "output_lengths"}
