"""The page in a real Chromium on a real bundle: it draws, says what the command line says, and asks nobody outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dashboards import stack
from dashboards.processes import Children, choose_port
from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.summary import Summary, format_seconds, summarize
from tests.bundles import make_bundle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHARTS = "[data-testid=stVegaLiteChart] :is(canvas, svg.marks)"
WIDE, PHONE = (1440, 900), (390, 844)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        assert not os.environ.get("CI"), "chromium is missing: apt-get install chromium"
        pytest.skip("chromium is missing: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Bundle]]]:
    """The page as `demo` and `up` start it, on two runs: one that holds its SLO and, newer, an overload."""
    root = tmp_path_factory.mktemp("runs")
    bundles = [make_bundle(root, n=120, seed=1), make_bundle(root, n=200, seed=2, overload=True)]
    with pytest.MonkeyPatch.context() as patch, Children(tmp_path_factory.mktemp("logs")) as children:
        patch.setenv("TAILSPAN_RUNS", str(root))
        part = stack.start_page(children, port=choose_port(0, "the page", "--ui-port"))
        yield part.url, bundles


class Opened:
    """One page in a browser context of its own, with all that it complained about and asked for."""

    def __init__(self, browser: Browser, url: str, size: tuple[int, int], scheme: str) -> None:
        self.complaints: list[str] = []
        self.outside: list[str] = []
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        local = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")
        self.page.on("request", lambda r: None if r.url.startswith(local) else self.outside.append(r.url))
        self.page.goto(url)

    def wait(self, charts: int) -> Page:
        """Until the verdict and so many charts are drawn."""
        self.page.wait_for_selector("[data-testid=verdict]", timeout=60_000)
        self.page.wait_for_function(
            "([query, n]) => document.querySelectorAll(query).length >= n", arg=[CHARTS, charts], timeout=60_000
        )
        return self.page


def assert_says(page: Page, summary: Summary) -> None:
    verdict = page.inner_text("[data-testid=verdict]")
    assert summary.sentence in verdict
    assert names.VALID in verdict
    for label in names.LABELS:
        count = page.inner_text(f"[data-testid=tile-{label}] .ts-count").split()[0]
        assert int(count.replace(",", "")) == summary.labels[label], label


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (PHONE, "light")])
def test_the_newest_run_draws_without_complaint(
    browser: Browser, served: tuple[str, list[Bundle]], size: tuple[int, int], scheme: str
) -> None:
    url, bundles = served
    summary = summarize(bundles[1], slo.load("demo"))
    opened = Opened(browser, url, size, scheme)
    page = opened.wait(charts=4)
    assert page.query_selector("[data-testid=stException]") is None
    assert_says(page, summary)
    cells = [[td.inner_text() for td in tr.query_selector_all("td")] for tr in page.query_selector_all(".ts-table tr")]
    by_name = {row[0]: row for row in cells if row}
    for latency in summary.latencies:
        for value in latency.scheduled:
            name = latency.measure if latency.measure == "e2e" else latency.measure.upper()
            row = by_name[f"{name} p{value.p:g}"]
            assert row[1].rstrip(" *") == ("unbounded" if value.value is None else format_seconds(value.value))
            assert row[1].endswith("*") == (not value.certified)
            assert row[3] == f"{value.n:,}"
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    ground = page.evaluate("getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
    brightness = sum(int(part) for part in ground.split("(")[1].rstrip(")").split(",")[:3])
    assert (brightness < 200) == (scheme == "dark")
    assert opened.complaints == []
    assert opened.outside == []
    opened.context.close()


def test_the_address_chooses_the_run_and_a_label_its_slowest(
    browser: Browser, served: tuple[str, list[Bundle]]
) -> None:
    url, bundles = served
    opened = Opened(browser, f"{url}/?run={bundles[0].run_id}", WIDE, "light")
    page = opened.wait(charts=4)
    assert_says(page, summarize(bundles[0], slo.load("demo")))
    page.get_by_text("Time to first token", exact=True).last.click()
    page.wait_for_timeout(500)
    opened.wait(charts=4)
    assert page.query_selector("[data-testid=stException]") is None
    assert opened.complaints == []
    opened.context.close()
