"""Virtual time: the same engine over a simulated runner, on a clock that jumps.  One thread, no waiting.

    clock      now, and a heap of events.  A step waits until its end: what is due before runs first, each at its own
               time, so that a request arrives in the middle of a step, as it does when a server's thread submits it
    engine     ``Engine.turn`` until there is nothing to do, then the clock jumps to the next event

What must hold: the same arrivals, configuration and seed give the same run, to the nanosecond; the clock never goes
back; nothing of scheduler, pool, clocks, admission or laws is other than in the real engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.core import Engine
from engine.leaping import LeapingEngine
from engine.phase_clock import PhaseClock
from engine.request import Output, Refusal, Request, SamplingParams
from engine.simulated import SimulatedRunner, Simulation
from models.errors import UserError

NEVER: Final = 1 << 62


class VirtualClock:
    """A clock that goes where it is told, and calls on the way what is due."""

    def __init__(self, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> int:
        return self.now_ns

    def at(self, ns: int, call: Callable[[], None]) -> None:
        """Call at ``ns``, or at once if that has passed; of two at the same time the one asked for first goes first."""
        self._count += 1
        heapq.heappush(self._events, (max(ns, self.now_ns), self._count, call))

    @property
    def next_ns(self) -> int:
        """When the next event is; NEVER if there is none."""
        return self._events[0][0] if self._events else NEVER

    def wait_until(self, ns: int) -> None:
        """Go there; what is due by then runs at its own time.  An ``ns`` that has passed is now."""
        while self._events and self._events[0][0] <= ns:
            due, _number, call = heapq.heappop(self._events)
            self.now_ns = due
            call()
        self.now_ns = max(ns, self.now_ns)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come.  at_ns: on the virtual clock.  deadline_ms: after that.  leaves_ns: when its client goes."""

    at_ns: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    deadline_ms: int | None = None
    leaves_ns: int | None = None


@dataclass(slots=True)
class Life:
    """What is kept of a request that is over; of a refused one ``reason`` is the refusal's, and it has no clock.

    token_steps: the step of each token, where it was asked for.
    """

    id: str
    arrived_ns: int
    prompt_tokens: int
    output_tokens: int
    reason: str
    clock: PhaseClock | None = None
    token_steps: list[int] | None = None


@dataclass(slots=True)
class VirtualEngine:
    """An engine in virtual time.  ``feed`` what arrives, then ``run``; ``lives`` are the requests, in order of ends.

    gap_ns: time between two steps with work at hand (a fit knows it).  text: make texts, so that stop strings act.
    keep: keep the requests themselves as well (their tokens, for tests).  token_steps: note the step of each token.
    pauses: (at_ns, length_ns), ascending: the first step after at_ns starts so much later.  leaping: leave out the
    work that nobody can see (``engine.leaping``); False: the plain engine, which does the same in more time.
    """

    config: EngineConfig
    what: Simulation
    gap_ns: int = 0
    text: bool = False
    keep: bool = False
    token_steps: bool = False
    pauses: tuple[tuple[int, int], ...] = ()
    leaping: bool = True
    clock: VirtualClock = field(default_factory=VirtualClock)
    lives: list[Life] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    engine: Engine = field(init=False)
    _count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.config.shadow:
            raise UserError("nothing is computed, so nothing can be run again alone", where="--shadow")
        runner = SimulatedRunner(self.config, self.what, self.clock)
        what, text = self.what, self.text
        if self.leaping:
            self.engine = LeapingEngine(
                self.config, what.model, runner, what.cost, self.clock, text=text, gap_ns=self.gap_ns,
                tokens_seen=self.keep,
            )  # fmt: skip
        else:
            self.engine = Engine(self.config, what.model, runner, what.cost, now=self.clock, text=text)
        if self.pauses:
            self.engine.before_step = self._pause

    def use_pool(self, pool: BlockPool) -> None:
        """Serve from another pool of the same size; before the first request comes."""
        engine = self.engine
        engine.pool = engine.scheduler.pool = pool
        if isinstance(engine, LeapingEngine):
            engine.scheduler.cohort.pool = pool

    def _pause(self) -> None:
        """The host stands still before a step, as long as what is due of the pauses takes."""
        while self.pauses and self.pauses[0][0] <= self.clock.now_ns:
            (_at, length), *rest = self.pauses
            self.pauses = tuple(rest)
            self.clock.wait_until(self.clock.now_ns + length)

    def submit(self, arrival: Arrival) -> Request | None:
        """A request comes now; None: it was refused."""
        self._count += 1
        now, name = self.clock.now_ns, f"v{self._count}"
        params = arrival.params
        if params.stop and not self.text:
            raise ValueError("stop strings need text")
        if params.seed is None:
            params = replace(params, seed=self._count)
        clock = PhaseClock(now)
        clock.parsed(now)
        clock.tokenized(now)
        request = Request(name, arrival.prompt_ids, params, clock, self._heard, streamed=self.text)
        request.priority = arrival.priority
        if self.token_steps:
            request.token_steps = []
        if arrival.deadline_ms is not None:
            request.deadline_ns = now + 1_000_000 * arrival.deadline_ms
        self.requests[name] = request
        try:
            self.engine.submit(request)
        except Refusal as refusal:
            del self.requests[name]
            self.lives.append(Life(name, now, len(arrival.prompt_ids), 0, refusal.reason))
            return None
        if arrival.leaves_ns is not None:
            self.clock.at(arrival.leaves_ns, lambda: self.abort(name))
        return request

    def abort(self, request_id: str) -> None:
        """Its client is gone."""
        self.engine.abort(request_id)

    def _heard(self, output: Output) -> None:
        if output.finish_reason is None:
            return
        request = self.requests[output.request_id] if self.keep else self.requests.pop(output.request_id)
        request.clock.sent(output.t_ns)
        life = Life(
            request.id,
            request.clock.head_ns,
            len(request.prompt_ids),
            request.generated,
            output.finish_reason,
            request.clock,
            request.token_steps,
        )
        self.lives.append(life)

    def feed(self, arrivals: Iterable[Arrival]) -> None:
        """Let them come, in order of time; each is asked for when the one before it has come."""
        self._next(iter(arrivals))

    def _next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            return

        def come() -> None:
            self.submit(arrival)
            self._next(arrivals)

        self.clock.at(arrival.at_ns, come)

    def run(self, until_ns: float = math.inf) -> None:
        """Turn until nothing is left to do and to come, or until the clock is there (the step in hand ends)."""
        clock, engine = self.clock, self.engine
        # a hook between steps that is not ours may want to see every step
        if isinstance(engine, LeapingEngine) and engine.before_step in (None, self._pause):
            engine.horizon = lambda: min(clock.next_ns, until_ns, self.pauses[0][0] if self.pauses else NEVER)
        try:
            while clock.now_ns < until_ns:
                if self.turn():
                    continue
                if clock.next_ns > until_ns or clock.next_ns == NEVER:
                    return
                clock.wait_until(clock.next_ns)
        finally:
            if isinstance(engine, LeapingEngine):
                engine.horizon = None

    def turn(self) -> bool:
        """One turn of the engine, and the gap after its step where that left work behind; did a step run?"""
        stepped = self.engine.turn()
        if stepped and self.gap_ns and self.engine.scheduler.has_work:
            self.clock.wait_until(self.clock.now_ns + self.gap_ns)
        return stepped
