"""`tailspan capacity --virtual` as a user runs it, on a tiny model whose steps take 50 ms whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import tailspan
from engine.replay import TWIN
from engine.step_fit import FEATURES, StepFit
from engine.step_model import Noise
from loadgen.capacity.virtual import after_overload
from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.check import check
from telemetry.twin import TwinLoad, TwinSetting

STEP_S = 0.05
SLO = """
classes: {default: {ttft: {base_s: 1}, e2e: {per_output_token_s: 0.1}}}
objectives: [goodput >= 95 %]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("capacity")


@pytest.fixture(scope="module")
def words(folder: Path, model: Path) -> list[str]:
    """The command line of a search: answers of 10 tokens, batches of 4, so about 4 / (10 x 50 ms) = 8 requests/s."""
    coefficients = dict.fromkeys(FEATURES, 0.0) | {"step": STEP_S}
    fit = StepFit(tuple(coefficients[name] for name in FEATURES), Noise(), 0.0, 100, 0.0, "a test")
    fit.save(folder / "fit.json")
    stamps = [f"2031-02-03 04:05:{n * 0.5:010.7f},40,10" for n in range(60)]
    (folder / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps]))
    (folder / "slo.yaml").write_text(SLO)
    return [
        "capacity", "--virtual", "--model", str(model), "--device", "h100", "--sim-fit", str(folder / "fit.json"),
        "--trace", str(folder / "trace.csv"), "--arrivals", "poisson:rate=1", "--duration", "30",
        "--max-batch", "4", "--kv-blocks", "256",
        "--slo", str(folder / "slo.yaml"), "--runs", str(folder / "runs"), "--start-rate", "5", "--precision", "0.1",
    ]  # fmt: skip


def asked(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, dict[str, Any]]:
    code = tailspan.main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_search_from_end_to_end_answers_again_and_goes_on(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--group", "one", "--device-hour", "3", "--peak", "100", "--volume", "1e9"]
    code, found = asked(capsys, [*words, *more])
    assert code == 0 and found["ended"] in ("found", "rough"), found
    assert 0.6 * 8 < found["rate"] < 8.0, "below what batches of 4 can carry at most"
    assert found["low"] < found["rate"] < found["high"]
    assert found["goodput"] == pytest.approx(found["rate"] * found["good_share"])
    assert found["tokens"] == pytest.approx(10 * found["goodput"], rel=1e-6)
    assert found["cost_output"] == pytest.approx(3 / 3600 / found["tokens"] * 1e6)
    assert found["sizing"]["replicas"] == int(np.ceil(100 / found["low"]))
    assert found["millisecond"]["machine_days"] == pytest.approx(11.574, rel=1e-3)
    assert found["users"] == pytest.approx(found["rate"] * 300)
    assert found["binding"]["binds"] == "batch" and found["descent"] is not None
    assert "a test" in found["simulated"]
    group = folder / "runs" / "one"
    bundle = Bundle.open(group / found["points"][-1]["run"])
    assert bundle.manifest[names.SIMULATED_KEY] == found["simulated"] and bundle.manifest["length_s"] == 30.0
    assert all(finding.ok for finding in check(bundle, slo.of_manifest(bundle.manifest)))
    # asked again it answers from its folder; asked something else it says what differs
    code, again = asked(capsys, [*words, *more])
    assert code == 0 and again == found and len(list(group.iterdir())) == len(found["points"]) + 1
    assert tailspan.main([*words, *more, "--seed", "3"]) == 4
    assert "begun with seed 0, not 3" in capsys.readouterr().err
    # cut before its last two runs, it makes the same ones again
    state = json.loads((group / "capacity.json").read_text())
    (group / "capacity.json").write_text(json.dumps({**state, "points": state["points"][:-2], "answer": None}))
    _, resumed = asked(capsys, [*words, *more])
    assert [(one["rate"], one["margin"]) for one in resumed["points"]] == [
        (one["rate"], one["margin"]) for one in found["points"]
    ]
    assert resumed["rate"] == found["rate"]


def test_a_sweep_draws_the_frontier_and_names_what_binds(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "frontier.md"
    code = tailspan.main([*words, "--sweep", "batch=2,8", "--max-runs", "5", "--group", "s", "-o", str(out)])
    shown = capsys.readouterr().out
    assert code == 0 and "frontier" in shown and "o 2" in shown and "o 8" in shown
    state = json.loads((folder / "runs" / "s" / "capacity.json").read_text())["answer"]
    small, large = state["corners"]
    assert (small["value"], large["value"]) == (2, 8)
    assert large["rate"] > 2 * small["rate"] and large["cost"] < small["cost"] / 2
    assert small["binds"] == "batch" and large["efficient"]
    text = out.read_text()
    assert text.startswith("### Latency and cost over batch") and "| 8 |" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--workers", "2"], "--workers"),
        (["--fit", "0.5"], "--fit"),
        (["--sweep", "seed=1,2"], "names no knob"),
        (["--sweep", "batch=4"], "2 to 12"),
        (["--sweep", "weight-bits=3,4"], "weights of 3 bits"),
        (["--precision", "2"], "--precision"),
        (["--max-runs", "13"], "--max-runs"),
        (["--group", "../x"], "--group"),
        (["--sim-fit", "absent"], "cannot be read"),
        (["--duration", "3", "--slo", "batch"], "asks for 300"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_option(
    words: list[str], change: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tailspan.main([*words, *change]) == 4
    error = capsys.readouterr().err
    assert said in error and "remedy" in error


def test_the_twin_is_for_virtual_time_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    real = [word for word in words if word != "--virtual"]
    assert tailspan.main([*real, "--target", "http://127.0.0.1:9"]) == 4
    assert "this is for the engine's twin" in capsys.readouterr().err
    assert tailspan.main(["capacity", "--virtual"]) == 4
    assert "no device is named" in capsys.readouterr().err


def test_what_comes_after_an_overload_is_measured_on_its_own_clock(words: list[str], model: Path) -> None:
    fit = json.loads(Path(words[words.index("--sim-fit") + 1]).read_text())
    setting = TwinSetting(model=str(model), device="h100", max_batch=4, kv_blocks=256, prefix_cache=False, fit=fit)
    load = TwinLoad(np.arange(20) * 1.0, np.full(20, 40), np.full(20, 10))
    over = TwinLoad(np.arange(600) * 0.1, np.full(600, 40), np.full(600, 10))
    after = after_overload(TWIN, setting, over, load)
    alone = TWIN.replay(load, setting, steps=True, tokens=True)
    assert len(after.ttft_s) == 20 and set(after.outcome.tolist()) == {"length"}
    # the step in hand when all hang up is all that is left of the overload
    assert np.abs(after.e2e_s - alone.e2e_s).max() <= STEP_S + 1e-9
    assert after.steps is not None and alone.steps is not None and after.token_s is not None
    assert after.steps.num_rows == alone.steps.num_rows
    assert 0 <= pc.min(after.steps.column("start_ns")).as_py() <= STEP_S * 1e9
    assert after.token_s[0][0] == pytest.approx(after.ttft_s[0])
