"""Behaviour of the whole engine, stepped by hand on a tiny random Llama."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.request import NeverFits, QueueFull, RequestTooLong
from telemetry.names import PREEMPTED, PREFILL, QUEUE, RECOMPUTE, STALL

PROMPT = list(range(20, 50))


def test_one_token_ends_by_length(drive: Callable[..., object]) -> None:
    engine = drive()
    answer = engine.submit(PROMPT, max_tokens=1)
    engine.run()
    assert (answer.finish, len(answer.tokens)) == ("length", 1)


def test_end_of_text_at_the_last_token_is_a_stop(drive: Callable[..., object]) -> None:
    engine = drive()
    probe = engine.submit(PROMPT, max_tokens=3)
    engine.run()
    answer = engine.submit(PROMPT, max_tokens=3, stop_token_ids=(probe.tokens[2],))
    engine.run()
    assert answer.finish == "stop"
    assert answer.tokens == probe.tokens[: probe.tokens.index(probe.tokens[2]) + 1]


def test_min_tokens_holds_the_stop_back(drive: Callable[..., object]) -> None:
    engine = drive()
    probe = engine.submit(PROMPT, max_tokens=2)
    engine.run()
    answer = engine.submit(PROMPT, max_tokens=6, min_tokens=6, stop_token_ids=(probe.tokens[0],))
    engine.run()
    assert len(answer.tokens) == 6 and probe.tokens[0] not in answer.tokens


def test_refusals_leave_nothing_behind(drive: Callable[..., object]) -> None:
    engine = drive(kv_blocks=4, queue_limit=2, max_context=200)
    with pytest.raises(RequestTooLong, match=r"200 tokens.*195 tokens in the prompt and 8"):
        engine.submit([5] * 195)
    with pytest.raises(NeverFits, match=r"78 tokens.*64"):
        engine.submit([5] * 70)
    engine.submit(PROMPT)
    engine.submit(PROMPT)
    with pytest.raises(QueueFull, match="2 requests"):
        engine.submit(PROMPT)
    engine.run()
    stats = engine.engine.stats()
    assert (stats.received, stats.live) == (5, 0)
    assert stats.rejected == {"context_overflow": 1, "kv_oom": 1, "queue_full": 1}
    assert engine.engine.integrity() == []


def test_a_request_that_never_fits_does_not_hold_up_those_behind_it(drive: Callable[..., object]) -> None:
    engine = drive(kv_blocks=4)
    with pytest.raises(NeverFits):
        engine.submit([5] * 100)
    answer = engine.submit(PROMPT)
    engine.run()
    assert answer.finish == "length"


def test_cached_prefix_gives_the_same_tokens(drive: Callable[..., object]) -> None:
    engine = drive()
    prompt = list(range(100, 148))  # three whole pages
    cold = engine.submit(prompt)
    engine.run()
    warm = engine.submit(prompt)
    engine.run()
    assert warm.request.clock.facts.cached_tokens == 32
    assert warm.tokens == cold.tokens


def test_preempted_and_resumed_gives_the_same_tokens(drive: Callable[..., object]) -> None:
    calm = drive()
    want = []
    for k in range(3):
        answer = calm.submit([60 + k] * 20, max_tokens=40)
        calm.run()
        want.append(answer.tokens)
    tight = drive(kv_blocks=7)
    answers = [tight.submit([60 + k] * 20, max_tokens=40) for k in range(3)]
    tight.run()
    assert [answer.tokens for answer in answers] == want
    assert tight.engine.stats().preemptions > 0
    hit = [answer for answer in answers if answer.request.clock.facts.preemptions]
    for answer in hit:
        answer.request.clock.sent(answer.request.clock.last_token_ns + 1)
        phases = answer.request.clock.durations()
        assert phases[PREEMPTED] > 0 and phases[RECOMPUTE] > 0
        assert sum(phases.values()) == answer.request.clock.duration_ns


def test_seeded_sampling_does_not_depend_on_batch_mates(drive: Callable[..., object]) -> None:
    engine = drive()
    alone = engine.submit(PROMPT, temperature=1.0, seed=42, max_tokens=10)
    engine.run()
    mates = [engine.submit([9 + k] * (5 + k), temperature=1.3, max_tokens=10) for k in range(5)]
    among = engine.submit(PROMPT, temperature=1.0, seed=42, max_tokens=10)
    engine.run()
    assert among.tokens == alone.tokens
    assert all(mate.finish == "length" for mate in mates)


def test_a_row_that_is_not_finite_fails_alone_and_is_not_cached(drive: Callable[..., object]) -> None:
    engine = drive()
    good = engine.submit([7] * 40)
    bad = engine.submit([8] * 40)
    forward = engine.engine.runner.forward

    def poisoned(slices: list[object]) -> torch.Tensor:
        logits = forward(slices).clone()
        rows = [piece.request for piece in slices if piece.sample]
        logits[[i for i, request in enumerate(rows) if request is bad.request]] = float("nan")
        return logits

    engine.engine.runner.forward = poisoned
    engine.run()
    assert bad.finish == "error" and "not finite" in bad.outputs[-1].error
    assert good.finish == "length"
    engine.engine.runner.forward = forward
    again = engine.submit([8] * 40)
    engine.run()
    assert again.request.clock.facts.cached_tokens == 0 and again.finish == "length"


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(drive: Callable[..., object]) -> None:
    engine = drive()
    forward = engine.engine.runner.forward

    def broken(slices: object) -> torch.Tensor:
        raise MemoryError("no room")

    engine.engine.runner.forward = broken
    lost = engine.submit(PROMPT)
    engine.step()
    assert lost.finish == "error" and "no room" in lost.outputs[-1].error
    engine.engine.runner.forward = forward
    answer = engine.submit(PROMPT)
    engine.run()
    assert answer.finish == "length"


def test_a_long_prompt_neither_starves_nor_stalls_the_others(drive: Callable[..., object]) -> None:
    engine = drive(token_budget=32, kv_blocks=64)
    talker = engine.submit(PROMPT[:8], max_tokens=200)
    engine.step()
    long = engine.submit([3] * 480, max_tokens=2)
    engine.step()
    before = len(talker.tokens)
    short = engine.submit([4] * 10, max_tokens=2)
    steps = 0
    while long.finish is None:
        engine.step()
        steps += 1
    assert len(talker.tokens) - before >= steps - 1  # a token in every step
    assert short.finish is not None or len(short.tokens) >= 0
    assert steps <= -(-480 // 31) + 3


def test_text_of_a_cut_stream_is_the_text_of_the_whole(drive: Callable[..., object]) -> None:
    engine = drive()
    answer = engine.submit(PROMPT, temperature=1.5, seed=3, max_tokens=60)
    engine.run()
    whole = b"".join(engine.engine.model.tokenizer.token_bytes(token) for token in answer.tokens)
    text = whole.decode(errors="replace")
    assert answer.text == text or text.startswith(answer.text)  # an unfinished last character is dropped


def test_phases_can_be_rebuilt_from_the_step_log(drive: Callable[..., object]) -> None:
    engine = drive(token_budget=32)
    answers = [engine.submit([50 + k] * (10 + 25 * k), max_tokens=6) for k in range(4)]
    engine.run()
    records = engine.engine.steps.since(-1)
    for answer in answers:
        request = answer.request
        request.clock.sent(request.clock.last_token_ns)
        mine = [record for record in records if request.id in record.requests]
        first, last = mine[0], mine[-1]
        tokenized = request.clock.intervals[2].start_ns
        computed = [dict(zip(record.requests, record.request_tokens, strict=True))[request.id] for record in mine]
        prompt_left, ends = len(request.prompt_ids), 0
        while prompt_left > 0:
            prompt_left -= computed[ends]
            ends += 1
        first_token = mine[ends - 1].end_ns
        stall = sum(r.gap_ns for r in records if first.start_ns < r.start_ns <= first_token)
        phases = request.clock.durations()
        assert phases[QUEUE] == first.start_ns - tokenized
        assert phases[PREFILL] == first_token - first.start_ns - stall
        assert phases[STALL] == sum(r.gap_ns for r in records if first.start_ns < r.start_ns <= last.start_ns)
        assert request.clock.last_token_ns == last.end_ns


@pytest.mark.parametrize("seed", range(3))
def test_random_adds_aborts_and_preemptions_keep_the_laws_at_every_step(
    drive: Callable[..., object], seed: int
) -> None:
    draw = random.Random(seed)
    engine = drive(kv_blocks=10, max_batch=6, token_budget=24)
    answers = []
    for _ in range(250):
        what = draw.random()
        if what < 0.3 and len(engine.engine.live) < 12:
            prompt = [draw.randrange(3, 6)] * draw.randint(1, 60)
            answers.append(engine.submit(prompt, max_tokens=draw.randint(1, 40), temperature=draw.choice([0.0, 1.0])))
        elif what < 0.4 and answers:
            engine.abort(draw.choice(answers))
        elif engine.engine.scheduler.has_work:
            engine.step()
    engine.run()
    assert engine.engine.stats().kv_free == 10
    assert all(answer.finish in ("length", "abort") for answer in answers)
    for answer in answers:
        answer.request.clock.sent(answer.request.clock.last_token_ns)
        assert sum(answer.request.clock.durations().values()) == answer.request.clock.duration_ns
