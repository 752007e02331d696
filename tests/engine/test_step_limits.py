"""A device without memory for a step: smaller steps, fewer requests at once, and back again; nobody fails for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine import step_limits
from engine.flight import DeviceFull
from engine.runner_cpu import CpuRunner
from engine.scheduler import Slice
from engine.step_limits import StepLimits
from models.store import LoadedModel
from tests.engine.conftest import HandDriven

PROMPTS = [[5, 9, 13], list(range(20, 75)), list(range(100, 117)), [7] * 33, [8] * 5, [9] * 21]


class Tight(CpuRunner):
    """Has memory for ``room`` tokens a step; what is more it computes in parts, as the kernels' runner does."""

    room = 1 << 30
    divided_steps = 0

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        if self.room < 1:
            self.divided_steps += 1
            raise DeviceFull("no memory for a step of 1 tokens")
        if sum(one.n for one in slices) > self.room:
            self.divided_steps += 1
        return super().forward(slices)


def use(driven: HandDriven) -> list[list[int]]:
    answers = [driven.submit(prompt, max_tokens=12, temperature=1.0, seed=k) for k, prompt in enumerate(PROMPTS)]
    driven.run()
    return [answer.tokens for answer in answers]


def test_a_shortage_becomes_smaller_steps_and_fewer_requests_and_the_answers_stay(tiny: LoadedModel) -> None:
    want = use(HandDriven(tiny, Tight))
    driven = HandDriven(tiny, Tight)
    runner, limits = driven.engine.runner, driven.engine.scheduler.limits
    assert isinstance(runner, Tight)
    runner.room = 3
    assert use(driven) == want
    assert (limits.budget, limits.batch) == (2, 2) and limits.shortages < 8
    records = driven.engine.steps.since(-1)
    first = next(i for i, record in enumerate(records) if sum(record.request_tokens) <= 3)
    assert all(sum(record.request_tokens) <= 3 for record in records[first:])  # and never more again
    assert driven.engine.admission._budget == 2
    stats = driven.engine.stats()
    assert stats.finished == {"length": 6} and stats.kv_free == stats.kv_total


def test_requests_above_the_new_batch_go_back_into_the_queue_and_end_well(tiny: LoadedModel) -> None:
    want = use(HandDriven(tiny, Tight))
    driven = HandDriven(tiny, Tight)
    runner = driven.engine.runner
    assert isinstance(runner, Tight)
    answers = [driven.submit(prompt, max_tokens=12, temperature=1.0, seed=k) for k, prompt in enumerate(PROMPTS)]
    while any(one.request.generated == 0 for one in answers):
        driven.step()
    runner.room = 4  # six decode
    driven.step()
    assert len(driven.engine.scheduler.running) == 6
    driven.step()
    assert len(driven.engine.scheduler.running) == 3
    driven.run()
    assert [answer.tokens for answer in answers] == want
    assert driven.engine.stats().preemptions == 3


def test_memory_that_comes_back_is_used_again(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_limits, "CALM", 3)
    driven = HandDriven(tiny, Tight)
    runner, limits = driven.engine.runner, driven.engine.scheduler.limits
    assert isinstance(runner, Tight)
    runner.room = 10
    driven.submit(list(range(3, 60)), max_tokens=1)
    driven.step()
    assert (limits.budget, limits.batch) == (28, 16)
    runner.room = 1 << 30
    driven.submit(PROMPTS[1], max_tokens=12)
    driven.run()
    assert (limits.budget, limits.batch, limits.reduced) == (64, 16, False)


def test_a_step_that_cannot_be_had_at_all_fails_its_requests_alone(tiny: LoadedModel) -> None:
    driven = HandDriven(tiny, Tight)
    runner = driven.engine.runner
    assert isinstance(runner, Tight)
    runner.room = 0
    answer = driven.submit(PROMPTS[0])
    driven.run()
    assert (answer.finish, answer.outputs[-1].code) == ("error", "kv_oom")
    runner.room = 1 << 30
    after = driven.submit(PROMPTS[0])
    driven.run()
    assert after.finish == "length" and driven.engine.stats().kv_free == 64


def test_limits_never_go_below_one() -> None:
    limits = StepLimits(64, 8)
    for tokens in (64, 3, 1, 1):
        limits.short(tokens)
    assert (limits.budget, limits.batch, limits.shortages) == (1, 1, 4)
