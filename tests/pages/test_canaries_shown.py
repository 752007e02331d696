"""What canaries among the load found, on the page Quality and in the report that is mailed."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from dashboards import report
from telemetry import canary_report
from telemetry.canary_report import CanaryReport
from tests.bundles import answered_row
from tests.pages.opening import open_page, text_of
from tests.telemetry.test_summary import bundle_of


def test_quality_and_the_report_show_what_mixed_canaries_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [answered_row(k, 1.0 + k, canary_kind="golden" if k % 2 else None) for k in range(20)]
    bundle = bundle_of(tmp_path, rows)
    evil = "http://<b>replica</b>"
    counted = {"same": 4, "numeric drift": 1, "broken": 2}
    found = CanaryReport(
        "broken",
        (("broken", "cache", "asked alone, none of 2 changes at first: the prefix cache"), ("same", "drift", "fine")),
        {"place": {"hit": counted, "miss": {"same": 3}}, "replica": {evil: counted}},
    )
    (bundle.path / canary_report.FILE).write_text(json.dumps(found.to_dict()))
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    page = text_of(open_page("quality", run=bundle.run_id))
    mailed = html.unescape(report.render(bundle.path))
    for text in (page, mailed):
        assert "broken" in text and all(said in text for _, _, said in found.findings)
        for side in (*(canary_report.PLACES[place] for place in ("hit", "miss")), evil):
            assert side in text
    assert "<b>replica" not in report.render(bundle.path)
    plain = bundle_of(tmp_path, rows)
    assert "Verdict on them" not in text_of(open_page("quality", run=plain.run_id))
    assert "<h2>Canaries</h2>" in report.render(bundle.path) and "<h2>Canaries</h2>" not in report.render(plain.path)
