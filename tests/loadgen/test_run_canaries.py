"""Whole runs with canaries among the load, against a model that can be spoilt: findings, labels, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from loadgen.canaries.client import Client
from loadgen.canaries.probes import HOT
from loadgen.canaries.record import record
from models.store import load_reference
from models.tiny import write_tiny
from telemetry import canary_report, names
from telemetry.bundle import Bundle
from tests.canaries.fake_model import FakeModel
from tests.loadgen.place import Place, script
from tests.loadgen.stub import Request, StubThread


class Spoilt:
    """A good server for the load, and a FakeModel for what canaries ask."""

    def __init__(self, model: Path) -> None:
        reference = load_reference(str(model))

        def count(prompt: str) -> int:
            chat = reference.template.render([{"role": "user", "content": prompt}])
            return len(reference.tokenizer.encode(chat))

        self.count = count
        self.model = FakeModel(count=count)
        good = script(model)

        def play(request: Request) -> Any:
            if request.path not in ("/v1/chat/completions", "/v1/completions"):
                return good(request)
            body = request.json
            ours = request.path == "/v1/completions" or "logprobs" in body or "cache_salt" in body
            return self.model.play(request) if ours or body.get("temperature") in (0, HOT) else good(request)

        self.stub = StubThread(play)


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Spoilt, Path]]:
    server = Spoilt(write_tiny(tmp_path_factory.mktemp("reference")))
    path = tmp_path_factory.mktemp("canaries") / "c.json"
    with server.stub:
        record(Client(server.stub.url, "stub", {}), runs=2, tokens=8).write(path)
        yield server, path


def ran(place: Place, spoilt: tuple[Spoilt, Path], **fault: Any) -> tuple[int, str, dict[str, Any], Bundle]:
    """A run of 45 requests with 12 canaries: its exit code, stderr, summary and bundle."""
    server, path = spoilt
    server.model = FakeModel(count=server.count, **fault)
    code, out, err = place.run(server.stub.url, "--canaries", str(path), "--canary-share", "0.2", "--json")
    assert out, err
    return code, err, json.loads(out), place.bundle()


def test_healthy_canaries_are_verified_and_stay_out_of_the_latencies(place: Place, spoilt: tuple[Spoilt, Path]) -> None:
    code, err, summary, bundle = ran(place, spoilt)
    assert code == names.EXIT_OK, err
    report = canary_report.read(bundle.path)
    assert report is not None and report.verdict == "same"
    assert summary["attempted"] == 57 and summary["latencies"][0]["scheduled"][0]["n"] == 45
    rows = bundle.table("requests")
    canaries = rows.filter(pc.is_valid(rows.column("canary_kind")))
    assert canaries.column("canary_place").to_pylist() == ["miss", "hit", "plain", "hot"] * 3
    assert canaries.column("cached_tokens").to_pylist()[:3][0] == 0, "its salt is of this run"
    assert summary["verified"] == 9 and summary["canaries"]["checked"] == 9
    said = " ".join(one["said"] for one in summary["canary_report"]["findings"])
    assert "0 of 9 canaries wrong, no alarm; a share of" in said and "3 different answers of 3" in said
    assert "drift: KL 0 nats" in said, "the reference text is scored once the load is over"
    assert report.pairs["place"]["plain"] == {"same": 3, "numeric": 0, "broken": 0}


def test_answers_that_break_on_cache_hits_break_the_run(place: Place, spoilt: tuple[Spoilt, Path]) -> None:
    code, err, summary, _ = ran(place, spoilt, wrong_on_hit=True)
    assert code == names.EXIT_SLO_BROKEN, err
    assert "those that changed asked again alone: broken" in err
    assert summary["reasons"]["wrong"] == {"golden": 6}
    assert summary["sentence"].endswith("; canaries: broken")
    kinds = {one["kind"] for one in summary["canary_report"]["findings"] if one["verdict"] == "broken"}
    assert "cache" in kinds


def test_drift_is_a_regression_and_no_answer_is_called_wrong(place: Place, spoilt: tuple[Spoilt, Path]) -> None:
    code, err, summary, _ = ran(place, spoilt, noise=0.25, salted=False)
    assert code == names.EXIT_REGRESSION, err
    assert "takes no cache_salt" in err
    assert summary["labels"]["wrong"] == 0 and summary["canary_report"]["verdict"] == "numeric drift"
