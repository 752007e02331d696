"""Fixtures of the load generator's tests: a tiny model and a place to run in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from models.tiny import write_tiny
from tests.loadgen.place import Place, words_of


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Iterator[Place]:
    made = Place(tmp_path, model)
    yield made
    for process in made.started:
        if process.poll() is None:  # the test has failed in the middle
            process.kill()
            process.communicate()
    ours = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in words_of(process)]
    _, left = psutil.wait_procs(ours, timeout=15)
    for straggler in left:
        straggler.kill()
    assert not left, "processes were left behind"
