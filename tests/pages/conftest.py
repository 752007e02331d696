"""The browser, and the pages served on two runs, for the tests that need them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """While it is open an event loop runs in this thread: not for longer than the module that asks for it."""
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs of one trace: an older one at half the load, and one with a surge, drops and wrong answers."""
    folder = tmp_path_factory.mktemp("runs")
    for number, (load, seed) in enumerate(((0.5, 4), (0.9, 3)), start=1):
        made_at = write_bundle(folder, 1_500, seed, load).path
        path = made_at.rename(folder / f"20260101-00000{number}-aaaa")
        manifest = json.loads((path / "manifest.json").read_text()) | {"run_id": path.name}
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILSPAN_RUNS", str(folder))
        yield folder
