"""Where the time of one request went.  The only source of phases for spans, metrics and rows.

A clock is a tiling: contiguous intervals from the moment the request head was read to the moment the last byte of
the answer was written, each in exactly one phase.  So the phases sum to the wall time to the nanosecond, and none of
them is a remainder.  Stalls (runnable, but no step running) lie inside prefill, decode and recompute intervals; they
are measured by the engine as one running total of gaps between steps, and taken out of the phase they interrupt.

Stamps are ``time.monotonic_ns()``.  The server marks the ends, the engine thread what is between; the request
changes hands through a queue, so no lock is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from telemetry.names import (
    DECODE,
    INGRESS,
    PHASES,
    PREEMPTED,
    PREFILL,
    QUEUE,
    RECOMPUTE,
    SEND,
    STALL,
    TOKENIZE,
)


class Interval(NamedTuple):
    """One tile: phase, start and end (ns), and the stall inside it (ns)."""

    phase: str
    start_ns: int
    end_ns: int
    stall_ns: int


@dataclass(slots=True)
class StepFacts:
    """What the engine saw of a request, beside its times."""

    queue_depth_at_arrival: int = 0
    queue_tokens_ahead: int = 0
    kv_usage_at_admit: float = 0.0
    cached_tokens: int = 0
    prefill_chunks: int = 0
    drafts_accepted: int = 0  # tokens whose rows were computed ahead, by n-gram speculation
    prefill_wait_ns: int = 0
    preemptions: int = 0
    decode_max_gap_ns: int = 0
    step_first: int = -1
    step_last: int = -1
    steps: int = 0
    batch_sum: int = 0
    floor_ttft_ns: int | None = None  # models.roofline, alone on the device; None: unknown, or no such token
    floor_tpot_ns: int | None = None

    @property
    def batch_size_mean(self) -> float:
        """Mean number of requests in the steps that computed this one."""
        return self.batch_sum / self.steps if self.steps else 0.0


class PhaseClock:
    """The phases of one request, from ``head_ns`` (request head read) on.

    Marks must come in the order of the life of a request; a mark out of order raises RuntimeError, since a wrong
    account is worse than none.
    """

    __slots__ = (
        "_phase",
        "_since",
        "_stall_at",
        "facts",
        "first_token_ns",
        "head_ns",
        "intervals",
        "last_token_ns",
        "sent_ns",
    )

    def __init__(self, head_ns: int) -> None:
        self.head_ns = head_ns
        self.intervals: list[Interval] = []
        self.facts = StepFacts()
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.sent_ns: int | None = None
        self._phase = INGRESS
        self._since = head_ns
        self._stall_at = 0

    @property
    def phase(self) -> str:
        """The phase that is open now."""
        return self._phase

    def _turn(self, expected: tuple[str, ...], to: str, ns: int, stall_total: int | None = None) -> None:
        if self._phase not in expected or self.sent_ns is not None:
            raise RuntimeError(f"phase clock: {self._phase} cannot turn into {to}")
        if ns < self._since:
            raise RuntimeError(f"phase clock: {to} at {ns} is before {self._phase} at {self._since}")
        stall = 0 if stall_total is None else stall_total - self._stall_at
        self.intervals.append(Interval(self._phase, self._since, ns, stall))
        self._phase, self._since = to, ns
        if stall_total is not None:
            self._stall_at = stall_total

    # --- the server's marks ---
    def parsed(self, ns: int) -> None:
        """The body was read and understood."""
        self._turn((INGRESS,), TOKENIZE, ns)

    def tokenized(self, ns: int) -> None:
        """The prompt's token ids are known; from here the request is enqueued."""
        self._turn((TOKENIZE,), QUEUE, ns)

    def refused(self, ns: int) -> None:
        """The server will not run it (bad request, admission): what follows is sending the answer."""
        self._turn((INGRESS, TOKENIZE, QUEUE), SEND, ns)

    def sent(self, ns: int) -> None:
        """The last byte of the answer was written (or the client was found gone).  Closes the clock."""
        self._turn((SEND,), SEND, ns)
        self.sent_ns = ns

    # --- the engine's marks; stall_total: the engine's running total of gaps (ns) at that moment ---
    def scheduled(self, ns: int, stall_total: int) -> None:
        """The first step that schedules it (again) starts."""
        self._turn((QUEUE, PREEMPTED), PREFILL if self._phase == QUEUE else RECOMPUTE, ns)
        self._stall_at = stall_total

    def restored(self, ns: int, stall_total: int) -> None:
        """All tokens lost to a preemption are computed again."""
        self._turn((RECOMPUTE,), PREFILL if self.first_token_ns is None else DECODE, ns, stall_total)

    def first_token(self, ns: int, stall_total: int) -> None:
        """The first token was sampled."""
        self.first_token_ns = ns
        self._turn((PREFILL,), DECODE, ns, stall_total)

    def preempted(self, ns: int, stall_total: int) -> None:
        """Its KV pages were taken away."""
        self.facts.preemptions += 1
        self._turn((PREFILL, DECODE, RECOMPUTE), PREEMPTED, ns, stall_total)

    def ended(self, ns: int, stall_total: int) -> None:
        """The engine is done with it: last token, abort or failure, in whatever state it was."""
        running = self._phase in (PREFILL, DECODE, RECOMPUTE)
        self._turn((QUEUE, PREFILL, DECODE, PREEMPTED, RECOMPUTE), SEND, ns, stall_total if running else None)
        self.last_token_ns = ns

    # --- reading ---
    @property
    def duration_ns(self) -> int:
        """Wall time from the request head to the last byte (ns); the clock must be closed."""
        if self.sent_ns is None:
            raise RuntimeError("phase clock: still running")
        return self.sent_ns - self.head_ns

    def durations(self) -> dict[str, int]:
        """ns in every phase, all nine present; they sum to ``duration_ns`` exactly."""
        total = dict.fromkeys(PHASES, 0)
        for tile in self.intervals:
            total[tile.phase] += tile.end_ns - tile.start_ns - tile.stall_ns
            total[STALL] += tile.stall_ns
        return total

    def account(self) -> dict[str, Any]:
        """The account as it travels with the answer (integers are ns or counts)."""
        facts = self.facts
        return {
            "duration_ns": self.duration_ns,
            "phases": self.durations(),
            "prefill_wait_ns": facts.prefill_wait_ns,
            "prefill_chunks": facts.prefill_chunks,
            "preemptions": facts.preemptions,
            "cached_tokens": facts.cached_tokens,
            "queue_depth_at_arrival": facts.queue_depth_at_arrival,
            "queue_tokens_ahead": facts.queue_tokens_ahead,
            "decode_max_gap_ns": facts.decode_max_gap_ns,
            "batch_size_mean": round(facts.batch_size_mean, 4),
            "step_first": facts.step_first,
            "step_last": facts.step_last,
            "floor_ttft_ns": facts.floor_ttft_ns,
            "floor_tpot_ns": facts.floor_tpot_ns,
        }
