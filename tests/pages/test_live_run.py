"""The page Live in a real Chromium beside a real run: the server waits until the page has been read."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dashboards import stack
from dashboards.processes import Children, choose_port
from models.tiny import write_tiny
from tests.bundles import make_bundle
from tests.loadgen.place import COUNT, WAIT_S, Place, script
from tests.loadgen.stub import Request, Step, StubThread
from tests.pages.browsing import WIDE, Opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser
FIRST = 20  # requests answered before the page is read
_GOOD = "() => Number(document.querySelector('[data-testid=tile-good] .ts-count')?.innerText.split(' ')[0] ?? -1)"


def test_a_run_is_followed_to_its_end(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, write_tiny(tmp_path / "model"))
    monkeypatch.setenv("TAILSPAN_RUNS", str(place.runs))
    make_bundle(place.runs, n=30)
    good = script(place.model)
    read, asked, lock = threading.Event(), [0], threading.Lock()

    def play(request: Request) -> Iterable[Step]:
        if request.path == "/v1/chat/completions" and request.json.get("stream"):
            with lock:
                asked[0] += 1
                late = asked[0] > FIRST
            while late and not read.is_set():
                yield 0.02
        yield from good(request)

    with StubThread(play) as stub, Children(tmp_path / "logs") as children:
        url = stack.start_page(children, port=choose_port(0, "the page", "--ui-port")).url
        opened = Opened(browser, f"{url}/live?lang=en", WIDE)
        assert "No run is going here." in opened.page.inner_text("[data-testid=stMain]")
        process = place.start(stub.url)
        try:
            opened.page.wait_for_timeout(500)
            while "No run is going here." in opened.page.inner_text("[data-testid=stMain]"):
                opened.page.get_by_role("button", name="Look again").click()
                opened.settle()
            opened.page.wait_for_function(f"() => ({_GOOD})() >= {FIRST}", timeout=WAIT_S * 1000)
            shown = opened.page.inner_text("[data-testid=stMain]")
            assert opened.page.evaluate(_GOOD) == FIRST
            assert f"{FIRST} of {COUNT} requests so far" in shown
            opened.check()
            read.set()
            opened.page.wait_for_function(
                "() => document.querySelector('[data-testid=stMain]').innerText.includes('No run is going here.')",
                timeout=WAIT_S * 1000,
            )
            opened.check()
            process.communicate(timeout=WAIT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
    bundle = place.bundle()
    assert process.returncode == 0 and bundle.table("requests", ["index"]).num_rows == COUNT
