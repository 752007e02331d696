"""The engine that leaps against the plain one: the same arrivals, the same everything, to the last bit."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.leaping import LeapingEngine
from engine.policy import POLICIES
from engine.request import SamplingParams
from engine.simulated import Simulation
from engine.step_fit import FEATURES, StepFit
from engine.step_model import Noise
from engine.virtual import Arrival, VirtualEngine
from models.devices import DEVICES
from models.store import LoadedModel

MS = 1_000_000
SEEDS = int(os.environ.get("TAILSPAN_TEST_SEEDS", "40"))


def a_fit(draw: random.Random) -> StepFit | None:
    """None: the iron law.  Else a formula in which every feature counts, with noise in two of three."""
    if draw.random() < 0.3:
        return None
    coefficients = (2e-3, 1e-4, 3e-5, 1e-4, 2e-5, 1e-7, 1e-8)
    assert len(coefficients) == len(FEATURES)
    noise = draw.choice([Noise(), Noise(0.2, 0.6), Noise(0.1, 0.3, 3.0, 0.02)])
    return StepFit(coefficients, noise, 0.0, 100, 0.0, "a test")


def arrivals(draw: random.Random, n: int, gap_ms: float) -> Iterator[Arrival]:
    at = 0
    for k in range(n):
        at += int(draw.expovariate(1.0 / (gap_ms * MS))) if draw.random() > 0.1 else 0
        prompt = [3] * 16 * draw.randint(0, 3) + [draw.randrange(3, 400) for _ in range(draw.randint(1, 60))]
        stops = tuple(draw.sample(range(3, 400), 3)) if draw.random() < 0.1 else ()
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, draw.randint(1, 20), draw.randint(1, 150)]),
            min_tokens=draw.choice([0, 0, 5]),
            temperature=draw.choice([0.0, 1.0]),
            ignore_eos=draw.random() < 0.6,
            stop_token_ids=stops,
            seed=draw.choice([None, k, 7]),
        )
        leaves = at + draw.randint(1, 400) * MS if draw.random() < 0.1 else None
        yield Arrival(at, prompt, params, draw.randint(-2, 2), draw.choice([None, 300, 3000]), leaves)


def play(model: LoadedModel, seed: int, leaping: bool) -> VirtualEngine:
    """One random configuration under one random load, in pieces of time."""
    draw = random.Random(seed)
    config = EngineConfig(
        backend="simulated",
        device="H100",
        max_batch=draw.choice([1, 4, 16, 64]),
        token_budget=draw.choice([64, 96, 512]),
        kv_blocks=draw.choice([18, 18, 24, 40, 400]),
        prefix_cache=draw.random() < 0.5,
        policy=draw.choice(sorted(POLICIES)),
        queue_limit=draw.choice([3, 1000]),
        queue_tokens=draw.choice([None, 400]),
        max_predicted_ttft=draw.choice([None, None, 0.5]),
        check_every=draw.choice([0, 7, 100]),
        watermark=draw.choice([0.0, 0.0, 0.05]),
        step_log=draw.choice([50, 1 << 20]),
    )
    what = Simulation(model, DEVICES["H100"], "bf16", a_fit(draw), seed)
    gap = draw.choice([0, 0, 100_000])
    pauses = ((50 * MS, 30 * MS), (60 * MS, MS), (400 * MS, 100 * MS)) if draw.random() < 0.3 else ()
    keep = draw.random() < 0.5
    rig = VirtualEngine(
        config, what, gap_ns=gap, keep=keep, token_steps=draw.random() < 0.5, pauses=pauses, leaping=leaping
    )
    rig.feed(arrivals(draw, 50, draw.choice([0.3, 2.0, 20.0, 200.0])))
    for until in (40 * MS, 41 * MS, 300 * MS):
        rig.run(until)
    if seed % 7 == 0:  # somebody comes and goes between two runs
        rig.submit(Arrival(0, [5] * 40, SamplingParams(30, ignore_eos=True)))
        rig.abort("v1")
    rig.run()
    return rig


def account(rig: VirtualEngine) -> dict[str, Any]:
    """Everything that can be seen of a run."""
    engine = rig.engine
    return {
        "clock": rig.clock(),
        "steps": engine.steps.since(-1),
        "lives": [
            (
                life.id,
                life.arrived_ns,
                life.prompt_tokens,
                life.output_tokens,
                life.reason,
                life.token_steps,
                life.clock and (life.clock.intervals, asdict(life.clock.facts), life.clock.first_token_ns),
                life.clock and (life.clock.last_token_ns, life.clock.sent_ns),
            )
            for life in rig.lives
        ],
        "tokens": {name: request.tokens for name, request in rig.requests.items()},
        "stats": engine.stats(),
        "laws": engine.laws,
        "learnt": (engine.backlog_s(), vars(engine.admission.model)),
        "cached": engine.pool.cached,
        "shortages": engine.scheduler.shortages,
    }


@pytest.mark.timeout(600)
def test_leaping_changes_nothing_that_can_be_seen(tiny: LoadedModel) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        plain, leaping = (play(tiny, seed, leaping=it) for it in (False, True))
        assert isinstance(leaping.engine, LeapingEngine) and not isinstance(plain.engine, LeapingEngine)
        one, other = account(plain), account(leaping)
        for what, value in one.items():
            assert other[what] == value, f"seed {seed}: {what}"
        assert one["laws"].violations == 0
        stats = one["stats"]
        seen.update(
            preempted=stats.preemptions, hits=stats.prefix_hits, steps=stats.steps, leapt=leaping.engine.leapt,
            **stats.finished, **stats.rejected,
        )  # fmt: skip
    for what in ("preempted", "hits", "stop", "length", "abort", "queue_full", "queue_tokens"):
        assert seen[what] >= 10, (what, seen)
    assert seen["leapt"] > 0.2 * seen["steps"]
