"""A million requests on the pages: how long until the first figure stands there, and how long each filter takes.

Usage: python -m benchmarks.accept_pages [--requests 1000000] [--seed 7] [--folder build/accept-pages]
Measured in a real Chromium at 1440x900 on the pages as ``up`` starts them.  The first figure: from the navigation to
the first count on the page, in a server that has not read the run before; the run's verdicts lie beside it, as every
``tailspan run`` leaves them.  A filter: from the click that chooses until the page has answered it, each asked for the
first time.
Holds when the first figure takes less than 2 s and every filter less than 1 s; another deadline, which has every
request judged anew, is measured and not held to that.  It measures time: quiet the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import sync_playwright

from benchmarks.big_bundle import write_bundle
from dashboards import stack
from dashboards.processes import Children, choose_port
from telemetry import slo
from telemetry.bundle import list_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FIRST_FIGURE_S: Final = 2.0
FILTER_S: Final = 1.0
_CHROMIUM: Final = "/usr/bin/chromium"
_OPENINGS: Final = 3
_READY: Final = """() => document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'
    && !document.querySelector('[data-stale=true]') && !document.querySelector('[data-testid=stSkeleton]')"""
_BUSY: Final = "() => document.querySelector('[data-testid=stApp]')?.dataset.testScriptState !== 'notRunning'"


@dataclass(frozen=True, slots=True)
class Filter:
    """One thing that a visitor does on a page.  do: does it, and tells when (``perf_counter``) its last click began."""

    page: str
    what: str
    do: Callable[[Page], float]
    held: bool = True  # to the bound; other deadlines judge every request anew, which is no filter


def _press(text: str) -> Callable[[Page], float]:
    def do(page: Page) -> float:
        began = time.perf_counter()
        page.get_by_role("radio", name=text, exact=True).first.click()
        return began

    return do


def _pick(label: str, option: str) -> Callable[[Page], float]:
    def do(page: Page) -> float:
        box, choice = page.get_by_role("combobox", name=label), page.get_by_role("option", name=option, exact=True)
        for _ in range(3):
            box.click()
            began = time.perf_counter()
            try:
                choice.first.click(timeout=3_000)
            except PlaywrightTimeout:  # the list closes when the page is drawn again under it
                continue
            return began
        raise SystemExit(f"no option {option!r} in {label!r}")

    return do


def _type(label: str, value: str) -> Callable[[Page], float]:
    def do(page: Page) -> float:
        page.get_by_label(label).first.fill(value)
        began = time.perf_counter()
        page.keyboard.press("Enter")
        return began

    return do


FILTERS: Final = (
    Filter("heatmap", "time to first token", _press("Time to first token")),
    Filter("heatmap", "colour by phase", _press("dominant phase")),
    Filter("heatmap", "only late", _pick("Outcome", "late")),
    Filter("heatmap", "one replica", _pick("Replica", "10.0.0.2:8000")),
    Filter("heatmap", "a region of time", _type("From second", "1000")),
    Filter("requests", "window of 30 s", _press("30")),
    Filter("requests", "only queue", _pick("Most time in", "queue")),
    Filter("requests", "another moment", _type("From second", "2500")),
    Filter("request", "another request", _type("Request (its place in the schedule)", "500000")),
    Filter("engine", "the other replica", _pick("Replica", "10.0.0.2:8000")),
    Filter("run", "only dropped", _pick("Outcome", "dropped")),
    Filter("run", "by time to first token", _press("Time to first token")),
    Filter("slo", "another deadline", _type("First token within, s", "0.5"), held=False),
)
#: Pages that are opened once; those above are as well.
PAGES: Final = ("heatmap", "requests", "request", "engine", "run", "slo", "dropped", "quality", "traces", "share")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("build/accept-pages"))
    given = parser.parse_args()
    root = given.folder / f"runs-{given.requests}-{given.seed}"
    if not list_runs(root):
        began = time.perf_counter()
        bundle = write_bundle(root, given.requests, given.seed)
        bundle.verdicts(slo.of_manifest(bundle.manifest))
        print(f"made {given.requests:,} requests in {time.perf_counter() - began:.0f} s: {bundle.path}")
    os.environ["TAILSPAN_RUNS"] = str(root)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox", "--headless=new"])
        firsts = [_first_figure(browser, given.folder / "logs") for _ in range(_OPENINGS)]
        opened, filtered = _walk(browser, given.folder / "logs")
        browser.close()
    return _report(given.requests, firsts, opened, filtered)


@contextmanager
def _served(logs: Path) -> Iterator[str]:
    with Children(logs) as children:
        yield stack.start_page(children, port=choose_port(0, "the page", "--ui-port")).url


def _first_figure(browser: Browser, logs: Path) -> tuple[float, float]:
    """Seconds until the first count, and until the page is whole, in a server that has just started.

    A page without the run is opened first: what Streamlit and the browser load once is not the run's.
    """
    with _served(logs) as url:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{url}/live?lang=en")
        page.wait_for_function(_READY, timeout=60_000)
        began = time.perf_counter()
        page.goto(f"{url}/?lang=en")
        page.wait_for_selector(".ts-count", timeout=120_000)
        first = time.perf_counter() - began
        page.wait_for_selector("[data-testid=stVegaLiteChart] :is(canvas, svg.marks)", timeout=120_000)
        page.wait_for_function(_READY, timeout=120_000)
        whole = time.perf_counter() - began
        page.close()
    return first, whole


def _walk(browser: Browser, logs: Path) -> tuple[dict[str, float], dict[str, float]]:
    opened: dict[str, float] = {}
    filtered: dict[str, float] = {}
    with _served(logs) as url:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{url}/?lang=en")
        page.wait_for_selector("[data-testid=stVegaLiteChart] :is(canvas, svg.marks)", timeout=120_000)
        page.wait_for_function(_READY, timeout=120_000)
        for name in PAGES:
            began = time.perf_counter()
            page.goto(f"{url}/{name}?lang=en")
            page.wait_for_selector("[data-testid=stMarkdown], .ts-verdict", timeout=60_000)
            page.wait_for_function(_READY, timeout=60_000)
            opened[name] = time.perf_counter() - began
            for one in FILTERS:
                if one.page == name:
                    filtered[f"{name}: {one.what}"] = _answered(page, one)
            if page.query_selector("[data-testid=stException]"):
                raise SystemExit(f"{name}: {page.inner_text('[data-testid=stException]')}")
        page.close()
    return opened, filtered


def _answered(page: Page, one: Filter) -> float:
    began = one.do(page)
    page.wait_for_function(_BUSY, timeout=10_000, polling=5)  # a click that starts nothing is a fault of this script
    page.wait_for_function(_READY, timeout=60_000, polling=20)
    return time.perf_counter() - began


def _report(
    requests: int, firsts: list[tuple[float, float]], opened: dict[str, float], filtered: dict[str, float]
) -> int:
    first = [pair[0] for pair in firsts]
    whole = [pair[1] for pair in firsts]
    print(f"\n{requests:,} requests, {os.cpu_count()} CPUs\n\n| what | seconds | allowed |\n|---|---|---|")
    of = f"median of {len(first)}, worst {max(first):.2f}"
    print(f"| triage, first figure ({of}) | {statistics.median(first):.2f} | {FIRST_FIGURE_S:g} |")
    print(f"| triage, whole page (worst {max(whole):.2f}) | {statistics.median(whole):.2f} | |")
    for name, seconds in opened.items():
        print(f"| {name}, opened | {seconds:.2f} | |")
    held = {f"{one.page}: {one.what}" for one in FILTERS if one.held}
    for name, seconds in filtered.items():
        print(f"| {name} | {seconds:.2f} | {format(FILTER_S, 'g') if name in held else ''} |")
    slow = [name for name, seconds in filtered.items() if name in held and seconds >= FILTER_S]
    holds = max(first) < FIRST_FIGURE_S and not slow
    print(f"\n{'holds' if holds else 'DOES NOT HOLD'}" + (f": too slow: {', '.join(slow)}" if slow else ""))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
