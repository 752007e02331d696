"""Policies: who is served first, who loses its pages, and that nobody is passed for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.phase_clock import PhaseClock
from engine.policy import AGE_NS, DUE_NS, GRACE_NS, POLICIES, WaitingList
from engine.request import Request, SamplingParams
from models.store import load
from tests.engine.conftest import HandDriven
from tests.engine.serving import tiny_folder

S = 1_000_000_000


def request(number: int, arrived_s: float = 0.0, **more: int) -> Request:
    made = Request(f"r{number}", [1], SamplingParams(max_tokens=1), PhaseClock(0), lambda output: None, number=number)
    made.tokens, made.arrived_ns = [1], int(arrived_s * S)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def served(policy: str, requests: list[Request], now_s: float = 0.0) -> list[int]:
    """Numbers of the requests in the order in which their turn comes."""
    waiting, order = WaitingList(POLICIES[policy]), []
    for one in requests:
        waiting.add(one, one.arrived_ns)
    while waiting:
        head = waiting.head(int(now_s * S))
        waiting.remove(head)
        order.append(head.number)
    assert waiting.tokens == 0
    return order


def test_first_come_first_served() -> None:
    assert served("fcfs", [request(1, 0), request(2, 1, priority=-9), request(3, 2, deadline_ns=1)]) == [1, 2, 3]


def test_priority_passes_and_waiting_counts() -> None:
    step = AGE_NS / S
    early = request(1, 0, priority=2)
    assert served("priority", [early, request(2, 2 * step - 1)]) == [2, 1]
    assert served("priority", [early, request(2, 2 * step + 1)]) == [1, 2]
    assert served("priority", [request(1, 0, priority=10**9), request(2, 5)]) == [2, 1]
    assert served("priority", [request(1, 0), request(2, 1), request(3, 2)]) == [1, 2, 3]


def test_the_least_slack_goes_first() -> None:
    short = request(1, 0, deadline_ns=10 * S, predicted_ns=1 * S)  # may start at 9
    long = request(2, 0, deadline_ns=12 * S, predicted_ns=6 * S)  # must start at 6
    assert served("deadline", [short, long]) == [2, 1]
    assert served("deadline", [request(1, 0), request(2, 1, deadline_ns=DUE_NS // 2)]) == [2, 1]


def test_who_cannot_be_in_time_waits_behind_those_who_can_but_not_for_ever() -> None:
    hopeless = request(1, 0, deadline_ns=5 * S, predicted_ns=1 * S)
    fine = request(2, 0, deadline_ns=20 * S, predicted_ns=1 * S)
    assert served("deadline", [hopeless, fine], now_s=2) == [1, 2]
    hopeless.rank = fine.rank = 0
    assert served("deadline", [hopeless, fine], now_s=6) == [2, 1]
    later = request(3, 0, deadline_ns=5 * S + GRACE_NS + S, predicted_ns=0)
    assert served("deadline", [hopeless, later], now_s=6) == [1, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_greatest_rank_loses_its_pages(drive: Callable[..., HandDriven], policy: str) -> None:
    engine = drive(kv_blocks=7, policy=policy)
    # the first comes first, but the third has the better priority and the earlier deadline
    asked = [(1, 500_000), (1, 400_000), (0, 300_000)]
    answers = [engine.submit([60 + k] * 20, max_tokens=40, priority=p, deadline_ms=d) for k, (p, d) in enumerate(asked)]
    while engine.engine.stats().preemptions == 0:
        engine.step()
    lost = [k for k, answer in enumerate(answers) if answer.request.clock.facts.preemptions]
    assert lost == ([2] if policy == "fcfs" else [1] if policy == "priority" else [0])
    engine.run()
    assert [answer.finish for answer in answers] == ["length"] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_behaviour_19_a_long_prompt_neither_starves_nor_stalls(policy: str) -> None:
    """A 600-page prompt, then one of 10 tokens, under an endless stream of short ones and beside a decode."""
    budget = 64
    engine = HandDriven(load(str(tiny_folder())), kv_blocks=700, block_size=2, token_budget=budget, policy=policy)
    talker = engine.submit([7] * 8, max_tokens=300)
    engine.step()
    engine.step()
    long = engine.submit([3] * 1200, max_tokens=2)
    engine.step()
    short = engine.submit([4] * 10, max_tokens=1)
    before, steps, short_steps = len(talker.tokens), 0, 0
    stream = []
    while long.finish is None:
        stream.append(engine.submit([5 + steps % 7] * 10, max_tokens=1))
        engine.step()
        steps += 1
        short_steps += short.finish is None
        assert steps < 200
    assert short_steps <= 2  # the short one does not wait for the long one
    assert len(talker.tokens) - before >= steps  # decodes go on in every step
    assert steps <= 2 * -(-1200 // budget) + 6  # the long one gets half of every step at least
    assert sum(one.finish is not None for one in stream) >= len(stream) - 4  # and so do those of the stream


def test_what_nobody_else_can_use_goes_to_the_long_prompt(drive: Callable[..., HandDriven]) -> None:
    """The batch is full, so nobody behind could start: the whole budget is used."""
    engine = drive(token_budget=32, max_batch=2, kv_blocks=64)
    first, second = engine.submit([3] * 200, max_tokens=1), engine.submit([4] * 200, max_tokens=1)
    engine.submit([5] * 10, max_tokens=1)
    engine.run()
    assert first.finish == second.finish == "length"
    assert [record.prefill_tokens for record in engine.engine.steps.since(-1)][:12] == [32] * 12


def test_pages_are_promised_once(drive: Callable[..., HandDriven]) -> None:
    """Two prompts that do not fit together: the second waits, where it once was let in and thrown out again."""
    engine = drive(token_budget=16, kv_blocks=30)
    first, second = engine.submit([3] * 300, max_tokens=2), engine.submit([4] * 300, max_tokens=2)
    engine.run()
    assert (first.finish, second.finish) == ("length", "length")
    assert engine.engine.stats().preemptions == 0
    assert engine.engine.stats().alloc_failures == 1


def test_a_pool_can_be_made_smaller_while_it_is_used(drive: Callable[..., HandDriven]) -> None:
    engine = drive(kv_blocks=20)
    running = [engine.submit([60 + k] * 20, max_tokens=60) for k in range(3)]
    big = engine.submit([9] * 100, max_tokens=100)
    for _ in range(5):
        engine.step()
    engine.engine.resize_pool(8)
    assert engine.engine.integrity() == []
    assert (big.finish, "whole pool holds 128" in str(big.outputs[-1].error)) == ("error", True)
    engine.run()
    assert [one.finish for one in running] == ["length"] * 3
    assert engine.engine.stats().kv_total == engine.engine.stats().kv_free == 8
    engine.engine.resize_pool(20)
    assert engine.engine.integrity() == []
    assert engine.engine.stats().kv_free == 20
