"""Step times: noise has the size that it should, a fit finds what made the log, files that are no fit are refused."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import step_fit
from engine.step_fit import FEATURES, Step, StepFit, fit, load
from engine.step_load import StepLoad
from engine.step_model import SHORTEST_NS, Noise, StepTimes
from models.errors import UserError
from telemetry.bundle import COMPLETE, Bundle
from telemetry.least_squares import non_negative
from telemetry.schema import STEPS

TRUE = dict(
    zip(FEATURES, (4e-3, 5e-4, 1e-4, 8e-4, 3e-4, 2e-7, 1e-9), strict=True)
)  # seconds: a CPU engine, more or less


def random_loads(n: int, seed: int = 0) -> list[StepLoad]:
    draw = random.Random(seed)
    loads = []
    for _ in range(n):
        decodes, prefill = draw.randint(0, 16), draw.choice([0, 0, 0, draw.randint(1, 128)])
        if not decodes and not prefill:
            decodes = 1
        context = decodes * draw.randint(20, 800) + prefill
        loads.append(StepLoad(prefill, decodes, context, decodes + (prefill > 0), context + prefill * prefill // 2))
    return loads


def log_of(times: StepTimes, loads: list[StepLoad], gap_ns: int = 200_000) -> list[Step]:
    records, now = [], 0
    for one in loads:
        end = now + times.next_ns(one)
        records.append(Step(now, end, gap_ns, *one))
        now = end + gap_ns
    return records


def true_fit(noise: Noise) -> StepFit:
    return StepFit(tuple(TRUE.values()), noise, 0.0, 1000, 0.0, "made")


def test_noise_has_its_size_its_memory_and_its_stalls() -> None:
    noise = Noise(sigma=0.2, autocorrelation=0.6, stall_rate=0.5, stall_s=0.4)
    flat = StepFit((0.01, 0, 0, 0, 0, 0, 0), noise, 0.0, 100, 0.0, "")
    times = StepTimes(flat, noise, seed=1)
    seconds = [times.next_ns(StepLoad(0, 1, 10, 1, 10)) / 1e9 for _ in range(60_000)]
    calm = [math.log(s / 0.01) for s in seconds if s < 0.03]
    assert statistics.stdev(calm) == pytest.approx(0.2, rel=0.1)
    assert float(np.corrcoef(calm[1:], calm[:-1])[0, 1]) == pytest.approx(0.6, abs=0.07)
    assert statistics.mean(math.exp(x) for x in calm) == pytest.approx(1.0, abs=0.02)
    stalls = [s - 0.01 for s in seconds if s > 0.03]
    assert len(stalls) / (0.01 * 60_000) == pytest.approx(0.5, rel=0.2)
    assert statistics.mean(stalls) == pytest.approx(0.4, rel=0.2)
    again = StepTimes(flat, noise, seed=1)
    assert [again.next_ns(StepLoad(0, 1, 10, 1, 10)) / 1e9 for _ in range(50)] == seconds[:50]


def test_a_step_takes_some_time_whatever_the_fit_says() -> None:
    nothing = StepFit((0, 0, 0, 1e-12, 0, 0, 0), Noise(), 0.0, 100, 0.0, "")
    assert StepTimes(nothing).next_ns(StepLoad(1, 0, 1, 1, 1)) == SHORTEST_NS


def test_a_fit_finds_the_times_and_the_noise_that_made_the_log() -> None:
    noise = Noise(sigma=0.08, autocorrelation=0.5, stall_rate=0.2, stall_s=0.3)
    records = log_of(StepTimes(true_fit(noise), noise, seed=2), random_loads(6000))
    found = fit(records, "made")
    for one in random_loads(200, seed=9):
        assert found.seconds(one) == pytest.approx(true_fit(noise).seconds(one), rel=0.06)
    assert found.noise.sigma == pytest.approx(0.08, rel=0.15)
    assert found.noise.autocorrelation == pytest.approx(0.5, abs=0.1)
    assert found.noise.stall_rate == pytest.approx(0.2, rel=0.4)
    assert found.noise.stall_s == pytest.approx(0.3, rel=0.4)
    assert found.gap_s == pytest.approx(200e-6, rel=0.01)
    assert found.error < 0.1 and found.steps == 6000
    # in sum, which is what latencies are made of, the twin is as slow as the original
    measured = sum(record.end_ns - record.start_ns for record in records)
    twin = StepTimes(found, found.noise, seed=3)
    assert sum(twin.next_ns(one) for one in random_loads(6000)) == pytest.approx(measured, rel=0.04)


def test_disturbed_steps_do_not_bend_the_formula() -> None:
    records = log_of(StepTimes(true_fit(Noise()), Noise(), seed=0), random_loads(2000))
    draw = random.Random(4)
    for at in draw.sample(range(len(records)), 100):
        records[at] = replace(records[at], end_ns=records[at].end_ns + 400_000_000)
    found = fit(records, "made")
    for one in random_loads(100, seed=5):
        assert found.seconds(one) == pytest.approx(true_fit(Noise()).seconds(one), rel=0.02)
    assert found.noise.stall_s == pytest.approx(0.4, rel=0.05)
    assert found.noise.sigma < 0.02


def test_least_squares_with_no_negative_coefficient() -> None:
    draw = np.random.default_rng(0)
    features = draw.random((200, 4)) * np.array([1.0, 1e6, 1e-3, 10.0])
    want = np.array([2.0, 3e-6, 0.0, 0.5])
    assert non_negative(features, features @ want) == pytest.approx(want, abs=1e-8)
    pulled = features @ np.array([2.0, 3e-6, -4.0, 0.5])  # the best answer without the sign is negative
    found = non_negative(features, pulled)
    assert (found >= 0).all() and found[2] == 0
    rest = np.linalg.lstsq(features[:, [0, 1, 3]], pulled, rcond=None)[0]
    assert found[[0, 1, 3]] == pytest.approx(rest)
    assert (non_negative(features, -features @ want) == 0).all()


def test_a_log_that_says_too_little_is_refused() -> None:
    records = log_of(StepTimes(true_fit(Noise()), Noise()), random_loads(99))
    with pytest.raises(UserError, match=r"99 steps are too few.*100"):
        fit(records, "made")
    with pytest.raises(UserError, match="no duration"):
        fit([replace(one, end_ns=one.start_ns) for one in records * 2], "made")


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = fit(log_of(StepTimes(true_fit(Noise(0.1)), Noise(0.1), 3), random_loads(500)), "made")
    path = tmp_path / "fit.json"
    found.save(path)
    assert load(path) == found
    with pytest.raises(UserError, match="cannot be written"):
        found.save(tmp_path / "no" / "fit.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "other"}, "not a tailspan step fit"),
        ({"version": 9}, "version 9"),
        ({"gap_s": -1}, "gap_s is -1"),
        ({"gap_s": "soon"}, "gap_s is 'soon'"),
        ({"coefficients": dict.fromkeys(FEATURES, 0)}, "all coefficients are 0"),
        ({"coefficients": {"step": 1.0}}, "tokens_8 is None"),
        ({"coefficients": {**TRUE, "warp": 1.0}}, "'warp'"),
        ({"coefficients": {**TRUE, "step": -1.0}}, "step is -1.0"),
        ({"coefficients": 5}, "coefficients is 5"),
        ({"about": "a\nheader: x"}, "about is"),
        ({"about": "x" * 300}, "about is"),
        ({"about": None}, "about is None"),
        ({"noise": {"sigma": 0.1, "autocorrelation": 1.0, "stall_rate": 0, "stall_s": 0}}, "autocorrelation is 1.0"),
        ({"noise": {"sigma": 0.1, "autocorrelation": 0.1, "stall_rate": 1, "stall_s": 0}}, "stall_s is 0"),
        ({"noise": {"sigma": True, "autocorrelation": 0.1, "stall_rate": 0, "stall_s": 0}}, "sigma is True"),
    ],
)
def test_a_file_that_is_no_fit_names_what_is_wrong(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({**true_fit(Noise(0.1)).to_dict(), **change}))
    with pytest.raises(UserError) as found:
        load(path)
    assert said in str(found.value) and str(path) in str(found.value)


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[]", "not a tailspan"), (None, "cannot be read")])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "fit.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said):
        load(path)


def bundle_of(root: Path, records: list[Step], **more: Any) -> Bundle:
    bundle = Bundle.create(root, {}, scheduled=0)
    with bundle.writer("steps", "r1") as writer:
        empty = dict.fromkeys(STEPS.names)
        fields = Step.__dataclass_fields__
        writer.append([{**empty, **{key: getattr(one, key) for key in fields}, **more} for one in records])
    bundle.update(status=COMPLETE)
    return bundle


def test_a_run_bundle_becomes_a_fit_and_a_simulated_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = log_of(StepTimes(true_fit(Noise(0.1)), Noise(0.1), 3), random_loads(300))
    bundle = bundle_of(tmp_path / "a", records)
    out = tmp_path / "fit.json"
    monkeypatch.setattr("sys.argv", ["step_fit", str(bundle.path), "-o", str(out)])
    assert step_fit.main() == 0
    assert load(out) == replace(fit(records, bundle.run_id))
    assert "300 steps" in capsys.readouterr().out
    for more, said in (({"simulated": True}, "simulated themselves"), ({"attended": None}, "older version")):
        other = bundle_of(tmp_path / said[:3], records, **more)
        monkeypatch.setattr("sys.argv", ["step_fit", str(other.path), "-o", str(out)])
        assert step_fit.main() == 4
        assert said in capsys.readouterr().err
