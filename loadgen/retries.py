"""Attempts at one logical request: which failures are tried again, when, and the row of every attempt.

Owns the pauses and the budget of one worker.  Must always hold: an attempt that ended has exactly one row in
`attempts`, with what became of it; a request that will be tried again is `pending` until its next attempt begins; at
the end of the run those that still pause end with their last failure.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any, Final

from loadgen.alarm import Alarm, alarm
from loadgen.clean import clean
from loadgen.flight import Flight
from loadgen.patience import Budget, Patience
from loadgen.spool import Spool

ANSWERED: Final = "answered"
RETRIED: Final = "retried"
GAVE_UP: Final = "gave_up"  # the last attempt that a user makes, or the server asked for too long a pause
NO_BUDGET: Final = "no_budget"
NOT_RETRIED: Final = "not_retried"  # a failure of a kind that nobody tries again
CUT: Final = "cut"  # the run ended


class Retries:
    """begin: called with the flight that failed, when its pause is over."""

    def __init__(
        self, patience: Patience, seed: int, spool: Spool, worker: int, begin: Callable[[Flight], None]
    ) -> None:
        self._patience = patience
        self._seed = seed
        self._spool = spool
        self._worker = worker
        self._begin = begin
        self._waiting: list[tuple[int, int, Flight]] = []  # (ns of the next attempt, index, the one that failed)
        self._alarm: Alarm | None = None
        self._zero_ns = 0
        self.budget = Budget(patience.budget)

    def start(self, zero_ns: int) -> None:
        """zero_ns: the run's zero on CLOCK_MONOTONIC."""
        self._zero_ns = zero_ns
        self._alarm = alarm(self._ring)

    @property
    def pending(self) -> int:
        """Requests that pause before their next attempt."""
        return len(self._waiting)

    def ended(self, flight: Flight, *, stopping: bool) -> bool:
        """An attempt has ended: write it down.  True: it will be tried again."""
        now = time.monotonic_ns()
        pause_s, verdict = self._pause(flight, stopping)
        self._spool.put_attempt(self._row(flight, verdict))
        if pause_s is None:
            return False
        flight.next_pause_s = pause_s
        flight.next_due_ns = now + round(pause_s * 1e9)
        heapq.heappush(self._waiting, (flight.next_due_ns, flight.call.index, flight))
        self._set()
        return True

    def write_off(self) -> list[Flight]:
        """The run ends: give back those that pause, with the failure that they have."""
        found = [flight for _, _, flight in self._waiting]
        self._waiting.clear()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        return found

    def figures(self) -> dict[str, int]:
        """Retries made and refused by the budget."""
        return {"retries": self.budget.spent, "retries_refused": self.budget.refused, "pausing": self.pending}

    def _pause(self, flight: Flight, stopping: bool) -> tuple[float | None, str]:
        failure = flight.answer.failure
        if failure is None:
            return None, ANSWERED
        if stopping:
            return None, CUT
        if failure.reason not in self._patience.retry_on:
            return None, NOT_RETRIED
        if flight.attempt >= self._patience.retries:
            return None, GAVE_UP
        pause = self._patience.pause_s(self._seed, flight.call.index, flight.attempt + 1, flight.answer.retry_after_s)
        if pause is None:
            return None, GAVE_UP
        return (pause, RETRIED) if self.budget.take() else (None, NO_BUDGET)

    def _row(self, flight: Flight, verdict: str) -> dict[str, Any]:
        answer = flight.answer

        def after(ns: int | None) -> float | None:
            return None if ns is None else (ns - self._zero_ns) / 1e9

        return {
            "index": flight.call.index,
            "attempt": flight.attempt,
            "worker": self._worker,
            "target": flight.target,
            "replica": flight.replica,
            "due_s": flight.call.intended_s if flight.attempt == 0 else after(flight.due_ns),
            "pause_s": flight.pause_s,
            "sent_s": after(flight.sent_ns),
            "first_token_s": after(answer.first_token_ns),
            "end_s": after(answer.end_ns),
            "status": answer.status,
            "error": answer.failure.reason if answer.failure else None,
            "error_detail": clean(answer.failure.detail) if answer.failure else None,
            "retry_after_s": answer.retry_after_s,
            "verdict": verdict,
        }

    def _set(self) -> None:
        if self._alarm is not None and self._waiting:
            self._alarm.set(self._waiting[0][0])

    def _ring(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic_ns():
            _, _, flight = heapq.heappop(self._waiting)
            self._begin(flight)
        self._set()
