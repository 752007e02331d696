"""The twin as the analyses see it: plain arrays in and out, changes do what they say, a bundle that checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.replay import TWIN
from engine.step_load import StepLoad
from engine.step_model import Floats, ScaledTime
from models.errors import UserError
from telemetry import check, slo
from telemetry.bundle import Bundle
from telemetry.names import PREFILL, QUEUE, STALL
from telemetry.twin import TwinLoad, TwinRun, TwinSetting
from telemetry.twin_bundle import write_bundle

SETTING = TwinSetting(max_batch=16, token_budget=512, kv_blocks=2000)


def a_load(n: int = 120, seed: int = 0, **columns: Any) -> TwinLoad:
    draw = np.random.default_rng(seed)
    return TwinLoad(np.cumsum(draw.exponential(0.06, n)), draw.integers(1, 900, n), draw.integers(1, 80, n), **columns)


def same(a: TwinRun, b: TwinRun) -> bool:
    return bool(np.array_equal(a.ttft_s, b.ttft_s, equal_nan=True) and np.array_equal(a.e2e_s, b.e2e_s, equal_nan=True))


def test_a_load_is_played_and_told_in_its_order() -> None:
    load = a_load()
    run = TWIN.replay(load, SETTING, steps=True, tokens=True)
    assert run.answered.all() and np.array_equal(run.output_tokens, load.output_tokens)
    assert np.allclose(sum(run.phases.values()), run.e2e_s, atol=1e-9) and (run.ttft_s <= run.e2e_s).all()
    assert run.steps is not None and run.token_s is not None and "llama-3.1-8b bf16 on H100" in run.label
    for place, moments in enumerate(run.token_s):
        assert len(moments) == load.output_tokens[place]
        assert moments[0] == pytest.approx(load.at_s[place] + run.ttft_s[place], abs=2e-9)
        assert moments[-1] == pytest.approx(load.at_s[place] + run.e2e_s[place], abs=2e-9)
    tokens = sum(sum(one) for one in run.steps.column("request_tokens").to_pylist())
    assert tokens == load.input_tokens.sum() + load.output_tokens.sum() - len(load)
    assert same(run, TWIN.replay(load, SETTING))


def test_changes_do_what_they_say() -> None:
    load = a_load()
    plain = TWIN.replay(load, SETTING)
    slow = TWIN.replay(load, replace(SETTING, speed=0.8))
    assert np.median(slow.tpot_s[load.output_tokens > 1]) > 1.2 * np.median(plain.tpot_s[load.output_tokens > 1])
    prefill = TWIN.replay(load, replace(SETTING, prefill_speed=0.5))
    alone = TWIN.replay(TwinLoad(np.zeros(1), np.array([400]), np.array([1])), replace(SETTING, prefill_speed=0.5))
    whole = TWIN.replay(TwinLoad(np.zeros(1), np.array([400]), np.array([1])), SETTING)
    assert alone.ttft_s[0] == pytest.approx(2 * whole.ttft_s[0], rel=1e-6)
    assert prefill.phases[PREFILL].sum() > 1.3 * plain.phases[PREFILL].sum()
    halted = TWIN.replay(load, replace(SETTING, pauses=((1.0, 0.5), (3.0, 0.25))))
    assert plain.phases[STALL].sum() == 0 and halted.phases[STALL].max() == 0.25  # at 1 s it was idle: that is queue
    assert halted.e2e_s.sum() > plain.e2e_s.sum() + 0.75
    full = TWIN.replay(load, replace(SETTING, queue_limit=1, max_batch=2))
    assert set(full.outcome) == {"length", "queue_full"} and np.isnan(full.e2e_s[~full.answered]).all()
    small = TWIN.replay(load, replace(SETTING, kv_blocks=62))
    assert set(small.outcome) == {"length"} and small.phases[QUEUE].sum() > 2 * plain.phases[QUEUE].sum()
    never = TWIN.replay(load, replace(SETTING, kv_blocks=40))
    assert np.array_equal(never.outcome == "kv_oom", load.input_tokens + load.output_tokens > 640)


def test_prefixes_and_told_hits_spare_the_prompt() -> None:
    load = replace(a_load(), input_tokens=np.full(120, 700))
    cold = TWIN.replay(load, SETTING)
    shared = TWIN.replay(replace(load, prefixes=[[9]] * 120), SETTING)
    told = TWIN.replay(replace(load, cached_tokens=np.full(120, 520)), SETTING)
    assert not cold.facts["cached_tokens"].any()
    assert (shared.facts["cached_tokens"][5:] == 512).all()  # the block, not what lies beyond it
    assert (told.facts["cached_tokens"] == 512).all()  # whole pages
    assert told.phases[PREFILL].sum() < 0.7 * cold.phases[PREFILL].sum()
    off = TWIN.replay(replace(load, prefixes=[[9]] * 120), replace(SETTING, prefix_cache=False))
    assert not off.facts["cached_tokens"].any()
    salted = TWIN.replay(replace(load, prefixes=[[at] for at in range(120)]), SETTING)
    assert not salted.facts["cached_tokens"].any()


def test_a_client_without_patience_hangs_up() -> None:
    load = a_load(patience_s=np.full(120, 0.2))
    run = TWIN.replay(load, replace(SETTING, max_batch=4))
    assert set(run.outcome) == {"length", "abort"} and (run.e2e_s[run.answered] <= 0.2).all()
    gone = run.outcome == "abort"
    assert (run.e2e_s[gone] >= 0.2).all() and (run.output_tokens[gone] < load.output_tokens[gone]).all()


def test_a_fit_with_its_noise_goes_in_and_the_seed_draws_it() -> None:
    load = a_load(300)
    seen = TWIN.replay(load, replace(SETTING, noise=(0.1, 0.6, 2.0, 0.03), seed=1), steps=True)
    assert seen.steps is not None
    fit = TWIN.fit(seen.steps, "a run")
    assert fit["noise"]["sigma"] == pytest.approx(0.1, rel=0.3)
    assert fit["noise"]["autocorrelation"] == pytest.approx(0.6, abs=0.2)
    assert fit["noise"]["stall_s"] == pytest.approx(0.03, rel=0.5)
    setting = replace(SETTING, fit=fit)
    one, two, again = (TWIN.replay(load, replace(setting, seed=seed)) for seed in (1, 2, 1))
    assert same(one, again) and not same(one, two)
    calm = replace(setting, noise=(0.0, 0.0, 0.0, 0.0))
    assert same(TWIN.replay(load, replace(calm, seed=1)), TWIN.replay(load, replace(calm, seed=2)))
    assert np.median(one.e2e_s) == pytest.approx(np.median(seen.e2e_s), rel=0.1)


def test_scaled_times_are_exact() -> None:
    class Base:
        def seconds(self, load: StepLoad) -> float:
            return 1.0 + 0.01 * load.prefill_tokens + 0.1 * load.decode_seqs

        def decodes(self, batch: int, contexts: Floats) -> Floats:
            return np.full(len(contexts), 1.0 + 0.1 * batch)

    mixed, decode = StepLoad(50, 10, 900, 11, 2000), StepLoad(0, 10, 900, 10, 900)
    assert ScaledTime(Base(), 2.0, 0.5).seconds(mixed) == pytest.approx((2.0 + 0.5 / 0.5) / 2)
    assert ScaledTime(Base(), 2.0, 0.5).seconds(decode) == 1.0
    assert ScaledTime(Base(), 2.0, 0.5).decodes(10, np.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 0.0}, "speed is 0.0"),
        ({"pauses": ((2.0, 0.1), (1.0, 0.1))}, "ascending"),
        ({"noise": (0.1, 1.0, 0.0, 0.0)}, "autocorrelation below 1"),
        ({"device": "x100"}, "no device is known"),
        ({"fit": {"kind": "something else"}}, "not a tailspan step fit"),
    ],
)
def test_settings_that_cannot_be_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TWIN.replay(a_load(3), replace(SETTING, **change))


def test_loads_that_cannot_be_are_named() -> None:
    one, two = np.ones(1, dtype=int), np.ones(2, dtype=int)
    with pytest.raises(UserError, match="ascending"):
        TwinLoad(np.array([1.0, 0.5]), two, two)
    with pytest.raises(UserError, match="output_tokens has 1 entries"):
        TwinLoad(np.zeros(2), two, one)
    with pytest.raises(UserError, match="request 0 has input_tokens 0"):
        TwinLoad(np.zeros(1), np.zeros(1, dtype=int), one)


def test_a_virtual_run_becomes_a_bundle_that_checks(tmp_path: Path) -> None:
    load = a_load(patience_s=np.full(120, 3.0))
    run = TWIN.replay(load, replace(SETTING, max_batch=3, queue_limit=8), steps=True, tokens=True)
    policy = slo.load("chat")
    written = write_bundle(run, policy, root=tmp_path, name="a", fields={"repeat": 2})
    bundle = Bundle.open(written.path)
    assert [finding for finding in check.check(bundle, policy) if not finding.ok] == []
    assert bundle.manifest["simulated"] == run.label and bundle.manifest["repeat"] == 2
    assert bundle.manifest["validity"]["verdict"] == "VALID" and bundle.manifest["twin"]["max_batch"] == 3
    requests = bundle.table("requests").to_pylist()
    assert [row["error"] is None for row in requests] == run.answered.tolist()
    assert {row["status"] for row in requests} == {200, 429}
    assert len(bundle.table("steps")) == len(run.steps or ())
    again = TWIN.replay(TwinLoad.of_rows(bundle.table("requests")), run.setting)
    taken = run.answered & (run.ttft_s > 0)
    assert np.median(again.ttft_s[again.answered]) == pytest.approx(np.median(run.ttft_s[taken]), rel=0.2)
