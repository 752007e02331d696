"""The engine in virtual time, without the work that nobody can see: the same steps, and the same account of them.

    step      the decoding requests are one cohort (``engine.cohort``); what else the plan has goes the engine's own way
    leap      while nothing comes, ends or is admitted, steps differ in time and KV alone: as many as there are till
              then are done at once

What must hold: step log, phases, facts, laws and ends are, to the last bit, those of ``engine.core.Engine`` with the
same arrivals (tests/engine/test_leaping.py plays both).  Where it is not sure, it takes the engine's own way: requests
that somebody hears, a pool that runs short, a decode that is not one of the cohort's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from engine.admission import Backlog
from engine.blocks import BlockPool
from engine.cohort import UNSEEN, Cohort
from engine.commit import Commit
from engine.config import EngineConfig
from engine.core import Engine
from engine.counting_pool import CountingPool
from engine.deferred import DeferredAdmission, DeferredLog, Leap, joined
from engine.flight import Flight, Read
from engine.policy import POLICIES, deadline, order
from engine.request import LENGTH, STOP, Output, Request
from engine.scheduler import Plan, Scheduler, Slice
from engine.simulated import Clock, SimulatedRunner
from engine.step_load import StepLoad, load_of
from models.roofline import StepCost
from models.store import Reference

SHORTEST_LEAP: Final = 3  # fewer steps are cheaper one by one
LONGEST_LEAP: Final = 8192
NEVER: Final = 1 << 62


class CohortScheduler(Scheduler):
    """The scheduler, to which the cohort is one of those that decode.  step: the number of the step to come."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        super().__init__(config, pool)
        self.cohort = Cohort(pool)
        self._others: dict[Request, None] = {}  # that run and do not sit in the cohort
        self.step = 0

    def schedule(self, now_ns: int, *, ahead: bool = False) -> Plan:
        """The next step."""
        plan = super().schedule(now_ns, ahead=ahead)
        plan.steady = len(self.cohort)  # now: a chunk may have preempted some of them
        return plan

    def seat(self, request: Request, left: int, reason: str, ahead: list[int] | None) -> None:
        """A running request joins the cohort (``Cohort.join``) with the step to come."""
        del self._others[request]
        self.cohort.join(request, self.step, left, reason, ahead)

    def _decodes(self, plan: Plan) -> int:
        cohort = self.cohort
        alone = any(len(one.tokens) - one.computed == 1 for one in self._changing())
        if alone or cohort.needs(self.step) > self.pool.available:
            for one in self.running:
                cohort.leave(one)
            self._others = dict.fromkeys(self.running)
            return super()._decodes(plan)
        cohort.take_pages(self.step)
        return len(cohort)

    def _changing(self) -> list[Request]:
        return sorted(self._others, key=order) if len(self._others) > 1 else list(self._others)

    def _admit(self, plan: Plan, budget: int) -> int:
        spent = super()._admit(plan, budget)
        self._others.update(dict.fromkeys(plan.admitted))
        return spent

    def preempt(self, request: Request, plan: Plan) -> None:
        """Take its pages."""
        self.cohort.leave(request)
        self._others.pop(request, None)
        super().preempt(request, plan)

    def finish(self, request: Request) -> None:
        """Take it out."""
        self.cohort.leave(request)
        self._others.pop(request, None)
        super().finish(request)

    def violations(self) -> list[str]:
        """Broken laws, of requests that have all caught up."""
        for seat in self.cohort.seats:
            self.cohort.catch_up(seat)
        return super().violations()

    def admits_nobody(self) -> bool:
        """Is it sure that no step admits anybody, or looks for cached pages, until a request comes or ends?"""
        if not self._may_admit:
            return True
        if self.pool.prefix_cache or POLICIES[self.config.policy] is deadline:
            return False
        head = self.waiting.head(self._now_ns)
        need = self.pool.pages(len(head.tokens)) + int(self.pool.total * self.config.watermark)
        return self._turned_away is head and need > self.pool.available


class CohortCommit(Commit):
    """Commits the cohort's share of a step beside the slices', and seats those who have become steady."""

    _engine: LeapingEngine

    def results(self, flight: Flight, tokens: list[int], finite: list[bool]) -> int:
        """Take the results over; returns the step's end (ns)."""
        engine, plan = self._engine, flight.plan
        stats, cohort = engine.counts, engine.scheduler.cohort
        step, steady = stats.steps, len(cohort)
        cohort.enter_pages(step)
        done, news = self._take(plan, tokens, finite)
        end, over, load = engine.now(), cohort.ended(step), engine.load
        cohort.stepped(step, [end], plan.size)
        stats.generation_tokens += steady
        stats.request_tokens += steady
        self._book(flight, plan.slices, load, end)
        for request, text, token, told in news:
            request.emit(Output(request.id, text, (token,), None, None, end, told))
        for seat in over:
            self.end(seat.request, seat.reason, end)
        for request, reason, error, text in done:
            self.end(request, reason, end, error=error, text=text)
        engine.scheduler.step = step + 1
        for piece in plan.slices:
            if piece.sample and piece.request.state == "running" and self._steady(piece.request):
                self._seat(piece.request)
        return end

    def _log(self, flight: Flight, live: list[Slice], load: StepLoad, number: int, end: int, recomputed: int) -> None:
        requests, tokens = self._engine.scheduler.cohort.ids, (1,) * flight.plan.steady
        if live:
            requests += tuple([piece.request.id for piece in live])
            tokens += tuple([piece.n for piece in live])
        when = (number, flight.start_ns, end, flight.gap_ns)
        self._engine.steps.note(self.seen(flight.plan, load, when, recomputed, requests, tokens))

    def _steady(self, request: Request) -> bool:
        """Does it decode from now on, with nothing to do in a step but that?"""
        params = request.params
        return (
            not request.streamed
            and request.text is None
            and request.shaper is None
            and request.told is None
            and params.prompt_logprobs is None
            and not (params.min_tokens and params.stop_token_ids)
            and len(request.tokens) - request.computed == 1
            and len(request.blocks) == self._engine.pool.pages(request.computed)
        )

    def _seat(self, request: Request) -> None:
        engine, params = self._engine, request.params
        left, reason, ahead = params.max_tokens - request.generated, LENGTH, None
        if engine.tokens_seen or not params.ignore_eos or params.stop_token_ids:
            drawn = engine.runner.draw_ahead(request, left)
            ends = [*params.stop_token_ids, *(() if params.ignore_eos else engine.end_tokens)]
            stops = np.flatnonzero(np.isin(drawn, ends)).tolist() if ends else []
            if stops:
                left, reason = stops[0] + 1, STOP
            ahead = drawn[:left].tolist()
        engine.scheduler.seat(request, left, reason, ahead)


class LeapingEngine(Engine):
    """clock: virtual.  gap_ns: between two steps with work at hand; whoever turns it lets it pass after each turn.

    horizon: until when nothing comes to the engine (ns), so that it may leap; None: it must not, a turn is one step.
    tokens_seen: somebody may look at tokens of requests that are over.
    """

    scheduler: CohortScheduler
    admission: DeferredAdmission
    steps: DeferredLog
    runner: SimulatedRunner

    def __init__(
        self,
        config: EngineConfig,
        model: Reference,
        runner: SimulatedRunner,
        cost: StepCost | None,
        clock: Clock,
        *,
        text: bool,
        gap_ns: int,
        tokens_seen: bool,
    ) -> None:
        super().__init__(config, model, runner, cost, now=clock, text=text)
        if not config.prefix_cache:
            self.pool = CountingPool(self.pool.total, self.pool.size)
        self.scheduler = CohortScheduler(config, self.pool)
        self.admission = DeferredAdmission(self.admission.limits, config.max_batch, config.token_budget, config.policy)
        self.steps = DeferredLog(config.step_log, self.floors)
        self.commit = CohortCommit(self)
        self.clock, self.gap_ns = clock, gap_ns
        self.tokens_seen = tokens_seen or config.prefix_cache
        self.horizon: Callable[[], float] | None = None
        self.load = load_of([])  # of the step in hand, the cohort's share included
        self.leapt = 0  # steps that were done in leaps
        self._step_ns = 1  # the last step's time

    def _start(self, plan: Plan) -> tuple[Read, bool]:
        cohort = self.scheduler.cohort
        self.load = joined(load_of(plan.slices), plan.steady, cohort.context + plan.steady)
        requests = [piece.request for piece in plan.slices if piece.sample]
        tokens: list[int] = []
        if requests:
            unseen = not self.tokens_seen and all(one.params.ignore_eos for one in requests)
            if unseen and not any(one.params.stop_token_ids for one in requests):
                tokens = [UNSEEN] * len(requests)
            else:
                tokens = self.runner.draw(requests).tolist()
        self.runner.take_time(self.load)
        return lambda: (tokens, [True] * len(tokens)), False

    def _backlog(self) -> Backlog:
        scheduler = self.scheduler
        return Backlog(
            waiting=len(scheduler.waiting) + self._pending,
            tokens=scheduler.waiting.tokens + self._pending_tokens,
            running=len(scheduler.running),
            unread=sum(max(0, len(one.tokens) - one.computed - 1) for one in scheduler._changing()),
            context=self.context,
        )

    def step(self) -> None:
        """As many steps as are alike, then the engine's own."""
        if self.horizon is not None and len(self.scheduler.cohort) == len(self.scheduler.running) > 0:
            self._leap(self.horizon())
        self.scheduler.step = self.counts.steps
        super().step()

    def _leap(self, horizon: float) -> None:
        cohort, step, now, gap_ns = self.scheduler.cohort, self.counts.steps, self.now(), self.gap_ns
        n, room = len(cohort), min(horizon - now, NEVER)
        most = min(cohort.first_end() - step, LONGEST_LEAP, int(room) // self._step_ns + 2)
        if self.laws.every:
            most = min(most, self.laws.last_step + self.laws.every - step - 1)
        if most < SHORTEST_LEAP or not self._inbox.empty() or not self.scheduler.admits_nobody():
            return
        size = self.pool.size
        once = [cohort.needs(step + at) for at in range(min(size, most))]
        pages = np.cumsum(np.resize(once, most))
        most = min(most, int(np.searchsorted(pages, self.pool.available, side="right")))
        contexts = cohort.context + n * np.arange(1, most + 1)
        times = self.runner.times.decodes_ns(n, contexts.astype(np.float64), int(room), gap_ns)
        k = len(times)
        if k == 0:
            return
        ends = now + np.cumsum(times + gap_ns) - gap_ns
        gaps = np.full(k, gap_ns)
        gaps[0] = now - self._last_end_ns if self._last_end_ns is not None else 0
        contexts, used = contexts[:k], self.pool.used + pages[:k]
        first = self.commit.seen(Plan(steady=n), StepLoad(0, n, 0, n, 0), (step, now, 0, 0), 0, cohort.ids, (1,) * n)
        for at in range(step, step + k):
            cohort.take_pages(at)
            cohort.enter_pages(at)
        cohort.stepped(step, ends, n)
        counts, tokens = self.counts, k * n
        counts.steps += k
        self.leapt += k
        counts.step_tokens += tokens
        counts.request_tokens += tokens
        counts.generation_tokens += tokens
        counts.stall_ns += int(gaps.sum())
        self.context = int(contexts[-1])
        self.admission.decodes(n, contexts, times)
        self.steps.leap(Leap(first, ends - times, ends, gaps, contexts, used))
        self._last_end_ns = self._ended_ns = int(ends[-1])
        self._step_ns = max(1, int(times[-1]))
        self.clock.wait_until(self._last_end_ns + gap_ns)
