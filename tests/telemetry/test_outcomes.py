"""The truth table of labels, deadlines at their edges, sums, hangs, and every hard check."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import hard_checks, names, outcomes, slo
from telemetry.schema import REQUESTS, SERIES
from tests.bundles import TARGET, answered_row, dropped_row

POLICY = slo.parse(
    """
classes:
  default:
    ttft: {base_s: 1.0, per_input_token_s: 0.01}
    gap_s: 0.5
    e2e: {per_output_token_s: 0.1}
objectives: [goodput >= 90 %]
""",
    "test.yaml",
)
# answered_row: 100 tokens in, 20 out, so ttft 2.0 s, gap 0.5 s, e2e 3.9 s after the intended send at 1.0 s
WRONG = {"prompt_tokens_reported": 103}
LATE = {"first_token_s": 3.01, "last_token_s": 3.5, "end_s": 3.5}


def judge(
    *rows: dict[str, Any], scheduled: int | None = None, status: str = "complete", **more: Any
) -> list[dict[str, Any]]:
    table = pa.Table.from_pylist(list(rows), schema=REQUESTS)
    return outcomes.judge(table, POLICY, len(rows) if scheduled is None else scheduled, status, **more).to_pylist()


def one(row: dict[str, Any], **more: Any) -> dict[str, Any]:
    return judge(row, **more)[0]


def test_right_and_fast_right_and_late_wrong_and_fast_and_none() -> None:
    found = judge(answered_row(0), answered_row(1, **LATE), answered_row(2, **WRONG), dropped_row(3))
    assert [row["label"] for row in found] == ["good", "late", "wrong", "dropped"]
    assert outcomes.counts(pa.Table.from_pylist(found)) == dict.fromkeys(names.LABELS, 1) | {"invalid": 0}


@pytest.mark.parametrize(
    ("ours", "answered", "late", "wrong", "label", "reason"),
    [
        (False, True, False, False, "good", None),
        (False, True, True, False, "late", "ttft"),
        (False, True, False, True, "wrong", "prompt_tokens"),
        (False, True, True, True, "wrong", "prompt_tokens"),
        (False, False, False, False, "dropped", "reset"),
        (False, False, True, False, "dropped", "reset"),
        (False, False, False, True, "dropped", "reset"),
        (False, False, True, True, "dropped", "reset"),
        (True, True, False, False, "invalid", "schedule_lag"),
        (True, True, True, False, "invalid", "schedule_lag"),
        (True, True, False, True, "invalid", "schedule_lag"),
        (True, True, True, True, "invalid", "schedule_lag"),
        (True, False, False, False, "invalid", "schedule_lag"),
        (True, False, True, False, "invalid", "schedule_lag"),
        (True, False, False, True, "invalid", "schedule_lag"),
        (True, False, True, True, "invalid", "schedule_lag"),
    ],
)
def test_truth_table(ours: bool, answered: bool, late: bool, wrong: bool, label: str, reason: str | None) -> None:
    changes = {**(LATE if late else {}), **(WRONG if wrong else {})}
    if ours:
        changes["lag_s"] = 0.2
    if not answered:
        changes |= {"error": names.RESET, "finish_reason": None, "done_marker": False}
    verdict = one(answered_row(**changes))
    assert (verdict["label"], verdict["reason"]) == (label, reason)
    assert verdict["answered"] == ("yes" if answered else "no")
    assert verdict["in_time"] == ("yes" if answered and not late else "no")
    assert verdict["correct"] == ("no" if answered and wrong else "unchecked")
    assert verdict["late"] == (answered and late)
    assert verdict["late_kind"] == ("ttft" if answered and late else None)
    assert verdict["wrong_kind"] == ("prompt_tokens" if answered and wrong else None)
    assert verdict["verified"] is False


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"first_token_s": 3.0}, None),
        ({"first_token_s": 3.000001}, "ttft"),
        ({"max_gap_s": 0.5}, None),
        ({"max_gap_s": 0.51}, "gap"),
        ({"max_gap_s": None}, None),
        ({"end_s": 4.9}, None),
        ({"end_s": 4.90001}, "e2e"),
        ({"first_token_s": 3.1, "max_gap_s": 0.6, "end_s": 9.0}, "ttft"),
        ({"max_gap_s": 0.6, "end_s": 9.0}, "gap"),
        ({"first_token_s": None, "first_content_s": None, "end_s": 3.5}, "ttft"),
        ({"input_tokens": 300, "first_token_s": 4.9, "end_s": 5.5}, None),
        ({"expected_output_tokens": None, "end_s": 99.0, "first_token_s": 1.5}, None),
        ({"sent_s": 2.9, "first_token_s": 3.1}, "ttft"),  # from the intended send, not the actual one
    ],
)
def test_deadlines_at_their_edges(changes: dict[str, Any], kind: str | None) -> None:
    assert one(answered_row(**changes))["late_kind"] == kind


@pytest.mark.parametrize("reason", names.DROP_REASONS)
def test_every_drop_keeps_its_reason(reason: str) -> None:
    verdict = one(dropped_row(error=reason))
    assert (verdict["label"], verdict["reason"]) == ("dropped", reason)


@pytest.mark.parametrize("reason", names.INVALID_REASONS)
def test_every_fault_of_ours_keeps_its_reason(reason: str) -> None:
    verdict = one(dropped_row(error=reason))
    assert (verdict["label"], verdict["reason"]) == ("invalid", reason)


@pytest.mark.parametrize(
    ("row", "label", "reason"),
    [
        (answered_row(finish_reason=None, done_marker=False), "dropped", "stream_cut"),
        (answered_row(finish_reason=None, done_marker=None), "dropped", "stream_cut"),
        (answered_row(finish_reason=None, done_marker=True), "wrong", "finish_reason"),
        (answered_row(finish_reason="stop", done_marker=False), "good", None),
        (answered_row(status=500), "dropped", "server_error"),
        (answered_row(status=None), "good", None),
        (dropped_row(error="no such reason"), "dropped", "server_error"),
        (answered_row(end_s=None), "invalid", "cut_by_end"),
        (answered_row(lag_s=0.1), "good", None),  # 5 % of the 2 s deadline
        (answered_row(lag_s=0.1001), "invalid", "schedule_lag"),
        (answered_row(lag_s=None), "good", None),
        (dropped_row(error=names.BAD_REQUEST, lag_s=3.0), "invalid", "schedule_lag"),
    ],
)
def test_what_the_facts_alone_decide(row: dict[str, Any], label: str, reason: str | None) -> None:
    verdict = one(row)
    assert (verdict["label"], verdict["reason"]) == (label, reason)


# --- hard checks ---


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"prompt_tokens_reported": 101}, hard_checks.PROMPT_TOKENS),
        ({"prompt_tokens_reported": 99, "usage_estimated": True}, None),
        ({"prompt_tokens_reported": None}, None),
        ({"prompt_tokens_expected": None}, None),
        ({"finish_reason": "eos"}, hard_checks.FINISH_REASON),
        ({"finish_reason": "stop"}, None),
        ({"finish_reason": "tool_calls"}, None),
        ({"finish_reason": "content_filter"}, None),
        ({"output_chars": 0, "completion_tokens_counted": 0}, hard_checks.EMPTY),
        ({"output_chars": 0, "completion_tokens_counted": None}, hard_checks.EMPTY),
        ({"output_chars": 0, "completion_tokens_counted": 0, "expected_output_tokens": 0}, None),
        ({"output_chars": 0, "completion_tokens_counted": 0, "finish_reason": "tool_calls"}, None),
        ({"output_chars": None, "completion_tokens_counted": None}, None),  # not measured is not empty
        ({"replacement_chars": 1}, None),  # cut by the limit inside a character
        ({"replacement_chars": 2}, hard_checks.REPLACEMENT_CHAR),
        ({"replacement_chars": 1, "finish_reason": "stop"}, hard_checks.REPLACEMENT_CHAR),
        ({"special_leaks": 1}, hard_checks.SPECIAL_TOKEN),
        ({"repeat_share": 0.95}, hard_checks.LOOP),
        ({"repeat_share": 0.85}, None),
        ({"repeat_share": 1.0, "output_chars": 40}, None),
        ({"model_asked": "toy", "model": "other"}, hard_checks.MODEL),
        ({"model_asked": "toy", "model": "toy-2024-08-06"}, None),  # a snapshot of it
        ({"model_asked": "maker/toy", "model": "toy"}, None),
        ({"model_asked": "toy", "model": "toy-4bit"}, hard_checks.MODEL),
        ({"model_asked": "toy", "model": None}, None),
        ({"completion_tokens_reported": 19}, hard_checks.TRUNCATED),
        ({"completion_tokens_reported": 19, "finish_reason": "stop"}, None),
        ({"completion_tokens_reported": None}, None),
        ({"completion_tokens_reported": 21}, None),  # an end token is counted
        ({"completion_tokens_reported": 22}, hard_checks.OVER_LIMIT),
        ({"dominance": 0.81}, hard_checks.DOMINANCE),
        ({"dominance": 0.79}, None),
        ({"foreign_letters": 60, "output_chars": 200}, hard_checks.FOREIGN_SCRIPT),
        ({"foreign_letters": 59, "output_chars": 200}, None),
        ({"foreign_letters": 15, "output_chars": 16}, None),
        ({"completion_tokens_counted": 14, "chunks": 14}, hard_checks.COMPLETION_TOKENS),
        ({"completion_tokens_counted": 14, "chunks": 20}, None),  # sampled in other pieces than the text has
        ({"completion_tokens_counted": 15, "chunks": 4}, None),
        ({"completion_tokens_counted": 5, "chunks": None}, None),  # hidden reasoning
        ({"answer_matches": False}, hard_checks.ANSWER),
        ({"answer_matches": False, "completion_tokens_counted": 15}, None),  # cut before it could say it
        ({"answer_matches": False, "completion_tokens_counted": 15, "finish_reason": "stop"}, hard_checks.ANSWER),
        ({"prompt_tokens_reported": 5, "finish_reason": "eos", "special_leaks": 2}, hard_checks.PROMPT_TOKENS),
    ],
)
def test_hard_checks(changes: dict[str, Any], kind: str | None) -> None:
    verdict = one(answered_row(**changes))
    assert verdict["wrong_kind"] == kind
    assert verdict["label"] == ("wrong" if kind else "good")


# --- sums ---


@pytest.mark.parametrize(
    ("status", "lost", "reason"),
    [
        ("complete", False, "worker_lost"),
        ("complete", True, "worker_lost"),
        ("incomplete", True, "worker_lost"),
        ("incomplete", False, "cut_by_end"),
        ("interrupted", False, "cut_by_end"),
    ],
)
def test_requests_without_a_row_are_ours(status: str, lost: bool, reason: str) -> None:
    found = judge(answered_row(1), answered_row(4), scheduled=6, status=status, workers_lost=lost)
    assert [row["index"] for row in found] == list(range(6))
    assert [row["label"] for row in found] == ["invalid", "good", "invalid", "invalid", "good", "invalid"]
    assert {row["reason"] for row in found if row["label"] == "invalid"} == {reason}


def test_while_running_only_rows_are_judged() -> None:
    assert [row["index"] for row in judge(answered_row(3), scheduled=9, status="running")] == [3]


def test_no_rows_at_all() -> None:
    assert judge(scheduled=0) == []
    assert [row["label"] for row in judge(scheduled=2)] == ["invalid", "invalid"]


_errors = st.sampled_from([None, None, *names.DROP_REASONS, *names.INVALID_REASONS, "strange"])
_some = st.one_of(st.none(), st.floats(0, 20))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "index": st.integers(-2, 12), "error": _errors, "end_s": _some, "first_token_s": _some, "lag_s": _some,
                "max_gap_s": _some, "status": st.sampled_from([None, 200, 429, 500]),
                "finish_reason": st.sampled_from([None, "stop", "length", "eos"]),
                "done_marker": st.sampled_from([None, True, False]),
                "repeat_share": _some, "output_chars": st.integers(0, 300),
            }
        ),
        max_size=15,
    ),
    st.sampled_from(["complete", "incomplete", "interrupted", "running"]),
)  # fmt: skip
def test_labels_always_sum_to_the_schedule(rows: list[dict[str, Any]], status: str) -> None:
    scheduled = 10
    found = judge(*[answered_row() | row for row in rows], scheduled=scheduled, status=status)
    index = [row["index"] for row in found]
    expected = {row["index"] for row in rows if 0 <= row["index"] < scheduled}
    assert index == (sorted(expected) if status == "running" else list(range(scheduled)))
    for row in found:
        assert row["label"] in names.LABELS
        assert (row["reason"] is None) == (row["label"] == names.GOOD)
        if row["label"] == names.DROPPED:
            assert row["reason"] in names.DROP_REASONS and row["answered"] == "no"
        if row["label"] == names.INVALID:
            assert row["reason"] in names.INVALID_REASONS
        if row["label"] == names.GOOD:
            assert row["answered"] == row["in_time"] == "yes" and row["correct"] != "no"
        assert row["answered"] == "yes" or not (row["late"] or row["wrong_kind"] or row["in_time"] == "yes")


# --- hangs ---


def scrape(*moments: tuple[float, float, float]) -> pa.Table:
    """(t, running, tokens)"""
    samples = []
    for at, running, tokens in moments:
        for name, value in ((names.M_RUNNING, running), (names.M_GENERATION_TOKENS + "_total", tokens)):
            samples.append(
                {"t_s": at, "source": TARGET + "/metrics", "name": name, "labels": "{}", "value": float(value)}
            )
    return pa.Table.from_pylist(samples, schema=SERIES)


def test_stalls_are_spans_of_running_work_without_tokens() -> None:
    series = scrape(
        (0, 1, 10), (1, 1, 20), (2, 2, 20), (3, 2, 20), (4, 2, 30), (5, 0, 30), (6, 0, 30), (7, 1, 30), (8, 1, 30)
    )
    assert outcomes.stall_windows(series) == {TARGET + "/metrics": [(1, 4), (7, float("inf"))]}
    assert outcomes.stall_windows(SERIES.empty_table()) == {}


@pytest.mark.parametrize(
    ("window", "error", "reason"),
    [
        ((5.0, 99.0), names.TIMEOUT_FIRST_TOKEN, "hang"),
        ((0.0, float("inf")), names.TIMEOUT_TOTAL, "hang"),
        ((7.0, 99.0), names.TIMEOUT_TOTAL, "timeout_total"),  # less than half of the wait
        ((1.0, 9.0), names.TIMEOUT_TOTAL, "timeout_total"),  # tokens came again before the timeout
        ((0.0, 99.0), names.RESET, "reset"),
    ],
)
def test_a_timeout_is_a_hang_only_with_evidence(window: tuple[float, float], error: str, reason: str) -> None:
    row = dropped_row(intended_s=1.0, error=error, end_s=11.0)
    assert one(row, stalls={TARGET + "/metrics": [window]})["reason"] == reason
    assert one(row, stalls={"http://other:1/metrics": [window]})["reason"] == error
    assert one(row)["reason"] == error
