"""From failed checks and the findings of canaries to a kind of wrong, and what that does to the run's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from models.errors import UserError
from telemetry import canary_report, names
from telemetry.canary_report import CanaryReport
from telemetry.gate import gate
from telemetry.gate_text import markdown
from telemetry.schema import REQUESTS
from telemetry.summary import summarize
from telemetry.wrong_cause import LAYERS, NONE, cause
from tests.bundles import answered_row
from tests.telemetry.test_summary import DEMO, bundle_of, text_of


def kind(changes: dict[str, Any], report: CanaryReport | None = None, share: int = 2, n: int = 100) -> tuple[str, str]:
    """The kind and the evidence where every ``share``-th row has these columns."""
    rows = [answered_row(i, i * 0.1, **(changes if i % share == 0 else {})) for i in range(n)]
    found = cause(pa.Table.from_pylist(rows, schema=REQUESTS), report)
    assert found.kind == NONE or found.layer == LAYERS[found.kind]
    return found.kind, found.evidence


def said(verdict: str, *kinds: str) -> CanaryReport:
    findings = [("same", "task", "questions: not called worse"), *((verdict, one, f"seen by {one}") for one in kinds)]
    return CanaryReport(verdict, tuple(findings), {"place": {}, "replica": {}})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, NONE),
        ({"prompt_tokens_reported": 101}, "double BOS"),
        ({"prompt_tokens_reported": 80}, "template"),
        ({"model_asked": "toy", "model": "other"}, "model"),
        ({"output_chars": 0, "completion_tokens_counted": 0}, "empty"),
        ({"completion_tokens_reported": 6}, "truncated"),
        ({"dominance": 1.0}, "text"),
        ({"special_leaks": 3}, "text"),
        ({"answer_matches": False}, NONE),  # of the model's knowledge, not of the server
    ],
)
def test_failed_checks(changes: dict[str, Any], expected: str) -> None:
    assert kind(changes)[0] == expected
    if changes:
        assert kind(changes, share=50)[0] == NONE, "two answers are chance"


def test_a_difference_that_grows_with_the_text_is_a_tokenizer() -> None:
    rows = [answered_row(i, i * 0.1, prompt_tokens_reported=101 + i % 9) for i in range(100)]
    found = cause(pa.Table.from_pylist(rows, schema=REQUESTS), None)
    assert found.kind == "tokenizer" and "+1 to +9 prompt tokens on 100 of 100 prompts" in found.evidence


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (said("same", "golden"), NONE),
        (said("broken", "golden"), "broken"),
        (said("broken", "golden", "concurrency"), "concurrency"),
        (said("broken", "cache", "sampling"), "cache"),
        (said("broken", "no-end"), "no end"),
        (said("broken", "server-error"), "server error"),
        (said("numeric drift", "drift", "task"), "numeric drift"),
    ],
)
def test_findings_of_canaries(report: CanaryReport, expected: str) -> None:
    assert kind({}, report)[0] == expected


def test_direct_evidence_is_believed_before_what_follows_from_it() -> None:
    """Another template breaks every golden too; what it is, the prompt tokens say."""
    assert kind({"prompt_tokens_reported": 80}, said("broken", "golden", "cache"))[0] == "template"
    assert kind({"completion_tokens_reported": 6}, said("broken", "golden"))[0] == "truncated"
    silent = {"output_chars": 0, "completion_tokens_counted": 0}
    assert kind(silent, said("broken", "golden"))[0] == "empty"
    assert kind(silent, said("broken", "cache"))[0] == "cache", "wrong pages may make a model say nothing"
    assert kind({"completion_tokens_reported": 6}, said("broken", "non-finite"))[0] == "non-finite"
    assert kind({"dominance": 1.0}, said("numeric drift", "drift"))[0] == "text"


def test_what_the_canaries_found_goes_into_sentence_exit_code_and_reports(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [answered_row(i, i * 0.1) for i in range(60)])
    assert summarize(bundle, DEMO).canary_report is None
    for verdict, code in (("same", 0), ("numeric drift", 2), ("broken", 1)):
        found = [{"verdict": verdict, "kind": "golden", "said": f"goldens: as | {verdict}"}]
        (bundle.path / canary_report.FILE).write_text(
            json.dumps({"verdict": verdict, "findings": found, "pairs": {"place": {}, "replica": {}}})
        )
        summary = summarize(bundle, DEMO)
        assert summary.decision == "held" and summary.exit_code == code
        assert (f"; canaries: {verdict}" in summary.sentence) == (code != 0)
        assert f"canaries: {verdict}" in text_of(summary) and f"goldens: as | {verdict}" in text_of(summary)
        text = markdown(gate(bundle, DEMO))
        assert f"Canaries: **{verdict}**" in text and f"- goldens: as \\| {verdict}" in text
        assert json.loads(json.dumps(summary.to_dict()))["canary_report"]["verdict"] == verdict
    assert summary.wrong_cause.kind == "broken" and "wrong   looks like: broken" in text_of(summary)
    bundle.update(status="interrupted")
    assert summarize(bundle, DEMO).exit_code == names.EXIT_INTERRUPTED
    (bundle.path / canary_report.FILE).write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        summarize(bundle, DEMO)
