"""Every page in a real Chromium on real bundles: it draws, says what the command line says, and asks nobody outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dashboards.facts import who
from dashboards.source import open_source
from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.summary import Summary, format_seconds, summarize
from tests.pages.browsing import CHARTS, PHONE, WIDE, Opened
from tests.pages.opening import PAGES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
#: Pages that draw at least so many charts on the newest of the served runs.
DRAWN = {
    "triage": 1, "run": 4, "requests": 2, "request": 3, "heatmap": 1, "engine": 4, "dropped": 2, "compare": 2,
    "explain": 2, "traces": 3,
}  # fmt: skip
Served = tuple[str, list[Bundle]]


def address(url: str, page: str, **query: str) -> str:
    words = "&".join(f"{key}={value}" for key, value in query.items())
    return f"{url}/{'' if page == 'triage' else page}?{words}"


def shown_by_the_command_line(bundle: Bundle) -> dict[str, Any]:
    """What ``tailspan runs show --json`` prints, from a process of its own."""
    argv = [sys.executable, "-m", "tailspan", "runs", "show", str(bundle.path), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_says(page: Page, labels: dict[str, int], sentence: str) -> None:
    assert sentence in page.inner_text("[data-testid=verdict]")
    for label, n in labels.items():
        if page.query_selector(f"[data-testid=tile-{label}]") or n:
            count = page.inner_text(f"[data-testid=tile-{label}] .ts-count").split()[0]
            assert int(count.replace(",", "")) == n, label


@pytest.mark.parametrize("name", PAGES)
def test_every_page_draws_without_complaint(browser: Browser, served: Served, name: str) -> None:
    opened = Opened(browser, address(served[0], name, lang="en"), WIDE)
    page = opened.page
    opened.check()
    page.wait_for_function(  # Vega draws when it has the processor
        "([charts, n]) => document.querySelectorAll(charts).length >= n", arg=[CHARTS, DRAWN.get(name, 0)]
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDE[0]
    keep(page, f"{name}-wide")
    opened.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_a_phone_in_the_dark_and_in_chinese(browser: Browser, served: Served, name: str) -> None:
    opened = Opened(browser, address(served[0], name, lang="zh"), PHONE, "dark")
    page = opened.page
    opened.check()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert any("\u4e00" <= letter <= "\u9fff" for letter in page.inner_text("[data-testid=stMain]"))
    ground = page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
    assert sum(int(part) for part in ground.split("(")[1].rstrip(")").split(",")[:3]) < 200
    keep(page, f"{name}-phone")
    opened.context.close()


def keep(page: Page, name: str) -> None:
    """A picture for whoever asks for one: TAILSPAN_SHOTS names the folder."""
    if folder := os.environ.get("TAILSPAN_SHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_triage_needs_no_scrolling(browser: Browser, served: Served) -> None:
    opened = Opened(browser, address(served[0], "triage", lang="en"), WIDE)
    assert opened.page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight") <= WIDE[1]
    opened.context.close()


def test_the_figures_are_those_of_the_command_line(browser: Browser, served: Served) -> None:
    url, bundles = served
    told = shown_by_the_command_line(bundles[-1])
    opened = Opened(browser, address(url, "triage", lang="en"), WIDE)
    assert_says(opened.page, told["labels"], told["sentence"])
    page = opened.go(address(url, "run", lang="en"))
    assert_says(page, told["labels"], told["sentence"])
    cells = [[td.inner_text() for td in tr.query_selector_all("td")] for tr in page.query_selector_all(".ts-table tr")]
    by_name = {row[0]: row for row in cells if row}
    for latency in told["latencies"]:
        for value in latency["scheduled"]:
            name = latency["measure"] if latency["measure"] == "e2e" else latency["measure"].upper()
            row = by_name[f"{name} p{value['p']:g}"]
            assert row[1].rstrip(" *") == ("unbounded" if value["value"] is None else format_seconds(value["value"]))
            assert row[1].endswith("*") == (not value["certified"])
            assert row[3] == f"{value['n']:,}"
    page = opened.go(address(url, "share", lang="en"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Figures as JSON").click()
    assert json.loads(Path(download.value.path()).read_text()) == told
    page = opened.go(address(url, "dropped", lang="en"))
    text = page.inner_text("[data-testid=stMain]")
    assert all(f"{n:,}" in text for n in told["reasons"][names.DROPPED].values())
    page = opened.go(address(url, "heatmap", lang="en"))
    assert f"In the whole map: {told['attempted']:,}" in page.inner_text("[data-testid=stMain]")
    opened.check()
    opened.context.close()


def test_the_address_chooses_the_run_and_a_ranking_its_slowest(browser: Browser, served: Served) -> None:
    url, bundles = served
    opened = Opened(browser, address(url, "run", run=bundles[0].run_id, lang="en"), WIDE)
    summary = of(bundles[0])
    assert_says(opened.page, summary.labels, summary.sentence)
    opened.page.get_by_text("Time to first token", exact=True).last.click()
    opened.settle()
    assert "by=ttft" in opened.page.url
    assert bundles[0].run_id in opened.page.url
    opened.check()
    opened.context.close()


def test_a_region_dragged_over_the_heatmap_filters(browser: Browser, served: Served) -> None:
    opened = Opened(browser, address(served[0], "heatmap", lang="en"), WIDE)
    page = opened.page
    box = page.locator(CHARTS).first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.35 * box["width"], box["y"] + 0.1 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.5 * box["height"], steps=8)
    page.mouse.up()
    page.get_by_text("In the region:").wait_for(timeout=20_000)
    opened.settle()
    assert all(f"{edge}=" in page.url for edge in ("from", "to", "low", "high"))
    again = Opened(browser, page.url, WIDE)
    line = [o.page.get_by_text("In the region:").first.inner_text() for o in (opened, again)]
    assert line[0] == line[1]
    opened.check()
    for one in (opened, again):
        one.context.close()


def test_an_example_of_triage_is_one_click_away_and_keeps_the_run(browser: Browser, served: Served) -> None:
    url, bundles = served
    opened = Opened(browser, address(url, "triage", run=bundles[1].run_id, lang="en"), WIDE)
    example = who.examples(open_source(bundles[1].path))[0]
    opened.page.get_by_role("link", name=f"#{example['index']} ·").click()
    opened.page.get_by_text(f"#{example['index']}: {example['label']}").wait_for(timeout=20_000)
    opened.settle()
    assert f"run={bundles[1].run_id}" in opened.page.url
    opened.check()
    opened.context.close()


def test_pages_are_reached_by_keyboard(browser: Browser, served: Served) -> None:
    opened = Opened(browser, address(served[0], "triage", lang="en"), WIDE)
    page = opened.page
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement?.innerText?.trim() || ''"))
        if seen[-1] == "Heatmap":
            break
    assert seen[-1] == "Heatmap", seen
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Heatmap").wait_for(timeout=20_000)
    opened.settle()
    opened.check()
    opened.context.close()


def of(bundle: Bundle) -> Summary:
    return summarize(bundle, slo.of_manifest(bundle.manifest))
