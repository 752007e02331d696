"""Which layer a verdict points to: one row of the table per cause, patterns against chance, and what is said."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from telemetry import causes, layer, names, slo, wrong_cause
from telemetry.bundle import Bundle
from telemetry.gate import gate
from telemetry.gate_text import markdown
from telemetry.layer import where
from telemetry.summary import summarize
from tests.bundles import TARGET, answered_row, dropped_row
from tests.telemetry.test_summary import bundle_of, text_of

POLICY = slo.parse(
    """
classes:
  default: {ttft: {base_s: 1.0}, gap_s: 0.5, e2e: {per_output_token_s: 0.1}}
objectives: [goodput >= 90 %]
""",
    "layer.yaml",
)
PLAN = {"served_model": "toy"}


def pointed(tmp_path: Path, rows: list[dict[str, Any]], series: list[dict[str, Any]] | None = None, **manifest: Any
            ) -> layer.Where:  # fmt: skip
    bundle = bundle_of(tmp_path, rows, **({"plan": PLAN} | manifest))
    if series:
        with bundle.writer("series", "scraper") as writer:
            writer.append(series)
        bundle.compact()
    return where(bundle, POLICY)


def late(index: int, phase: str, seconds: float, **changes: Any) -> dict[str, Any]:
    """An answer whose end is late by time spent in one phase (or in the network, or before the send)."""
    row = answered_row(index)
    more = {"end_s": row["end_s"] + seconds, "last_token_s": row["last_token_s"] + seconds}
    if phase in names.PHASES:
        more |= {f"phase_{phase}_s": row[f"phase_{phase}_s"] + seconds}
        more |= {"server_duration_s": row["server_duration_s"] + seconds}
    if phase == names.CLIENT_WAIT:
        more |= {"sent_s": row["sent_s"] + seconds, "first_token_s": row["first_token_s"] + seconds}
    return row | more | changes


LATE = {
    names.QUEUE: ("queue", causes.INFRASTRUCTURE),
    names.NETWORK: ("network", causes.INFRASTRUCTURE),
    names.CLIENT_WAIT: ("client", causes.INFRASTRUCTURE),
    names.PREFILL: ("prefill", causes.ENGINE),
    names.DECODE: ("decode", causes.ENGINE),
    names.PREEMPTED: ("kv", causes.ENGINE),
    names.RECOMPUTE: ("kv", causes.ENGINE),
    names.STALL: ("stall", causes.ENGINE),
    names.INGRESS: ("front", causes.ENGINE),
    names.TOKENIZE: ("front", causes.ENGINE),
    names.SEND: ("front", causes.ENGINE),
}


@pytest.mark.parametrize("phase", LATE)
def test_late_requests_point_to_where_their_time_went(tmp_path: Path, phase: str) -> None:
    found = pointed(tmp_path, [late(index, phase, 5.0) for index in range(8)] + [answered_row(8)])
    (one,) = found.pointers
    assert (one.cause, one.layer) == LATE[phase]
    assert (one.label, one.requests) == (names.LATE, 8) and one.check
    share = int(one.evidence[0].removesuffix(" % of their time"))
    assert 100 * 5.0 / 6.15 - 1 <= share <= 98, "5 s of an answer that takes 1.15 s by itself"


def test_an_answer_that_would_be_late_even_alone_points_to_the_model(tmp_path: Path) -> None:
    # 20 tokens have 1.0 + 1.9 s; at 0.2 s a token no device of this kind makes it
    rows = [late(i, names.DECODE, 5.0, floor_ttft_s=0.1, floor_tpot_s=0.2) for i in range(6)]
    (one,) = pointed(tmp_path, rows).pointers
    assert (one.cause, one.layer) == ("too_slow", causes.MODEL) and "0.2 s a token" in one.evidence[0]
    rows = [late(i, names.DECODE, 5.0, floor_ttft_s=0.1, floor_tpot_s=0.01) for i in range(6)]
    (one,) = pointed(tmp_path / "fast", rows).pointers
    assert one.layer == causes.ENGINE


def test_without_an_account_of_phases_nothing_is_guessed(tmp_path: Path) -> None:
    blank = {"server_duration_s": None} | {f"phase_{name}_s": None for name in names.PHASES}
    found = pointed(tmp_path, [late(i, names.DECODE, 5.0) | blank for i in range(6)])
    (one,) = found.pointers
    assert (one.cause, one.layer) == ("no_account", causes.NOWHERE)
    assert found.telemetry == 0.0


DROPS = {
    names.REFUSED: causes.INFRASTRUCTURE, names.REJECTED: causes.INFRASTRUCTURE,
    names.TIMEOUT_CONNECT: causes.INFRASTRUCTURE, names.RESET: causes.INFRASTRUCTURE,
    names.STREAM_CUT: causes.INFRASTRUCTURE, names.KV_OOM: causes.ENGINE, names.SERVER_ERROR: causes.ENGINE,
    names.CONTEXT_OVERFLOW: causes.APPLICATION, names.TIMEOUT_FIRST_TOKEN: causes.NOWHERE,
    names.TIMEOUT_TOTAL: causes.NOWHERE,
}  # fmt: skip


@pytest.mark.parametrize("reason", DROPS)
def test_every_reason_of_a_drop_points_somewhere(tmp_path: Path, reason: str) -> None:
    (one,) = pointed(tmp_path, [dropped_row(i, error=reason) for i in range(3)]).pointers
    assert (one.layer, one.label, one.requests) == (DROPS[reason], names.DROPPED, 3)


def test_every_cause_has_a_layer_and_every_drop_reason_a_cause() -> None:
    assert {one.layer for one in causes.CAUSES.values()} | {causes.TOOLING} == set(causes.LAYERS)
    assert set(DROPS) | {names.HANG} == set(names.DROP_REASONS)


WRONG = {
    "template": ([{"prompt_tokens_reported": 103}] * 8, causes.TOKENIZER, "+3 in 8"),
    "tokenizer": ([{"prompt_tokens_reported": 100 + k} for k in range(1, 9)], causes.TOKENIZER, "+1 in 1"),
    "other_prompts": ([{"prompt_tokens_reported": 103}] * 2, causes.TOKENIZER, "+3 in 2"),
    "other_lengths": ([{"prompt_tokens_expected": 90}] * 8, causes.APPLICATION, "+10 in 8"),
    "other_model": ([{"model": "other", "repeat_share": 0.95}] * 8, causes.APPLICATION, "asked for toy, answered by"),
    "detokenizer": ([{"replacement_chars": 3}] * 8, causes.TOKENIZER, ""),
    "answers": ([{"repeat_share": 0.95}] * 8, causes.MODEL, ""),
}


@pytest.mark.parametrize("cause", WRONG)
def test_wrong_answers_point_to_what_they_have_in_common(tmp_path: Path, cause: str) -> None:
    changes, its_layer, said = WRONG[cause]
    rows = [answered_row(i, **change) for i, change in enumerate(changes)]
    rows += [answered_row(i) for i in range(len(rows), len(rows) + 8)]
    (one,) = pointed(tmp_path, rows).pointers
    assert (one.cause, one.layer, one.label, one.requests) == (cause, its_layer, names.WRONG, len(changes))
    assert said in " ".join(one.evidence)


def test_every_kind_of_wrong_has_a_layer() -> None:
    assert {said.split(":")[0] for said in wrong_cause.LAYERS.values()} <= set(layer.LAYER_OF)
    assert set(layer.LAYER_OF.values()) <= set(causes.LAYERS)


def test_what_wrong_answers_look_like_is_said_once_with_their_pointer(tmp_path: Path) -> None:
    rows = [answered_row(i, **({"repeat_share": 0.95} if i % 2 else {})) for i in range(40)]
    bundle = bundle_of(tmp_path, rows, plan=PLAN)
    summary = summarize(bundle, POLICY)
    assert summary.wrong_cause.kind == "text"
    text = " ".join(text_of(summary).split())
    assert text.count("looks like") == 1 and "it looks like text (model or engine" in text
    (one,) = summary.where.pointers
    assert (one.layer, one.evidence[0]) == (causes.MODEL, summary.wrong_cause.evidence)
    assert markdown(gate(bundle, POLICY)).count("looks like") == 1


PATTERNS = {
    "wrong_in_batches": (lambda i: {"batch_size_mean": 20.0 if i % 4 == 0 else 4.0}, causes.ENGINE),
    "wrong_on_hits": (lambda i: {"cached_tokens": 64 if i % 4 == 0 else 0}, causes.ENGINE),
    "replica": (lambda i: {"replica": "b" if i % 4 == 0 else "a"}, causes.INFRASTRUCTURE),
}


@pytest.mark.parametrize("cause", PATTERNS)
def test_answers_that_are_wrong_only_under_one_condition_point_to_it(tmp_path: Path, cause: str) -> None:
    change, its_layer = PATTERNS[cause]
    rows = [answered_row(i, **change(i), **({"repeat_share": 0.95} if i % 8 == 0 else {})) for i in range(80)]
    (one,) = pointed(tmp_path, rows).pointers
    assert (one.cause, one.layer, one.requests) == (cause, its_layer, 10)


def test_chance_is_no_pattern(tmp_path: Path) -> None:
    """Wrong answers drawn without regard to batch, cache and replica are never blamed on them."""
    for seed in range(20):
        draw = random.Random(seed)
        rows = [
            answered_row(
                i,
                batch_size_mean=draw.uniform(1, 30),
                cached_tokens=draw.choice([0, 0, 64]),
                replica=draw.choice(["a", "b"]),
                repeat_share=0.95 if draw.random() < 0.2 else 0.1,
            )
            for i in range(60)
        ]
        assert [one.cause for one in pointed(tmp_path / str(seed), rows).pointers] == ["answers"]


def build(t_s: float, source: str = TARGET, **labels: str) -> dict[str, Any]:
    values = {"version": "1.0", "quant": "bf16", "template_sha": "3" * 64, "engine": source} | labels
    return {"t_s": t_s, "source": source, "name": names.M_BUILD_INFO, "labels": json.dumps(values), "value": 1.0}


def test_a_version_that_changed_in_the_run_is_named_with_its_moment(tmp_path: Path) -> None:
    rows = [answered_row(i, intended_s=float(i)) for i in range(8)] + [late(8, names.DECODE, 5.0)]
    new = {"quant": "int4", "version": "1.1"}
    found = pointed(tmp_path, rows, [build(0.0), build(4.0, **new), build(9.0, **new)])
    tooling = found.pointers[-1]
    assert tooling.layer == causes.TOOLING
    assert tooling.evidence == (
        f"{TARGET} changed at 4 s of the run: version 1.0 -> 1.1, quant bf16 -> int4; the first bad request was due at "
        "1 s",
    )


def test_replicas_of_two_builds_and_a_server_of_other_files_are_told(tmp_path: Path) -> None:
    rows = [answered_row(i, prompt_tokens_reported=103) for i in range(8)]
    series = [build(0.0), build(0.0, "http://other", version="1.1")]
    found = pointed(tmp_path, rows, series, hashes={"template": "4" * 64})
    assert "template: the server has another digest as the reference" in found.pointers[0].evidence
    assert "replicas differ: http://other has version 1.0 -> 1.1" in found.pointers[-1].evidence


def test_a_change_since_the_baseline_says_how_long_ago(tmp_path: Path) -> None:
    def made(place: str, hours: float, version: str, rows: list[dict[str, Any]]) -> Bundle:
        bundle = bundle_of(tmp_path / place, rows, created_unix_ns=int(1.7e18 + hours * 3.6e12), plan=PLAN)
        with bundle.writer("series", "scraper") as writer:
            writer.append([build(0.0, version=version)])
        bundle.compact()
        return bundle

    before = made("a", 0.0, "1.0", [answered_row(i) for i in range(8)])
    after = made("b", 2.5, "1.1", [late(i, names.QUEUE, 9.0) for i in range(8)])
    found = gate(after, POLICY, "main", [before])
    tooling = found.summary.where.pointers[-1]
    assert f"since run {before.run_id}, 2.5 h before: version 1.0 -> 1.1" in tooling.evidence
    assert "since run" in markdown(found) and "Where to look" in markdown(found)
    same = gate(made("c", 3.0, "1.0", [late(i, names.QUEUE, 9.0) for i in range(8)]), POLICY, "main", [before])
    assert all(one.layer != causes.TOOLING for one in same.summary.where.pointers)


def test_a_run_that_held_says_nothing_of_layers(tmp_path: Path) -> None:
    summary = summarize(bundle_of(tmp_path, [answered_row(i) for i in range(20)]), POLICY)
    assert summary.where == layer.NOTHING and "Where to look" not in text_of(summary)
    json.dumps(summary.to_dict(), allow_nan=False)


def test_the_share_of_full_telemetry_stands_beside_a_weak_account(tmp_path: Path) -> None:
    rows = [late(i, names.QUEUE, 9.0) for i in range(10)]
    for row in rows[:4]:
        row["phase_queue_s"] = None
    summary = summarize(bundle_of(tmp_path, rows, plan=PLAN), POLICY)
    assert summary.where.telemetry == pytest.approx(0.6)
    assert "only 60 % of the answers carry full telemetry" in text_of(summary)
