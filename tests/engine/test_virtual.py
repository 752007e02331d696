"""Virtual time: the clock, the order of things, the same run twice, and phases rebuilt from the step log alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.simulated import Simulation
from engine.step_fit import FEATURES, StepFit
from engine.step_load import StepLoad
from engine.step_model import Noise
from engine.steplog import StepRecord
from engine.tally import tally
from engine.virtual import NEVER, Arrival, Life, VirtualClock, VirtualEngine
from models.devices import DEVICES
from models.errors import UserError
from models.known_shapes import SHAPES
from models.store import LoadedModel
from telemetry.names import DECODE, PHASES, PREEMPTED, PREFILL, QUEUE, RECOMPUTE, STALL

MS = 1_000_000


def flat(seconds: float, *, gap_s: float = 0.0, noise: Noise | None = None, per_token: float = 0.0) -> StepFit:
    """Steps that take ``seconds`` and ``per_token`` for each prompt token."""
    coefficients = dict.fromkeys(FEATURES, 0.0) | {"step": seconds, "prefill_tokens": per_token}
    return StepFit(tuple(coefficients[name] for name in FEATURES), noise or Noise(), gap_s, 100, 0.0, "a test")


def virtual(
    model: LoadedModel,
    fit: StepFit | None = None,
    *,
    gap_ns: int = 0,
    seed: int = 0,
    leaping: bool = True,
    **options: Any,
) -> VirtualEngine:
    settings = {"backend": "simulated", "device": "H100", "kv_blocks": 64, "token_budget": 64, **options}
    what = Simulation(model, DEVICES["H100"], "bf16", fit, seed)
    return VirtualEngine(EngineConfig(**settings), what, gap_ns=gap_ns, keep=True, leaping=leaping)


def arrivals(seed: int, n: int, mean_gap_ns: int, **sizes: int) -> Iterator[Arrival]:
    draw, at = random.Random(seed), 0
    for _ in range(n):
        at += int(draw.expovariate(1.0 / mean_gap_ns))
        shared = [3] * 16 * draw.randint(0, 2)
        prompt = shared + [draw.randrange(3, 400) for _ in range(draw.randint(1, sizes.get("prompt", 40)))]
        yield Arrival(at, prompt, SamplingParams(max_tokens=draw.randint(1, sizes.get("output", 60)), ignore_eos=True))


def test_the_clock_calls_what_is_due_on_its_way_and_never_goes_back() -> None:
    clock, seen = VirtualClock(), []
    clock.at(30, lambda: seen.append(("c", clock())))
    clock.at(10, lambda: seen.append(("a", clock())))
    clock.at(10, lambda: (seen.append(("b", clock())), clock.at(5, lambda: seen.append(("late", clock()))))[0])
    clock.wait_until(20)
    assert seen == [("a", 10), ("b", 10), ("late", 10)] and clock() == 20 and clock.next_ns == 30
    clock.wait_until(15)
    assert clock() == 20
    clock.wait_until(100)
    assert seen[-1] == ("c", 30) and clock() == 100 and clock.next_ns == NEVER


@pytest.mark.parametrize("leaping", [True, False])
def test_a_pause_that_meets_an_idle_engine_is_a_gap_and_idling_is_none(tiny: LoadedModel, leaping: bool) -> None:
    """Work is at hand from its arrival on, whether or not a step ended just before."""
    what = Simulation(tiny, DEVICES["H100"], "bf16", flat(0.010), 0)
    config = EngineConfig(backend="simulated", device="H100", kv_blocks=64, token_budget=64)
    pauses = ((3_900 * MS, 250 * MS),)
    rig = VirtualEngine(config, what, keep=True, leaping=leaping, pauses=pauses)
    rig.feed(
        Arrival(at * MS, [3] * 8, SamplingParams(max_tokens=4, ignore_eos=True)) for at in (1_000, 2_000, 4_000, 4_100)
    )
    rig.run()
    records = list(rig.engine.steps.since(-1))
    assert [record.gap_ns for record in records if record.gap_ns] == [250 * MS]  # from the arrival at 4 s
    (paused,) = (record for record in records if record.gap_ns)
    assert paused.start_ns == 4_250 * MS and paused.admitted == ("v3",)


def test_an_arrival_in_the_middle_of_a_step_waits_for_the_next_one(tiny: LoadedModel) -> None:
    rig = virtual(tiny, flat(0.010))
    rig.feed(
        [Arrival(5 * MS, [5] * 4, SamplingParams(3, ignore_eos=True)), Arrival(12 * MS, [6] * 4, SamplingParams(1))]
    )
    rig.run()
    first, second = sorted(rig.lives, key=lambda life: life.arrived_ns)
    assert first.clock is not None and second.clock is not None
    assert first.clock.durations()[QUEUE] == 0  # the engine was idle
    assert (first.clock.first_token_ns, first.clock.last_token_ns) == (15 * MS, 35 * MS)
    assert second.clock.durations()[QUEUE] == 3 * MS  # until the step in hand ended, at 15 ms
    assert second.clock.first_token_ns == 25 * MS
    assert second.clock.facts.queue_depth_at_arrival == 0


def test_the_same_run_twice_is_the_same_to_the_nanosecond(tiny: LoadedModel) -> None:
    noisy = flat(0.010, gap_s=0.001, noise=Noise(0.3, 0.7, 0.5, 0.1), per_token=1e-4)

    def once(seed: int) -> tuple[list[StepRecord], list[Any]]:
        rig = virtual(tiny, noisy, seed=seed, gap_ns=MS, kv_blocks=20)
        rig.feed(arrivals(1, 60, 20 * MS))
        rig.run()
        outputs = sorted((name, tuple(request.tokens)) for name, request in rig.requests.items())
        return rig.engine.steps.since(-1), outputs

    assert once(3) == once(3)
    records, outputs = once(3)
    others, _tokens = once(4)
    assert [one.end_ns for one in records] != [one.end_ns for one in others]
    assert len(outputs) == 60


def test_it_is_much_faster_than_the_clock_on_the_wall(tiny: LoadedModel) -> None:
    """No wall time is asserted: a day of virtual time would not end if anything waited."""
    rig = virtual(tiny, flat(10.0))
    rig.feed(Arrival(k * 3600 * 1000 * MS, [5 + k] * 8, SamplingParams(5, ignore_eos=True)) for k in range(24))
    rig.run()
    assert rig.clock() > 23 * 3600 * 1000 * MS
    assert [life.reason for life in rig.lives] == ["length"] * 24
    assert rig.engine.laws.violations == 0 and rig.engine.laws.checks >= 24  # when idle, as on the thread


def test_refusals_policies_and_aborts_are_the_engines_own(tiny: LoadedModel) -> None:
    rig = virtual(tiny, flat(0.010), queue_limit=2, max_batch=1)
    rig.feed(Arrival(MS, [5] * 4, SamplingParams(20, ignore_eos=True)) for _ in range(5))
    rig.clock.at(50 * MS, lambda: rig.abort("v1"))
    rig.run()
    assert Counter(life.reason for life in rig.lives) == {"queue_full": 3, "abort": 1, "length": 1}
    aborted = next(life for life in rig.lives if life.reason == "abort")
    assert aborted.clock is not None and 50 * MS <= (aborted.clock.last_token_ns or 0) <= 61 * MS
    stats = rig.engine.stats()
    assert stats.rejected == {"queue_full": 3} and stats.kv_used == 0


def test_stop_strings_act_where_there_is_text_and_are_not_ignored_where_there_is_none(tiny: LoadedModel) -> None:
    rig = virtual(tiny)
    with pytest.raises(ValueError, match="stop strings need text"):
        rig.submit(Arrival(0, [5], SamplingParams(5, stop=("a",))))
    with pytest.raises(UserError, match="--shadow"):
        virtual(tiny, shadow=0.5)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
@pytest.mark.parametrize("seed", range(2))
def test_every_phase_of_every_request_can_be_rebuilt_from_the_step_log(
    tiny: LoadedModel, seed: int, policy: str
) -> None:
    """Chunks, preemptions in prefill and decode, recomputing, prefix hits, stalls: equal to the nanosecond."""
    noisy = flat(0.010, noise=Noise(0.4, 0.5, 2.0, 0.05), per_token=3e-4)
    rig = virtual(tiny, noisy, gap_ns=700_001, kv_blocks=14, max_batch=6, token_budget=24, seed=seed, policy=policy)
    rig.feed(arrivals(seed, 120, 60 * MS, prompt=80, output=90))
    rig.run()
    records = rig.engine.steps.since(-1)
    seen: Counter[str] = Counter()
    for life in rig.lives:
        assert life.clock is not None and life.reason == "length"
        rebuilt = rebuild(life, records)
        assert rebuilt == life.clock.durations(), life.id
        seen.update({phase: int(ns > 0) for phase, ns in rebuilt.items()})
    assert seen[PREEMPTED] > 5 and seen[RECOMPUTE] > 5 and seen[STALL] > 50 and seen[QUEUE] > 50
    assert sum(record.recomputed_tokens for record in records) == rig.engine.stats().recomputed_tokens > 0
    cached = sum(sum(record.admitted_cached) for record in records)
    assert cached == rig.engine.stats().prefix_hits > 0


def rebuild(life: Life, records: list[StepRecord]) -> dict[str, int]:
    """ns in every phase: from the moment it came, the length of its prompt and the step log; no clock is looked at."""
    phases = dict.fromkeys(PHASES, 0)
    since, phase = life.arrived_ns, QUEUE
    computed = lost = known = 0  # known: tokens that it consists of
    gaps = 0  # stalls since the phase began
    known = life.prompt_tokens
    first_token = False

    def turn(to: str, at: int) -> None:
        nonlocal since, phase, gaps
        stall = gaps if phase in (PREFILL, DECODE, RECOMPUTE) else 0
        phases[phase] += at - since - stall
        phases[STALL] += stall
        since, phase, gaps = at, to, 0

    for record in records:
        gaps += record.gap_ns
        if life.id in record.preempted_requests:
            turn(PREEMPTED, record.start_ns)
            lost, computed = max(lost, computed), 0
        if life.id in record.admitted:
            turn(PREFILL if phase == QUEUE else RECOMPUTE, record.start_ns)
            computed = record.admitted_cached[record.admitted.index(life.id)]
        if life.id not in record.requests:
            continue
        computed += record.request_tokens[record.requests.index(life.id)]
        if phase == RECOMPUTE and computed >= lost:
            turn(DECODE if first_token else PREFILL, record.end_ns)
            lost = 0
        if computed == known:  # its newest token is computed: another one follows
            known += 1
            if not first_token:
                first_token = True
                turn(DECODE, record.end_ns)
            if known == life.prompt_tokens + life.output_tokens:
                turn("send", record.end_ns)
                return phases
    raise AssertionError(f"{life.id} never ended in the log")


def test_llama_on_an_h100_takes_the_time_that_the_account_gives(tiny: LoadedModel) -> None:
    shape = replace(SHAPES["llama-3.1-8b"].shape, eos_token_ids=tiny.shape.eos_token_ids)
    model = replace(tiny, name="llama-3.1-8b", shape=shape)
    rig = virtual(model, kv_blocks=4096, token_budget=2048)
    what = rig.what
    rig.feed([Arrival(0, [7] * 1000, SamplingParams(11, ignore_eos=True))])
    rig.run()
    prefill, *decodes = rig.engine.steps.since(-1)
    law = what.cost.iron_law_ns(what.cost.prefill(1000), 0.6)
    assert prefill.end_ns - prefill.start_ns == pytest.approx(law, abs=2)
    for k, step in enumerate(decodes, 1):
        found = step.end_ns - step.start_ns
        assert found == pytest.approx(what.cost.iron_law_ns(what.cost.decode(1000 + k), 0.6), abs=2)
        assert step.efficiency is not None and 0.9 < step.efficiency <= 1
        # 7.5e9 weights that are read whole (the embedding is not) are 15 GB, at 3.35 TB/s 4.48 ms; KV of 1000 tokens
        # is 131 MB, 0.04 ms; 15 GFLOP are 0.03 ms
        assert 4.5 * MS < found < 4.6 * MS
    assert len(decodes) == 10


def test_littles_law_holds_and_the_tally_agrees_with_the_clocks(tiny: LoadedModel) -> None:
    rig = virtual(tiny, flat(0.010, per_token=2e-4), gap_ns=MS, max_batch=8, kv_blocks=200)
    rig.feed(arrivals(7, 1500, 75 * MS, prompt=60, output=60))
    rig.run()
    records = rig.engine.steps.since(-1)
    start, end = rig.clock() // 20, rig.clock() * 19 // 20
    found = tally(rig.lives, records, rig.engine.pool.total, start, end)
    assert found.queue_inside.error < 0.02 and found.system_inside.error < 0.02  # the load is steady
    assert found.queue.error < 1e-6 and found.system.error < 1e-6
    assert found.served_rate == pytest.approx(found.arrived / found.window_s, rel=0.02)
    assert found.queue.residents > 0.1 and found.system.residents > 1
    inside = [life for life in rig.lives if start <= life.arrived_ns < end]
    assert found.arrived == found.answered == len(inside)
    mean = sum((life.clock.duration_ns if life.clock else 0) for life in inside) / len(inside) / 1e9
    assert sum(found.phases.values()) == pytest.approx(mean)
    assert found.steps.batch > 1 and 0 < found.kv_mean < found.kv_peak <= 1
    assert "Little, queue" in found.text() and "apart by" in found.text()
    # a law that is broken is seen: every request a second late by its own clock
    wrong = [replace_life(life, 1000 * MS) for life in rig.lives]
    assert tally(wrong, records, rig.engine.pool.total, start, end).system.error > 0.02
    with pytest.raises(ValueError, match="no request was answered"):
        tally(rig.lives, records, rig.engine.pool.total, rig.clock() + 1, rig.clock() + 2)
    with pytest.raises(ValueError, match="step log does not reach"):
        tally(rig.lives, records[500:], rig.engine.pool.total, start, end)


def replace_life(life: Life, later_ns: int) -> Life:
    """The same, with a clock that ended later."""
    import copy

    clock = copy.deepcopy(life.clock)
    assert clock is not None and clock.last_token_ns is not None
    clock.last_token_ns += later_ns
    return replace(life, clock=clock)


def test_loads_are_counted_as_the_roofline_counts_them(tiny: LoadedModel) -> None:
    rig = virtual(tiny, flat(0.010), token_budget=16, prefix_cache=False)
    rig.feed([Arrival(0, list(range(3, 13)), SamplingParams(6, ignore_eos=True))])
    rig.feed([Arrival(5 * MS, list(range(20, 40)), SamplingParams(2, ignore_eos=True))])
    rig.run()
    loads = [
        StepLoad(r.prefill_tokens, r.decode_seqs, r.context_tokens, r.sampled_rows, r.attended)
        for r in rig.engine.steps.since(-1)
    ]
    assert loads[:4] == [
        StepLoad(10, 0, 10, 1, 55),
        StepLoad(15, 1, 11 + 15, 1, 11 + 120),
        StepLoad(5, 1, 12 + 20, 2, 12 + 5 * 15 + 15),
        StepLoad(0, 2, 13 + 21, 2, 13 + 21),
    ]
