"""How far a run was from its floor: by the engine's own account, by one brought along, and without either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.devices import DEVICES
from models.errors import UserError
from models.known_shapes import SHAPES
from models.roofline import StepCost, efficiency, wall_of
from tailspan import main
from telemetry import names
from telemetry.bundle import COMPLETE, Bundle
from telemetry.floor import floor_of_run
from tests.bundles import answered_row, dropped_row, make_bundle

COST = StepCost(SHAPES["smollm2"].shape, DEVICES["L4"], 2, 2)
TARGET = "http://127.0.0.1:8000"
LABELS = {
    "device": "L4",
    "title": "NVIDIA L4",
    "source": "made for a test",
    "flops_per_second": "1.21e+14",
    "bytes_per_second": "3e+11",
    "fixed_ns": "5000",
    "weight_bytes": "2",
    "kv_bytes": "2",
}


def step(number: int, prefill: int, decodes: int, slowness: float, gap_ns: int = 0, **changes: Any) -> dict[str, Any]:
    """A step that took ``slowness`` times its floor."""
    context = 200 * decodes + prefill
    found = COST.floor_ns(prefill, decodes, context, decodes)
    duration = round(found.floor_ns * slowness)
    start = number * 1_000_000_000
    kind = "mixed" if prefill and decodes else "prefill" if prefill else "decode"
    return {
        "replica": "r", "step": number, "start_ns": start, "end_ns": start + duration, "gap_ns": gap_ns, "kind": kind,
        "decode_seqs": decodes, "prefill_tokens": prefill, "context_tokens": context, "bytes": found.bytes,
        "flops": found.flops, "floor_ns": found.floor_ns, "efficiency": efficiency(found.floor_ns, duration),
        "wall": wall_of(found, duration),
    } | changes  # fmt: skip


def written(root: Path, steps: list[dict[str, Any]], rows: list[dict[str, Any]], *, device: bool = True) -> Bundle:
    bundle = Bundle.create(
        root, {"targets": [TARGET]}, scheduled=len(rows), server={TARGET: {"url": TARGET, "models": ["smollm2"]}}
    )
    for table, content in (("steps", steps), ("requests", rows)):
        with bundle.writer(table, "one") as writer:
            writer.append(content)
    if device:
        with bundle.writer("series", "one") as series:
            series.append(
                {"t_s": 0.0, "source": TARGET, "name": names.M_DEVICE_INFO, "labels": json.dumps(LABELS), "value": 1.0}
            )
    bundle.update(status=COMPLETE)
    return bundle


def floored(index: int, **changes: Any) -> dict[str, Any]:
    """0.17 s of prefill and 19 further tokens in 0.95 s, with floors of 17 ms and 10 ms a token."""
    return answered_row(index, float(index), floor_ttft_s=0.017, floor_tpot_s=0.010, **changes)


def test_phases_and_steps_are_set_beside_their_floors(tmp_path: Path) -> None:
    steps = [
        step(0, 100, 0, 4.0),
        step(1, 0, 1, 1.25),
        step(2, 0, 4, 1.25),
        step(3, 0, 3, 2.5, gap_ns=1_000_000),
        step(4, 60, 2, 1.0),
    ]
    found = floor_of_run(written(tmp_path, steps, [floored(0), floored(1), dropped_row(2)]))
    assert (found.model, found.recorded, found.faster) == ("smollm2", True, 0)
    assert found.device is not None and found.device["title"] == "NVIDIA L4"
    kinds = {kind.group: kind for kind in found.kinds}
    assert {name: kind.steps for name, kind in kinds.items()} == {"decode": 3, "prefill": 1, "mixed": 1}
    assert kinds["prefill"].efficiency == pytest.approx(1 / 4, rel=1e-5)
    assert kinds["prefill"].wall == "overhead"
    assert kinds["mixed"].efficiency == 1.0
    decodes = steps[1:4]
    time = sum(one["end_ns"] - one["start_ns"] for one in decodes)
    assert kinds["decode"].efficiency == pytest.approx(sum(one["floor_ns"] for one in decodes) / time)
    assert kinds["decode"].walls["overhead"] == pytest.approx((steps[3]["end_ns"] - steps[3]["start_ns"]) / time)
    assert sum(kinds["decode"].walls.values()) == pytest.approx(1.0)
    assert kinds["mixed"].bytes_per_s == pytest.approx(
        steps[4]["bytes"] / (steps[4]["end_ns"] - steps[4]["start_ns"]) * 1e9
    )
    assert [(batch.group, batch.steps) for batch in found.batches] == [("1", 1), ("3-4", 2)]
    assert found.idle_share == pytest.approx(
        1e6 / (1e6 + sum(one["end_ns"] - one["start_ns"] for one in steps)), rel=1e-6
    )

    prefill, decode = found.phases
    assert (prefill.phase, prefill.requests, prefill.by_server) == (names.PREFILL, 2, True)
    assert prefill.efficiency == pytest.approx(0.1)
    assert (prefill.median_s, prefill.floor_median_s) == (pytest.approx(0.17), 0.017)
    assert prefill.wall == "overhead"  # most of the time of steps with prompts in them
    assert decode.efficiency == pytest.approx(0.010 * 19 / 0.95)
    assert decode.median_s == pytest.approx(0.05)


def test_steps_that_beat_their_floor_convict_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = written(tmp_path, [step(0, 0, 1, 1.0), step(1, 0, 1, 0.5)], [floored(0)])
    assert floor_of_run(bundle).faster == 1
    assert main(["floor", "--run", str(bundle.path)]) == 0
    assert "--remeasure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cached", "batches", "first"),
    [(0, [4, 4, 4], None), (50, [4, 4, 4], "read whole"), (20, [1, 4, 1, 1], "constant batch"), (8, [4, 4, 4], None)],
)
def test_the_premise_under_the_largest_strain_fails_first(
    tmp_path: Path, cached: int, batches: list[int], first: str | None
) -> None:
    steps = [step(number, 0, batch, 1.5) for number, batch in enumerate(batches)]
    found = floor_of_run(written(tmp_path, steps, [floored(0, cached_tokens=cached)]))
    assert found.fails_first == first
    whole, constant, one_device = found.premises
    assert whole.strain == pytest.approx(cached / 100)
    assert constant.holds is (len(set(batches)) == 1)
    assert (one_device.strain, one_device.holds) == (0.0, True)


def test_another_servers_run_is_accounted_for_by_a_cost_that_is_brought(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=30)
    with pytest.raises(UserError, match="no floors"):
        floor_of_run(bundle)
    found = floor_of_run(bundle, COST)
    assert not found.recorded
    assert found.device is not None and found.device["device"] == "L4"
    assert {phase.phase for phase in found.phases} == {names.PREFILL, names.DECODE}
    assert all(0 < phase.efficiency <= 1 for phase in found.phases)
    assert all(0 < kind.efficiency <= 1 for kind in found.kinds)
    assert found.kinds[0].group == "decode" and found.kinds[0].floor_s > 0


def test_without_a_step_log_the_client_and_the_gauges_speak(tmp_path: Path) -> None:
    nulls = {f"phase_{name}_s": None for name in names.PHASES}
    rows = [answered_row(k, float(k), cached_tokens=None, **nulls) for k in range(3)]
    bundle = written(tmp_path, [], rows, device=False)
    with bundle.writer("series", "gauge") as series:
        series.append(
            [
                {"t_s": float(t), "source": TARGET, "name": names.M_RUNNING, "labels": "{}", "value": float(value)}
                for t, value in enumerate((0, 2, 4))
            ]
        )
    found = floor_of_run(bundle, COST)
    assert (found.kinds, found.batches, found.idle_share) == ((), (), None)
    assert [phase.by_server for phase in found.phases] == [False, False]
    assert all(phase.wall is None for phase in found.phases)
    whole, constant, one_device = found.premises
    assert (whole.holds, one_device.holds) == (None, None)
    assert constant.strain == pytest.approx(1 - 3 / 4)
    assert found.fails_first == "constant batch"


def test_the_command_prints_a_run_in_words_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = written(tmp_path, [step(0, 100, 0, 4.0), step(1, 0, 2, 1.5)], [floored(0), floored(1)])
    assert main(["floor", "--run", bundle.run_id, "--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for wanted in ("NVIDIA L4", "prefill", "decode", "10 %", "20 %", "memory", "overhead", "communication 0 %"):
        assert wanted in text
    assert main(["floor", "--run", "latest", "--root", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["phases"][0]["efficiency"] == pytest.approx(0.1)
    assert [premise["holds"] for premise in said["premises"]] == [True, True, True]
    # the model is the one that the server named; a faster device leaves more to gain
    assert main(["floor", "--run", "latest", "--root", str(tmp_path), "--device", "H100", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["kinds"][0]["efficiency"] < said["kinds"][0]["efficiency"]


def test_the_command_prints_the_worked_figures(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["floor", "--model", "llama-2-7b", "--device", "A100", "--prompt", "8192", "--batch", "14"]
    assert main(plan) == 0
    text = " ".join(capsys.readouterr().out.split())
    for wanted in (
        "balance 153 FLOP/byte", "14.0 GB", "6.9 ms/token", "114.7 TFLOP -> 0.37 s", "4 GiB", "74.1 GB -> 36.4 ms",
        "385 token/s", "34 ms", "411 token/s", "GiB read as GB", "exceed the model's context of 4096",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert main([*plan, "--json", "--utilisation", "0.5"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["device"]["balance"] == pytest.approx(153, abs=0.1)
    assert said["prefill"]["iron_law_s"] > said["prefill"]["floor_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a model, or a run"),
        (["--model", "llama-2-7b", "--device", "A100", "--batch", "0"], "--batch: 0 is below 1"),
        (["--model", "llama-2-7b", "--root", "."], "--root"),
        (["--run", "latest", "--prompt", "5"], "--prompt describes a planned load"),
        (["--run", "RUN", "--dtype", "fp16"], "--dtype needs the device"),
        (["--run", "RUN", "--device", "H100", "--dtype", "fp5"], "--dtype: 'fp5' is no precision"),
        (["--run", "RUN", "--device", "B52"], "no device is known as 'B52'"),
        (["--run", "RUN", "--device", "H100", "--model", "llama-9"], "no shape is known as 'llama-9'"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    bundle = written(tmp_path, [step(0, 0, 1, 2.0)], [floored(0)])
    code = main(["floor", *(str(bundle.path) if word == "RUN" else word for word in arguments)])
    assert code == names.EXIT_USAGE
    shown = capsys.readouterr().err
    assert said in shown and "remedy:" in shown
