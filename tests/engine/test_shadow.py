"""Shadow mode: a right answer never differs from itself alone, a wrong one is found at its first wrong token."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from engine.faults import Fault, Faults
from engine.native.runner import NativeRunner
from models.store import LoadedModel
from tests.engine.conftest import HandDriven

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc brings one")
PROMPT = list(range(20, 70))


@pytest.fixture
def watched(tiny: LoadedModel) -> Callable[..., HandDriven]:
    """An engine on the C forward that runs every answer again."""
    return lambda **options: HandDriven(tiny, NativeRunner, shadow=1.0, **options)


def shadows(engine: HandDriven) -> None:
    engine.engine._idle()
    assert engine.engine.integrity() == []


def test_answers_in_a_crowd_are_the_answers_alone(watched: Callable[..., HandDriven]) -> None:
    """Greedy and sampled, cached, chunked and preempted: no divergence, and nothing left behind."""
    engine = watched(kv_blocks=14, token_budget=24)
    for turn in range(3):
        for k in range(5):
            sampled = {"temperature": 1.0, "seed": 7 + k} if k % 2 else {"temperature": 0.8, "top_p": 0.9}
            engine.submit(PROMPT[: 20 + 5 * k], max_tokens=20 + turn, **sampled)
        engine.run()
    shadow, stats = engine.engine.shadow, engine.engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    shadows(engine)
    assert (shadow.compared, shadow.diverged, shadow.forgotten) == (15, 0, 0)
    after = engine.engine.stats()
    assert (after.kv_used, after.steps, after.generation_tokens) == (0, stats.steps, stats.generation_tokens)


def test_penalties_and_biases_are_run_again_too(watched: Callable[..., HandDriven]) -> None:
    engine = watched()
    shaped = {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": ((77, 4.0),), "logprobs": 2}
    for k in range(4):
        engine.submit(PROMPT[k:], max_tokens=20, temperature=0.9, seed=k, min_tokens=5, prompt_logprobs=1, **shaped)
    engine.run()
    shadows(engine)
    assert (engine.engine.shadow.compared, engine.engine.shadow.diverged) == (4, 0)


def test_a_race_is_found_at_its_first_wrong_token(watched: Callable[..., HandDriven]) -> None:
    engine = watched()
    core = engine.engine
    faults = Faults(core)
    alone = engine.submit(PROMPT, max_tokens=12)
    engine.run()
    shadows(engine)
    assert core.shadow.diverged == 0
    faults.set(Fault("race", size=2))
    mates = [engine.submit([9 + k] * 30, max_tokens=12) for k in range(3)]
    among = engine.submit(PROMPT, max_tokens=12)
    engine.run()
    assert among.tokens != alone.tokens
    at = next(k for k in range(12) if among.tokens[k] != alone.tokens[k])
    faults.clear("race")
    shadows(engine)
    found = {one.request_id: one for one in core.shadow.divergences}[among.request.id]
    assert (found.at, found.served, found.alone) == (at, among.tokens[at], alone.tokens[at])
    assert found.margin > 0
    record = next(record for record in core.steps.since(-1) if record.step == found.step)
    assert among.request.id in record.requests
    assert all(mate.finish == "length" for mate in mates)


def test_a_page_of_another_prompt_is_found(watched: Callable[..., HandDriven]) -> None:
    engine = watched(kv_blocks=64)
    core = engine.engine
    cold = engine.submit(PROMPT, max_tokens=8)
    engine.submit(list(range(100, 164)), max_tokens=8)
    engine.run()
    Faults(core).set(Fault("broken_cache"))
    core._drain(wait=False)
    warm = engine.submit(PROMPT, max_tokens=8)
    engine.run()
    assert warm.request.clock.facts.cached_tokens > 0
    assert warm.tokens != cold.tokens
    shadows(engine)
    assert [one.request_id for one in core.shadow.divergences] == [warm.request.id]


def test_real_work_comes_first(watched: Callable[..., HandDriven]) -> None:
    engine = watched()
    core = engine.engine
    engine.submit(PROMPT, max_tokens=30)
    engine.run()
    for _ in range(4):
        assert core.shadow.step()
    assert core.stats().kv_used > 0
    core._inbox.put(("call", lambda: None))  # somebody comes
    core._idle()
    assert core.stats().kv_used == 0  # it gave way
    core._drain(wait=False)
    core._idle()
    assert (core.shadow.compared, core.shadow.diverged) == (1, 0)


def test_the_share_is_drawn_and_the_memory_is_bounded(tiny: LoadedModel) -> None:
    engine = HandDriven(tiny, NativeRunner, shadow=0.5)
    answers = [engine.submit([5 + k % 50] * 5, max_tokens=1) for k in range(200)]
    engine.run()
    chosen = [one for one in answers if one.request.token_steps is not None]
    assert 70 < len(chosen) < 130
    assert engine.engine.shadow.forgotten == len(chosen) - 64


def test_a_shadow_that_fails_harms_nobody(watched: Callable[..., HandDriven], caplog: pytest.LogCaptureFixture) -> None:
    engine = watched()
    engine.submit(PROMPT, max_tokens=3)
    engine.run()
    forward = engine.engine.runner.forward

    def broken(slices: object) -> object:
        raise MemoryError("no room")

    engine.engine.runner.forward = broken
    shadows(engine)
    assert "no room" in caplog.text
    engine.engine.runner.forward = forward
    again = engine.submit(PROMPT, max_tokens=3)
    engine.run()
    assert again.finish == "length" and engine.engine.stats().kv_used == 0
