"""The example in docs/ci runs: its own commands, in bash as GitHub runs them, with a scripted server for the real
one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from models.tiny import write_tiny
from tests.loadgen.place import script
from tests.loadgen.stub import Request, Step, StubThread, plain

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "ci" / "github-actions.yml"
#: What a CI machine brings along, or what the scripted server stands in for.
NOT_HERE = ("Install", "Start the server")
SLO = "name: ci\nclasses: {default: {ttft: {base_s: 20}}}\nobjectives: [goodput >= 90 %]\n"


class Job:
    """The steps of the example in a folder of their own."""

    def __init__(self, folder: Path, target: str, model: Path) -> None:
        self.folder = folder
        workflow = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        self.steps = {step["name"]: step for step in workflow["jobs"]["load-test"]["steps"] if "run" in step}
        binary = folder / "bin"
        binary.mkdir()
        (binary / "tailspan").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tailspan "$@"\n')
        (binary / "tailspan").chmod(0o755)
        trace = folder / "trace.csv"
        stamps = (f"2031-02-03 04:05:{n / 20:010.7f},{40 + n % 30},{2 + n % 4}" for n in range(30))
        trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps]), encoding="utf-8")
        (folder / "slo.yaml").write_text(SLO, encoding="utf-8")
        ours = {
            "TAILSPAN_TARGET": target, "TAILSPAN_MODEL": str(model), "TAILSPAN_TRACE": str(trace),
            "TAILSPAN_LOAD": "--seed 7 --otlp-port 0", "TAILSPAN_SLO": "slo.yaml",
        }  # fmt: skip
        assert set(ours) < set(workflow["env"])
        self.environment = {
            **os.environ, **workflow["env"], **ours, "PATH": f"{binary}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1", "GITHUB_STEP_SUMMARY": str(folder / "step-summary.md"),
        }  # fmt: skip

    def step(self, name: str) -> tuple[int, str]:
        """Run one step as GitHub does: `bash -e`.  Returns its exit code and all it printed."""
        done = subprocess.run(
            ["bash", "-e", "-c", self.steps[name]["run"]], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def healthy() -> Iterator[list[bool]]:
    """Whether the server answers; a test may change it."""
    yield [True]


@pytest.fixture
def job(tmp_path: Path, model: Path, healthy: list[bool]) -> Iterator[Job]:
    good = script(model)

    def play(request: Request) -> list[Step]:
        if healthy[0] or request.path == "/v1/models":
            return good(request)
        return [plain("503 Service Unavailable", {"error": {"message": "no room", "type": "overloaded"}})]

    with StubThread(play) as stub:
        yield Job(tmp_path, stub.url, model)


def test_main_sets_the_baseline_and_a_pull_request_is_held_against_it(job: Job, healthy: list[bool]) -> None:
    assert [name for name in job.steps if name not in NOT_HERE] == [
        "Check the SLO file", "Load test", "Report", "Add to the baseline",
    ]  # fmt: skip
    # a push to main: no baseline yet
    assert job.step("Check the SLO file")[0] == 0
    code, told = job.step("Load test")
    assert code == 0, told
    summary = (job.folder / "load-test" / "summary.md").read_text()
    assert summary.startswith("### tailspan: SLO held") and "Against baseline" not in summary
    assert (job.folder / "step-summary.md").read_text() == summary
    assert job.step("Report")[0] == 0
    page = (job.folder / "load-test" / "report.html").read_text()
    assert "SLO held: 30 of 30 good" in page and len(page) < 200_000
    code, told = job.step("Add to the baseline")
    assert code == 0 and told.startswith("main: "), told

    # a pull request that changes nothing
    code, told = job.step("Load test")
    assert code == 0, told
    assert "Against baseline `main` (1 run)" in (job.folder / "load-test" / "summary.md").read_text()

    # a pull request that breaks the server
    healthy[0] = False
    code, told = job.step("Load test")
    assert code == 1, told
    assert (job.folder / "load-test" / "summary.md").read_text().startswith("### tailspan: SLO broken")
    suite = ElementTree.parse(job.folder / "load-test" / "junit.xml").getroot().find("testsuite")
    assert suite is not None and int(suite.get("failures", "0")) >= 1
    assert job.step("Report")[0] == 0  # as `if: always()` asks
    code, told = job.step("Add to the baseline")
    assert code == 0 and told.count(",") == 1, told  # a VALID run may join even when its SLO is broken
