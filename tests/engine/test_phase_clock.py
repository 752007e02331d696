"""Phases tile the time of a request: they sum to the wall time to the nanosecond, in every kind of life."""

from __future__ import annotations

import random

import pytest

from engine.phase_clock import PhaseClock
from telemetry.names import DECODE, PHASES, PREEMPTED, PREFILL, QUEUE, RECOMPUTE, SEND, STALL


def test_a_plain_life() -> None:
    clock = PhaseClock(1000)
    clock.parsed(1100)
    clock.tokenized(1150)
    clock.scheduled(2000, stall_total=500)
    clock.first_token(5000, stall_total=600)
    clock.ended(9000, stall_total=1600)
    clock.sent(9050)
    phases = clock.durations()
    assert tuple(phases) == PHASES
    assert phases[QUEUE] == 850 and phases[PREFILL] == 2900 and phases[DECODE] == 3000
    assert phases[STALL] == 1100 and phases[SEND] == 50
    assert sum(phases.values()) == clock.duration_ns == 8050


def test_preempted_twice_once_while_it_recomputes() -> None:
    clock = PhaseClock(0)
    clock.parsed(1)
    clock.tokenized(2)
    clock.scheduled(10, 0)
    clock.first_token(20, 0)
    clock.preempted(30, 0)
    clock.scheduled(50, 5)
    clock.preempted(60, 5)
    clock.scheduled(70, 6)
    clock.restored(90, 8)
    clock.ended(100, 8)
    clock.sent(101)
    phases = clock.durations()
    assert phases[PREEMPTED] == 30 and phases[RECOMPUTE] == 28 and phases[STALL] == 2 and phases[DECODE] == 20
    assert clock.facts.preemptions == 2
    assert sum(phases.values()) == 101


def test_refused_before_the_engine_saw_it() -> None:
    clock = PhaseClock(5)
    clock.refused(9)
    clock.sent(12)
    assert clock.durations()[SEND] == 3
    assert sum(clock.durations().values()) == 7


def test_marks_out_of_order_are_errors() -> None:
    clock = PhaseClock(0)
    with pytest.raises(RuntimeError, match="cannot turn"):
        clock.first_token(1, 0)
    clock.parsed(10)
    with pytest.raises(RuntimeError, match="is before"):
        clock.tokenized(9)
    with pytest.raises(RuntimeError, match="still running"):
        _ = clock.duration_ns


@pytest.mark.parametrize("seed", range(50))
def test_any_life_sums_exactly(seed: int) -> None:
    draw = random.Random(seed)
    now, stall = draw.randrange(10**12), 0
    clock = PhaseClock(now)

    def later(with_stall: bool = False) -> int:
        nonlocal now, stall
        gap = draw.randrange(50) if with_stall else 0
        stall += gap
        now += gap + draw.randrange(10**6)
        return now

    clock.parsed(later())
    clock.tokenized(later())
    stall += draw.randrange(1000)
    clock.scheduled(later(), stall)
    while draw.random() < 0.8:
        later(with_stall=True)
        if draw.random() < 0.3:
            clock.preempted(now, stall)
            if draw.random() < 0.2:
                break
            later()
            stall += draw.randrange(100)
            clock.scheduled(now, stall)
            later(with_stall=True)
            clock.restored(now, stall)
        elif clock.first_token_ns is None:
            clock.first_token(now, stall)
    clock.ended(later(with_stall=clock.phase not in (PREEMPTED, QUEUE)), stall)
    clock.sent(later())
    assert sum(clock.durations().values()) == clock.duration_ns
    assert all(value >= 0 for value in clock.durations().values())
