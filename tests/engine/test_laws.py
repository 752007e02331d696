"""The laws: the books balance at any moment, and what breaks is found, counted and said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from engine.laws import Laws, Ledger
from tests.engine.conftest import HandDriven


def test_the_books_balance_at_all_times() -> None:
    ledger, stop, wrong = Ledger(), threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            wrong.extend(ledger.read().violations())

    def work() -> None:
        for n in range(2000):
            if n % 3:
                ledger.entered()
                ledger.ended(("stop", "length", "abort", "error")[n % 4])
            else:
                ledger.refused("queue_full")

    watcher, workers = threading.Thread(target=watch), [threading.Thread(target=work) for _ in range(3)]
    watcher.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    watcher.join()
    books = ledger.read()
    assert wrong == []
    assert (books.received, books.live) == (6000, 0)
    assert books.finished + books.aborted + books.failed + sum(books.rejected.values()) == 6000


def test_checks_are_made_every_so_many_steps_and_when_idle(drive: Callable[..., HandDriven]) -> None:
    engine = drive(check_every=4)
    engine.submit([5] * 10, max_tokens=10)
    engine.run()
    core = engine.engine
    assert core.laws.checks == 2 and core.laws.last_step == 8
    core._idle()
    assert core.laws.checks == 3 and core.laws.last_step == core.stats().steps == 10
    core._idle()  # nothing has happened since
    assert core.laws.checks == 3
    assert core.laws.violations == 0


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda core: core.ledger.ended("stop"), "are live"),
        (lambda core: core.pool._free.pop(), "not the whole pool"),
        (lambda core: setattr(core.counts, "step_tokens", 5), "steps computed 5 tokens"),
        (lambda core: core.pool._count.__setitem__(3, 1), "reference counts of pages [3]"),
    ],
)
def test_every_broken_law_is_found(
    drive: Callable[..., HandDriven], harm: Callable, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = drive()
    answer = engine.submit([5] * 10)
    engine.run()
    assert answer.finish == "length"
    harm(engine.engine)
    with caplog.at_level(logging.ERROR):
        found = engine.engine.check()
    assert any(said in one for one in found)
    assert said in caplog.text
    laws = engine.engine.laws
    assert laws.violations == len(found) and laws.first == laws.last == found


def test_the_same_violation_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    laws = Laws(every=1)
    for step in range(3):
        laws.checked(["a law"], step)
    assert caplog.text.count("a law") == 1
    assert (laws.checks, laws.violations) == (3, 3)


def test_a_call_that_nobody_waits_for_any_more_is_not_made(drive: Callable[..., HandDriven]) -> None:
    core = drive().engine
    given_up, made, failed = core.call(lambda: 1), core.call(lambda: 2), core.call(lambda: 1 // 0)
    given_up.cancel()
    core._drain(wait=False)
    assert made.result(0) == 2
    with pytest.raises(ZeroDivisionError):
        failed.result(0)
