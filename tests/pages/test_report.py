"""The report: one file, no network, small, escaped, and its figures those of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tailspan
from dashboards import report
from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.parts import VERSION_KEY
from telemetry.schema import REQUESTS, SCHEMA_VERSION
from telemetry.summary import summarize
from tests.bundles import answered_row, dropped_row, make_bundle
from tests.telemetry.test_summary import bundle_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_case_20_the_report_opens_with_the_network_off(browser: Browser, tmp_path: Path, scheme: str) -> None:
    bundle = make_bundle(tmp_path / "runs", overload=True)
    file = tmp_path / "report.html"
    assert tailspan.main(["report", bundle.run_id, "--root", str(tmp_path / "runs"), "-o", str(file)]) == 0
    complaints: list[str] = []
    asked: list[str] = []
    context = browser.new_context(
        viewport={"width": 1200, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
    )
    context.set_offline(True)
    try:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        summary = summarize(bundle, slo.load("demo"))
        assert page.locator(".verdict b").inner_text() == summary.sentence
        assert page.locator("svg").count() >= 5
        for box in (one.bounding_box() for one in page.locator("svg").all()):
            assert box is not None and box["width"] > 300 and box["height"] > 40
        assert page.locator(".tile").count() == len(names.LABELS)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert asked == [file.as_uri()] and complaints == []
    finally:
        context.close()


def test_it_refers_to_nothing_outside(tmp_path: Path) -> None:
    text = report.render(make_bundle(tmp_path).path)
    assert "default-src 'none'" in text
    assert not re.search(
        r"(?i)<(script|link|img|iframe|object|embed|base)\b|\b(src|href)\s*=|url\(|@import|javascript:", text
    )


def test_texts_of_strangers_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'"
    rows = [answered_row(0, replica=evil), dropped_row(1, error_detail=evil)]
    bundle = bundle_of(tmp_path, rows, trace={"name": evil}, command=evil, targets=[evil])
    policy = slo.parse(
        f"name: 'x<script>'\ndescription: |\n  {evil}\nclasses: {{default: {{}}}}\nobjectives: [goodput >= 1 %]", "e"
    )
    text = report.render(bundle.path, policy)
    assert "<script" not in text and "&lt;script&gt;" in text


def test_100000_requests_stay_below_a_megabyte(tmp_path: Path) -> None:
    """Built from columns, since rows would take minutes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    n = 100_000
    one = pa.Table.from_pylist([answered_row(0, chunk_s=None, chunk_tokens=None, text=None)], schema=REQUESTS)
    table = one.take(pa.array(np.zeros(n, dtype=np.int64)))
    rng = np.random.default_rng(1)
    intended = np.sort(rng.uniform(0, 3600, n))
    first = intended + rng.gamma(2, 0.3, n)
    columns = {"index": np.arange(n), "intended_s": intended, "sent_s": intended, "first_token_s": first,
               "last_token_s": first + 1, "end_s": first + rng.gamma(3, 1.0, n)}  # fmt: skip
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    bundle = Bundle.create(tmp_path, {}, scheduled=n, trace={"name": "large"}, slo=slo.load("demo").manifest_entry())
    (bundle.path / "requests").mkdir()
    table = table.replace_schema_metadata({VERSION_KEY: str(SCHEMA_VERSION)})
    pq.write_table(table, bundle.path / "requests" / "data.parquet")
    bundle.update(status="complete")
    size = report.write(bundle.path, tmp_path / "big.html")
    assert size < 1_000_000
    assert f"{n:,}" in (tmp_path / "big.html").read_text()


def test_another_slo_and_runs_without_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = bundle_of(tmp_path / "runs", [dropped_row(i, float(i)) for i in range(5)])
    file = tmp_path / "sub" / "r.html"
    assert tailspan.main(["report", "latest", "--root", str(tmp_path / "runs"), "-o", str(file), "--slo", "voice"]) == 0
    text = file.read_text()
    assert "SLO broken: 0 of 5 good" in text and "spoken" in text
    assert re.search(r"r\.html \(\d+ KiB\)", capsys.readouterr().out)
    assert bundle_of(tmp_path / "none", [], status="interrupted").path.is_dir()
    assert "No verdict" in report.render(next((tmp_path / "none").glob("*")))
    assert tailspan.main(["report", "latest", "--root", str(tmp_path / "runs"), "-o", str(tmp_path)]) == 4
    assert "cannot be written" in capsys.readouterr().err
    assert bundle.run_id


def test_curves_end_where_the_dropped_begin() -> None:
    import numpy as np

    curve = report._curve(np.array([1.0, 3.0, 2.0, np.inf]))
    assert curve[0] == (1.0, 0.25) and curve[-1] == (3.0, 0.75)
    assert report._curve(np.array([])) == [] and report._curve(np.array([np.inf])) == []
    many = report._curve(np.arange(100_000) / 1000)
    assert len(many) <= report.CURVE_POINTS + 1 and many[-1] == (99.999, 1.0)
