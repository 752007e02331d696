"""The browser, and the pages served on two runs, for the tests that need them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from benchmarks.big_bundle import write_bundle
from dashboards import stack
from dashboards.processes import Children, choose_port
from telemetry.bundle import Bundle
from tests.bundles import make_bundle
from tests.pages.browsing import ARGUMENTS, CHROMIUM

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        assert not os.environ.get("CI"), "chromium is missing: apt-get install chromium"
        pytest.skip("chromium is missing: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Bundle]]]:
    """The pages as `demo` and `up` start them, on three runs, oldest first.

    One that holds its SLO, an overload with spans, and one of two replicas with a surge, drops and wrong answers.
    """
    root = tmp_path_factory.mktemp("runs")
    bundles = [
        make_bundle(root, n=120, seed=1),
        make_bundle(root, n=200, seed=2, overload=True),
        write_bundle(root, 1_500, seed=3),
    ]
    with pytest.MonkeyPatch.context() as patch, Children(tmp_path_factory.mktemp("logs")) as children:
        patch.setenv("TAILSPAN_RUNS", str(root))
        part = stack.start_page(children, port=choose_port(0, "the page", "--ui-port"))
        yield part.url, bundles
