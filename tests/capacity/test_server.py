"""`tailspan capacity` against a server: real processes, a scripted server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.options import Options
from loadgen.prepare import prepare
from loadgen.run import run
from telemetry import names
from telemetry.bundle import INCOMPLETE, Bundle
from tests.loadgen.place import COUNT, WAIT_S, Place, chats, script
from tests.loadgen.stub import StubThread, unused_port


def test_a_search_runs_what_tailspan_run_runs_and_keeps_it_in_its_folder(place: Place, model: Path) -> None:
    with StubThread(script(model)) as stub:
        process = place.start(stub.url, "--group", "g", "--max-runs", "3", "--json", command="capacity")
        out, err = process.communicate(timeout=WAIT_S)
        asked = len(chats(stub))
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["ended"] == "unbounded", "every rate holds, so that none of the three is kept for a way down"
    assert [one["verdict"] for one in found["points"]] == ["held"] * 3
    assert sum(one["requests"] for one in found["points"]) == asked
    point, *_, last = found["points"]
    assert point["requests"] == COUNT and point["rate"] == pytest.approx(COUNT / 3.0, rel=0.02)
    bundle = Bundle.open(place.runs / "g" / point["run"])
    assert bundle.manifest["capacity"] == {"kind": "search", "number": 0}
    assert bundle.manifest["validity"]["verdict"] == names.VALID
    state = json.loads((place.runs / "g" / "capacity.json").read_text())
    assert state["points"] == found["points"] and state["answer"]["at_least"] == last["rate"]


def test_a_target_that_is_not_there_is_refused_before_any_run(place: Place) -> None:
    process = place.start(f"http://127.0.0.1:{unused_port()}", command="capacity")
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == names.EXIT_USAGE
    assert "no answer" in err and "start the server, then search" in err
    assert not place.runs.exists()


def test_a_run_that_is_lost_is_cut_and_says_why(place: Place, model: Path) -> None:
    with StubThread(script(model, wait=0.3)) as stub:
        options = Options(
            targets=stub.url, trace=str(place.trace), slo=str(place.folder / "slo.yaml"), model=str(model),
            runs=str(place.runs), otlp_port=0, speed=0.1,
        )  # fmt: skip
        prepared = prepare(options, Console(quiet=True))
        bundle, summary = run(
            options,
            prepared,
            Console(quiet=True),
            lost=lambda totals, labels: "made to" if totals.done >= 3 else None,
        )
    assert bundle.status == INCOMPLETE and bundle.manifest["stopped"] == "made to"
    assert 3 <= bundle.table("requests").num_rows < COUNT
    assert summary.validity.verdict == names.INCOMPLETE
    assert any("ended early after" in reason and "made to" in reason for reason in summary.validity.reasons)
    assert all(worker["status"] == "ok" for worker in bundle.manifest["workers"]), "nobody was lost"
    assert summary.reasons[names.INVALID].keys() == {names.CUT_BY_END}
