"""Every combination of answered, in time and correct, with every sub-kind and reason, with retries; and that labels
sum.

The rule is written down a second time here, as a plain function of what was done to a row, and all combinations are
held against it: 5 outcomes of the answer's way x 6 kinds of lateness x 18 of correctness x 2 of our own fault x 3 of
attempts.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import hard_checks, names, outcomes, relabel, slo
from telemetry.schema import REQUESTS
from telemetry.summary import summarize
from tests.bundles import answered_row, dropped_row
from tests.telemetry.test_summary import bundle_of

POLICY = slo.parse(
    """
classes:
  default:
    ttft: {base_s: 1.0, per_input_token_s: 0.01}
    gap_s: 0.5
    e2e: {per_output_token_s: 0.1}
    fluidity: {per_token_s: 0.1, at_least: 0.9}
objectives: [goodput >= 90 %]
""",
    "truth.yaml",
)
# answered_row: intended at 1.0 s, 100 tokens in, 20 out: ttft 2.0 s, gap 0.5 s, e2e 3.9 s
SMOOTH = {"chunk_s": [0.2 + 0.05 * k for k in range(20)], "chunk_tokens": [1] * 20}

#: What was done to the row -> columns.  Lateness by its kind; "halting" is a fluidity below the bound.
LATENESS: dict[str, dict[str, Any]] = {
    "in time": {},
    "ttft": {"first_token_s": 3.01, "last_token_s": 3.5, "end_s": 3.5},
    "gap": {"max_gap_s": 0.51},
    "e2e": {"end_s": 4.91},
    "halting": {"chunk_s": [0.2] + [3.0 + 0.05 * k for k in range(19)]},
    "ttft and gap and e2e": {"first_token_s": 3.2, "max_gap_s": 0.9, "end_s": 9.0},
}
LATE_KIND = {"in time": None, "halting": "gap", "ttft and gap and e2e": "ttft"}

CORRECTNESS: dict[str, dict[str, Any]] = {
    "unchecked": {},
    "verified": {},
    "fails golden": {},
    "fails golden and task": {},
    hard_checks.PROMPT_TOKENS: {"prompt_tokens_reported": 103},
    hard_checks.FINISH_REASON: {"finish_reason": "eos"},
    hard_checks.EMPTY: {"output_chars": 0, "completion_tokens_counted": 0},
    hard_checks.REPLACEMENT_CHAR: {"replacement_chars": 2},
    hard_checks.SPECIAL_TOKEN: {"special_leaks": 1},
    hard_checks.LOOP: {"repeat_share": 0.95},
    hard_checks.MODEL: {"model_asked": "toy", "model": "toy-4bit"},
    hard_checks.TRUNCATED: {"finish_reason": "length", "completion_tokens_reported": 19},
    hard_checks.OVER_LIMIT: {"completion_tokens_reported": 22},
    hard_checks.DOMINANCE: {"dominance": 0.8},
    hard_checks.FOREIGN_SCRIPT: {"foreign_letters": 60, "output_chars": 200},
    hard_checks.COMPLETION_TOKENS: {"completion_tokens_reported": 20, "completion_tokens_counted": 5, "chunks": 7},
    hard_checks.ANSWER: {"expected_answer": "347", "answer_matches": False},
    "the known answer": {"expected_answer": "347", "answer_matches": True},
}
CHECKED = {
    "verified": [("golden", True)],
    "fails golden": [("golden", False), ("task", True)],
    "fails golden and task": [("task", False), ("golden", False)],
}
WRONG_KIND = {
    **dict.fromkeys(("unchecked", "verified", "the known answer")),
    **dict.fromkeys(("fails golden", "fails golden and task"), "golden"),
}

VERIFIED = ("verified", "the known answer")

WAYS: dict[str, dict[str, Any]] = {
    "answered": {},
    "cut": {"error": names.STREAM_CUT, "finish_reason": None, "done_marker": False},
    "no finish": {"finish_reason": None, "done_marker": False},
    "refused": {
        "error": names.REFUSED,
        "finish_reason": None,
        "done_marker": None,
        "first_token_s": None,
        "sent_s": None,
    },
    "status": {"status": 500},
}
DROP_REASON = {"cut": "stream_cut", "no finish": "stream_cut", "refused": "refused", "status": "server_error"}

#: Attempts of the logical request: the facts of its row are those of the last one, timed from the first intended send.
ATTEMPTS: dict[str, dict[str, Any]] = {
    "one": {"attempts": 1},
    "retried": {"attempts": 3, "sent_s": 1.9, "retry_after_s": 0.5},
    "no count": {"attempts": None},  # an older bundle
}


def judged(rows: list[dict[str, Any]], checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table = pa.Table.from_pylist(rows, schema=REQUESTS)
    found = pa.Table.from_pylist(checks, schema=outcomes.CHECKS)
    return outcomes.judge(table, POLICY, len(rows), "complete", checks=found).to_pylist()


def test_every_combination() -> None:
    combinations = list(product(WAYS, LATENESS, CORRECTNESS, (False, True), ATTEMPTS))
    assert len(combinations) == 5 * 6 * 18 * 2 * 3
    rows, checks = [], []
    for index, (way, late, correct, ours, attempts) in enumerate(combinations):
        lag = {"lag_s": 0.2} if ours else {}
        changes = {**SMOOTH, **LATENESS[late], **CORRECTNESS[correct], **ATTEMPTS[attempts], **WAYS[way], **lag}
        rows.append(answered_row(index, **changes))
        checks += [{"index": index, "check": name, "passed": ok} for name, ok in CHECKED.get(correct, [])]
    verdicts = judged(rows, checks)
    for verdict, combination in zip(verdicts, combinations, strict=True):
        way, late, correct, ours, _ = combination
        answered = way == "answered"
        late_kind = LATE_KIND.get(late, late) if answered else None
        wrong_kind = WRONG_KIND.get(correct, correct) if answered else None
        if ours:
            expected = ("invalid", "schedule_lag")
        elif not answered:
            expected = ("dropped", DROP_REASON[way])
        elif wrong_kind:
            expected = ("wrong", wrong_kind)
        elif late_kind:
            expected = ("late", late_kind)
        else:
            expected = ("good", None)
        assert (verdict["label"], verdict["reason"]) == expected, combination
        assert verdict["answered"] == ("yes" if answered else "no"), combination
        assert verdict["in_time"] == ("yes" if answered and not late_kind else "no"), combination
        truth = "no" if wrong_kind else "yes" if answered and correct in VERIFIED else "unchecked"
        assert verdict["correct"] == truth, combination
        assert verdict["verified"] == (truth == "yes"), combination
        assert (verdict["late"], verdict["late_kind"]) == (late_kind is not None, late_kind), combination
        assert verdict["wrong_kind"] == wrong_kind, combination
        assert (verdict["fluidity"] is not None) == answered, combination
    labels = outcomes.counts(pa.Table.from_pylist(verdicts, schema=outcomes.VERDICTS))
    assert sum(labels.values()) == len(combinations) and all(labels.values())


@pytest.mark.parametrize("reason", [*names.DROP_REASONS, *names.INVALID_REASONS])
@pytest.mark.parametrize("attempts", [1, 2, 4])
def test_the_last_attempt_gives_the_reason_of_a_drop(reason: str, attempts: int) -> None:
    label = "dropped" if reason in names.DROP_REASONS else "invalid"
    verdict = judged([dropped_row(0, error=reason, attempts=attempts)], [])[0]
    assert (verdict["label"], verdict["reason"], verdict["answered"]) == (label, reason, "no")


def test_a_retry_that_succeeds_past_the_deadline_is_late_from_the_first_intended_send() -> None:
    """2 s on the first attempt, then an answer 0.2 s after its own send: fast by its own clock, late by the user's."""
    retried = answered_row(0, sent_s=3.5, first_token_s=3.7, last_token_s=4.5, end_s=4.6, attempts=2, **SMOOTH)
    verdict = judged([retried], [])[0]
    assert (verdict["label"], verdict["reason"]) == ("late", "ttft")
    in_time = answered_row(0, sent_s=2.5, first_token_s=2.7, last_token_s=3.5, end_s=3.6, attempts=2, **SMOOTH)
    assert judged([in_time], [])[0]["label"] == "good"


_errors = st.sampled_from([None, None, None, *names.DROP_REASONS, *names.INVALID_REASONS, "strange"])
_some = st.one_of(st.none(), st.floats(0, 20))
_checks = st.lists(
    st.fixed_dictionaries(
        {
            "index": st.integers(-1, 14),
            "check": st.sampled_from(["golden", "task", "loop", "z"]),
            "passed": st.booleans(),
        }
    ),
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "index": st.integers(-2, 12), "error": _errors, "end_s": _some, "first_token_s": _some, "lag_s": _some,
                "max_gap_s": _some, "status": st.sampled_from([None, 200, 503]), "attempts": st.integers(1, 5),
                "finish_reason": st.sampled_from([None, "stop", "length", "eos"]),
                "done_marker": st.sampled_from([None, True, False]),
                "chunk_s": st.one_of(st.none(), st.lists(st.floats(0, 9, width=32), max_size=6)),
                "chunk_tokens": st.one_of(st.none(), st.lists(st.integers(0, 4), max_size=6)),
            }
        ),
        max_size=15,
    ),
    _checks,
    st.sampled_from(["complete", "incomplete", "interrupted", "running"]),
)  # fmt: skip
def test_labels_always_sum_with_checks_and_retries(
    rows: list[dict[str, Any]], checks: list[dict[str, Any]], status: str
) -> None:
    table = pa.Table.from_pylist([answered_row() | row for row in rows], schema=REQUESTS)
    found = outcomes.judge(table, POLICY, 10, status, checks=pa.Table.from_pylist(checks, schema=outcomes.CHECKS))
    labels = outcomes.counts(found)
    expected = len({row["index"] for row in rows if 0 <= row["index"] < 10}) if status == "running" else 10
    assert sum(labels.values()) == expected == found.num_rows
    reasons = outcomes.reasons(found)
    for label in names.LABELS:
        assert sum(reasons[label].values()) == (0 if label == names.GOOD else labels[label])
    failed = {check["index"] for check in checks if not check["passed"]}
    for row in found.to_pylist():
        assert not (row["verified"] and row["index"] in failed)
        assert (row["correct"] == "yes") == row["verified"]
        assert row["fluidity"] is None or 0 <= row["fluidity"] <= 1
        assert row["label"] != names.GOOD or (row["index"] not in failed and row["correct"] != "no")
        if row["reason"] in outcomes.LATE_KINDS:
            assert row["label"] == names.LATE and row["late_kind"] == row["reason"]
        if row["label"] == names.WRONG:
            assert row["reason"] == row["wrong_kind"] is not None


def test_relabelling_moves_labels_and_touches_no_row(tmp_path: Path) -> None:
    rows = [answered_row(i, 1.0 + i, **SMOOTH) for i in range(6)]
    rows += [
        answered_row(6, **{**SMOOTH, **LATENESS["ttft"]}),
        dropped_row(7),
        answered_row(8, prompt_tokens_reported=9),
    ]
    bundle = bundle_of(tmp_path, rows)
    before = {file.name: file.read_bytes() for file in (bundle.path / "requests").iterdir()}
    lax = slo.parse("name: lax\nclasses: {default: {}}\nobjectives: [goodput >= 1 %]", "lax.yaml")
    found = relabel.relabel(bundle, POLICY, lax)
    assert found.before == {"good": 6, "late": 1, "wrong": 1, "dropped": 1, "invalid": 0}
    assert found.after == {"good": 7, "late": 0, "wrong": 1, "dropped": 1, "invalid": 0}
    assert found.moves[("late", "good")] == found.changed == 1
    assert sum(found.moves.values()) == len(rows)
    assert {file.name: file.read_bytes() for file in (bundle.path / "requests").iterdir()} == before
    kept = {file.name for file in bundle.path.glob("verdicts-*.parquet")}
    assert kept == {f"verdicts-{one.hash[:12]}.parquet" for one in (POLICY, lax)}
    assert summarize(bundle, lax).labels == found.after


def test_the_command_relabels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    import tailspan

    bundle = bundle_of(tmp_path, [answered_row(i, 1.0 + i, first_token_s=3.0 + i, end_s=4.5 + i) for i in range(4)])
    words = ["runs", "relabel", bundle.run_id, "--root", str(tmp_path), "--slo"]
    assert tailspan.main([*words, "voice"]) == 0
    told = capsys.readouterr().out
    assert "4 good -> late" in told and "4 of 4 requests have another label; under voice" in told
    assert tailspan.main([*words, "voice", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["after"]["late"] == 4
    assert tailspan.main([*words, "none.yaml"]) == 4
