"""Admission: what is refused, what is said about when to come back, and how good the prediction behind it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.admission import RETRY_MAX_S, WARM_STEPS, Admission, Backlog, Limits, StepModel
from engine.phase_clock import PhaseClock
from engine.request import QueueFull, Request, SamplingParams, TokensFull, TooSlow
from tests.engine.conftest import HandDriven


def seconds(tokens: float, sequences: float, context: float) -> float:
    """A machine: 5 ms, 0.5 ms a token, 1 ms a sequence, 2 us a context token."""
    return 5e-3 + 5e-4 * tokens + 1e-3 * sequences + 2e-6 * context


def trained(limits: Limits, noise: float = 0.0, steps: int = 600) -> Admission:
    """After a while of mixed steps, with answers of 20 tokens."""
    draw = random.Random(1)
    admission = Admission(limits, max_batch=8, token_budget=64)
    for _ in range(steps):
        sequences = draw.randint(1, 8)
        tokens = sequences if draw.random() < 0.5 else draw.randint(sequences, 64)
        context = draw.randint(tokens, 4000)
        took = seconds(tokens, sequences, context) * (1 + noise * draw.gauss(0, 1))
        admission.step(tokens, sequences, context, took)
    for _ in range(50):
        over = request(10)
        over.tokens = [1] * 30
        admission.over(over, "length")
    return admission


def request(prompt: int, max_tokens: int = 20) -> Request:
    return Request("r", [1] * prompt, SamplingParams(max_tokens=max_tokens), PhaseClock(0), lambda output: None)


def test_the_step_model_finds_the_machine() -> None:
    model = trained(Limits(10), noise=0.05).model
    for tokens, sequences, context in ((8, 8, 1000), (64, 3, 3000), (1, 1, 50)):
        assert model.predict(tokens, sequences, context) == pytest.approx(seconds(tokens, sequences, context), rel=0.1)
    assert 0.02 < model.error < 0.1  # it is told that the noise is 5 %


def test_the_step_model_follows_a_machine_that_gets_slower() -> None:
    model, draw = trained(Limits(10)).model, random.Random(2)
    for _ in range(2000):
        tokens, context = draw.randint(1, 64), draw.randint(64, 4000)
        model.learn(tokens, 4, context, 2 * seconds(tokens, 4, context))
    assert model.predict(32, 4, 2000) == pytest.approx(2 * seconds(32, 4, 2000), rel=0.05)


def test_one_disturbed_step_does_not_count_for_much() -> None:
    model = trained(Limits(10)).model
    before = model.predict(32, 4, 2000)
    model.learn(32, 4, 2000, 30.0)
    assert model.predict(32, 4, 2000) < 1.5 * before


def test_steps_that_are_all_alike_do_no_harm() -> None:
    model = StepModel()
    for _ in range(20_000):
        model.learn(4, 4, 400, 0.01)
    assert model.predict(4, 4, 400) == pytest.approx(0.01, rel=1e-3)
    assert model.error < 1e-3


def test_nothing_is_refused_by_a_model_that_knows_nothing() -> None:
    admission = Admission(Limits(10, ttft_s=1e-6), max_batch=8, token_budget=64)
    for _ in range(WARM_STEPS - 1):
        admission.step(64, 8, 1000, 10.0)
    asked = request(64)
    admission.decide(asked, Backlog(waiting=5, tokens=5000))
    assert asked.predicted_ttft_ns is None


def test_limits_and_when_to_come_back() -> None:
    admission = trained(Limits(requests=10, tokens=1000, ttft_s=2.0))
    asked = request(60)
    admission.decide(asked, Backlog())
    assert asked.predicted_ttft_ns == pytest.approx(1e9 * seconds(64, 1, 64), rel=0.05)
    assert asked.predicted_ns > asked.predicted_ttft_ns

    with pytest.raises(QueueFull, match="10 requests are waiting") as full:
        admission.decide(request(10), Backlog(waiting=10, tokens=100, running=8))
    drain = admission.drain_s(Backlog(waiting=10, tokens=100, running=8))
    assert full.value.retry_after_s == pytest.approx(max(1.0, drain / 2))

    with pytest.raises(TokensFull, match=r"990 tokens are waiting, and the 11 .* 1000") as tokens:
        admission.decide(request(11), Backlog(waiting=3, tokens=990))
    assert tokens.value.retry_after_s >= 1.0
    admission.decide(request(1500), Backlog())  # alone it may: it would come back for ever

    with pytest.raises(TooSlow, match=r"after \d+\.\d s, .* limit of 2 s") as slow:
        admission.decide(request(64), Backlog(waiting=1, tokens=900, unread=6000, running=4, context=2000))
    assert slow.value.retry_after_s == pytest.approx(slow.value.predicted_s - 1.0)


def test_a_full_batch_is_part_of_the_prediction() -> None:
    admission = trained(Limits(1000))
    free = admission.ttft_s(10, Backlog(waiting=0, running=7, context=800))
    full = admission.ttft_s(10, Backlog(waiting=16, tokens=160, running=8, context=800))
    answer = 20 * seconds(8, 8, 800)
    assert full - free == pytest.approx(17 / 8 * answer, rel=0.1)


def test_coming_back_is_bounded() -> None:
    admission = trained(Limits(requests=1))
    with pytest.raises(QueueFull) as full:
        admission.decide(request(10), Backlog(waiting=10_000_000, tokens=10**9, running=8))
    assert full.value.retry_after_s == RETRY_MAX_S


def test_predictions_come_true_on_a_machine_that_is_as_modelled(drive: Callable[..., HandDriven]) -> None:
    """The engine on a clock that moves as the machine above says: predicted against measured time to first token."""
    engine = drive(max_batch=4, token_budget=32, kv_blocks=400)
    core, now = engine.engine, [0]
    forward = core.runner.forward

    def timed(slices: list) -> object:
        context = sum(piece.start + piece.n for piece in slices)
        now[0] += int(1e9 * seconds(sum(piece.n for piece in slices), len(slices), context))
        return forward(slices)

    core.now, core.runner.forward = lambda: now[0], timed
    draw = random.Random(3)
    errors = []
    for turn in range(40):
        answers = []
        for _ in range(draw.randint(1, 6)):
            answers.append(engine.submit_at(now[0], [draw.randrange(3, 400) for _ in range(draw.randint(5, 120))], 10))
        while core.scheduler.has_work:
            engine.step()
        if turn >= 10:
            for answer in answers:
                asked = answer.request
                took = asked.clock.first_token_ns - asked.arrived_ns
                errors.append(abs(asked.predicted_ttft_ns - took) / took)
    assert sorted(errors)[len(errors) // 2] < 0.35
