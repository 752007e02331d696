"""A region that was dragged over on the heatmap is a link to its explanation."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from dashboards.facts.chosen import Chosen, indices
from dashboards.source import open_source
from telemetry.explain import explain
from telemetry.explain.text import headline
from tests.pages.opening import open_page, text_of


def test_a_region_of_the_heatmap_is_explained_alone(root: Path) -> None:
    asked = {"from": "5", "to": "20", "low": "0.5", "label": "late"}
    links = [one.proto for one in open_page("heatmap", **asked).get("page_link")]
    link = next(one for one in links if one.label == "Explain these requests")
    query = dict(parse_qsl(link.query_string))
    run = open_source(root / "20260101-000002-aaaa")
    base = open_source(root / "20260101-000001-aaaa")
    chosen = Chosen.of_address(query)
    assert chosen == Chosen(label="late", from_s=5.0, to_s=20.0, low_s=0.5) and indices(run, chosen)
    found = explain([base.bundle], [run.bundle], slo=run.policy, chosen=indices(run, chosen))
    text = text_of(open_page("explain", **query))
    assert headline(found) in text and f"for the {len(indices(run, chosen)):,} requests that were chosen" in text
    nobody = text_of(open_page("explain", **{"from": "1e6"}))
    assert "for the 0 requests" in nobody and "Explain the whole run" in nobody
    assert Chosen.of_address({"from": "nan", "low": "x", "by": "y", "label": ""}).empty
