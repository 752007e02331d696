"""A real Chromium on the real pages: what a page complained about, whom it asked, when it has settled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

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
_SETTLED = """() => document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'
    && document.querySelector('.ts-head, .ts-verdict, h1') && !document.querySelector('[data-stale=true]')
    && [...document.querySelectorAll('[data-testid=stVegaLiteChart]')]
        .every(chart => chart.querySelector('canvas, svg.marks'))"""
#: Streamlit looks for its own address beneath the page's path before it looks at the root, and the browser notes the
#: two 404 in its console; nothing of ours can answer there.
_STREAMLITS_OWN = ("/_stcore/health", "/_stcore/host-config")


class Opened:
    """One page in a browser context of its own, with all that it complained about and asked for."""

    def __init__(self, browser: Browser, url: str, size: tuple[int, int], scheme: str = "light") -> None:
        self.complaints: list[str] = []
        self.outside: list[str] = []
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if scheme == "dark" else "light",
            locale="en-GB",
        )
        self.page: Page = self.context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        local = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")
        self.page.on("request", lambda r: None if r.url.startswith(local) else self.outside.append(r.url))
        self.go(url)

    def go(self, url: str) -> Page:
        """Open an address and wait until it has settled."""
        self.page.goto(url)
        return self.settle()

    def settle(self) -> Page:
        """Until the script has ended and every chart is drawn."""
        self.page.wait_for_timeout(150)
        self.page.wait_for_function(_SETTLED, timeout=60_000)
        return self.page

    def check(self) -> None:
        """No exception on the page, no complaint of the browser, nobody outside was asked."""
        exception = self.page.query_selector("[data-testid=stException]")
        assert exception is None, exception.inner_text() if exception else ""
        assert self.complaints == []
        assert self.outside == []

    def _hear(self, message: ConsoleMessage) -> None:
        own = message.location.get("url", "").endswith(_STREAMLITS_OWN)
        if message.type == "error" and not own:
            self.complaints.append(message.text)
