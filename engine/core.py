"""The engine: one thread that owns all state and runs turn after turn.

    turn = idle checks, inbox, step          step = schedule -> forward -> sample -> commit (``engine.commit``)

With a runner that can, step n + 1 is scheduled and started before step n is read (``engine.flight``).

Others talk to it through one inbox.  Its laws (``engine.laws``) are checked when idle, every so many steps, and on
demand (``check``).  All its times come from one clock, ``now``: with the clock of ``engine.virtual`` the same turns
run without a thread and without waiting.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine.admission import Admission, Backlog, Limits
from engine.blocks import BlockPool
from engine.commit import Commit
from engine.config import EngineConfig
from engine.detokenizer import TextStream
from engine.flight import DeviceFull, Drawn, Flight, Read
from engine.floors import Floors
from engine.laws import Laws, Ledger
from engine.logprobs import LogprobStream, sampled_rows
from engine.request import ABORT, ERROR, NeverFits, Refusal, Request, RequestTooLong
from engine.runner import Runner
from engine.sampling import Shaper, sample
from engine.scheduler import Plan, Scheduler, Slice
from engine.shadow import Shadow
from engine.stats import EngineStats
from engine.steplog import StepLog
from models.roofline import StepCost
from telemetry.names import KV_OOM

if TYPE_CHECKING:
    import torch

    from models.store import Reference

log = logging.getLogger("tailspan.engine")

T = TypeVar("T")


class Engine:
    """``submit`` and ``abort`` from any thread; answers come through each request's ``emit``, on the engine thread.

    cost: the model on its device, for the floors of steps and requests; without it they are left out.  now: the clock
    of every stamp (ns, never back).  text: make the text of answers; without it stop strings cannot act.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Reference,
        runner: Runner,
        cost: StepCost | None = None,
        *,
        now: Callable[[], int] = time.monotonic_ns,
        text: bool = True,
    ) -> None:
        self.config, self.model, self.runner = config, model, runner
        self.floors = Floors(cost)
        self.pool = BlockPool(runner.kv_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(config, self.pool)
        limits = Limits(config.queue_limit, config.queue_tokens, config.max_predicted_ttft)
        self.admission = Admission(limits, config.max_batch, config.token_budget)
        self.ledger, self.laws = Ledger(), Laws(config.check_every)
        self.shadow = Shadow(self, config.shadow) if config.shadow else None
        self.before_step: Callable[[], None] | None = None  # called between two steps, on the engine thread
        self.steps = StepLog(config.step_log)
        self.max_context = runner.max_context
        self.end_tokens = frozenset(model.shape.eos_token_ids)
        self.has_logits = runner.has_logits  # False: a runner that only takes the time
        self.simulated: str | None = getattr(runner, "label", None)  # what is simulated; None: steps are computed
        self.now = now
        self.context = 0  # tokens that the last step attended to
        self.lock = threading.Lock()  # of what ``submit`` reads and the engine thread changes
        self.live: dict[str, Request] = {}
        self.counts = EngineStats(kv_total=runner.kv_blocks, kv_free=runner.kv_blocks)  # ``stats`` is the whole of it
        self.commit = Commit(self)
        self._text = text
        self._inbox: queue.SimpleQueue[tuple[str, Request | str | Callable[[], object] | None]] = queue.SimpleQueue()
        self._pending = 0  # submitted, not yet seen by the engine thread
        self._pending_tokens = 0
        self._flight: Flight | None = None  # the step that was started ahead
        self._last_end_ns: int | None = None  # end of the last step after which someone was still runnable
        self._ended_ns = 0  # end of the last step
        self._thread: threading.Thread | None = None
        self._stopping = False

    # --- from any thread ---
    def start(self) -> None:
        """Start the engine thread."""
        if self._thread is not None:
            raise RuntimeError("the engine was started already")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End what is live with ``abort`` and stop the thread; waits up to ``timeout`` seconds for the step in hand."""
        if self._thread is None:
            return
        self._inbox.put(("stop", None))
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("the engine thread did not end within %.1f s", timeout)

    def submit(self, request: Request) -> None:
        """Enqueue.  Raises a Refusal (too long, never fits, overload); then nothing of the request is kept."""
        if not request.prompt_ids:
            raise ValueError("a prompt of no tokens cannot be continued")
        try:
            self._enter(request)
        except Refusal as refusal:
            self.ledger.refused(refusal.reason)
            raise
        self._inbox.put(("add", request))

    def _enter(self, request: Request) -> None:
        prompt, params = len(request.prompt_ids), request.params
        if prompt + params.max_tokens > self.max_context:
            raise RequestTooLong(prompt, params.max_tokens, self.max_context)
        pool_tokens = self.pool.total * self.pool.size
        if prompt + params.max_tokens > pool_tokens:
            raise NeverFits(prompt + params.max_tokens, pool_tokens)
        request.tokens = list(request.prompt_ids)
        # a JSON value ends by itself: a stop string inside it is part of it
        request.text = TextStream(params.stop if params.grammar is None else ()) if self._text else None
        request.shaper = Shaper.of(params)
        request.told = LogprobStream() if params.logprobs is not None else None
        request.seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        request.arrived_ns = self.now()
        if self.shadow is not None:
            self.shadow.choose(request)
        with self.lock:
            backlog = self._backlog()
            self.admission.decide(request, backlog)
            request.clock.facts.queue_depth_at_arrival = backlog.waiting
            request.clock.facts.queue_tokens_ahead = backlog.tokens
            self._pending += 1
            self._pending_tokens += prompt
            self.ledger.entered()

    def _backlog(self) -> Backlog:
        """What is ahead of a new request; under the lock."""
        running = tuple(self.scheduler.running)
        return Backlog(
            waiting=len(self.scheduler.waiting) + self._pending,
            tokens=self.scheduler.waiting.tokens + self._pending_tokens,
            running=len(running),
            unread=sum(max(0, len(one.tokens) - one.computed - 1) for one in running),
            context=self.context,
        )

    def backlog_s(self) -> float:
        """Predicted seconds until everything that waits has its first token."""
        with self.lock:
            return self.admission.drain_s(self._backlog())

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; nothing happens when it is over already."""
        self._inbox.put(("abort", request_id))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on the engine thread between two steps."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(("call", run))
        return done

    def stats(self) -> EngineStats:
        """Counters and state; a snapshot, at most one step old.  The requests in it balance."""
        with self.lock:
            books, pending = self.ledger.read(), self._pending
            waiting_tokens = self.scheduler.waiting.tokens + self._pending_tokens
        return replace(
            self.counts,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + pending,
            waiting_tokens=waiting_tokens,
            kv_used=self.pool.used,
            kv_free=self.pool.available,
            kv_total=self.pool.total,
            received=books.received,
            live=books.live,
            finished=Counter(books.ended),
            rejected=Counter(books.rejected),
            alloc_failures=self.scheduler.shortages,
        )

    def integrity(self) -> list[str]:
        """Broken laws, [] when all hold.  Exact on the engine thread, and when the engine is idle or stopped."""
        stats = self.counts
        with self.lock:
            books, pending = self.ledger.read(), self._pending
        wrong = self.scheduler.violations() + books.violations()
        if books.live != len(self.live) + pending:
            wrong.append(f"{books.live} requests are live, but the engine has {len(self.live)} and {pending} to come")
        if len(self.live) != len(self.scheduler.running) + len(self.scheduler.waiting):
            wrong.append("live requests are not the running and the waiting ones")
        if stats.step_tokens != stats.request_tokens:
            wrong.append(f"steps computed {stats.step_tokens} tokens, requests account for {stats.request_tokens}")
        return wrong

    # --- on the engine thread, between two steps ---
    def check(self) -> list[str]:
        """Check the laws, and remember what came of it."""
        found = self.integrity()
        self.laws.checked(found, self.counts.steps)
        return found

    def resize_pool(self, total: int) -> None:
        """Serve from so many pages from now on; what is in flight and cannot fit any more fails."""
        self.pool.resize(total)
        for request in list(self.live.values()):
            self._fail_unfit(request)

    def _fail_unfit(self, request: Request) -> None:
        need, room = len(request.prompt_ids) + request.params.max_tokens, self.pool.total * self.pool.size
        if need > room:
            self.commit.end(request, ERROR, self.now(), error=str(NeverFits(need, room)))

    # --- the engine thread ---
    def _run(self) -> None:
        while not self._stopping:
            self.turn(wait=True)
        self.settle()
        for request in list(self.live.values()):
            self.commit.end(request, ABORT, self.now(), error="the engine is shutting down")

    def turn(self, *, wait: bool = False) -> bool:
        """One turn of the loop: checks when idle, then the inbox, then a step if there is work; did a step run?

        wait: with nothing to do, wait for the inbox.
        """
        if not self.scheduler.has_work:
            self._idle()
        self._drain(wait=wait and not self.scheduler.has_work)
        if self._stopping or not self.scheduler.has_work:
            return False
        self.step()
        return True

    def _idle(self) -> None:
        """Nothing to do: check the laws, then run shadows as long as nothing comes."""
        self.settle()
        self._last_end_ns = None
        if self.laws.last_step != self.counts.steps:
            self.check()
        while self.shadow is not None and self._inbox.empty() and self.shadow.step():
            pass
        if self.shadow is not None:
            self.shadow.yield_pages()

    def _drain(self, *, wait: bool) -> None:
        if wait:
            self._last_end_ns = None
        while True:
            try:
                what, value = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if what == "add" and isinstance(value, Request):
                with self.lock:
                    self.live[value.id] = value
                    self.scheduler.add(value, self.now())
                    self._pending -= 1
                    self._pending_tokens -= len(value.prompt_ids)
                self._fail_unfit(value)  # the pool may have become smaller since it was let in
            elif what == "abort" and isinstance(value, str):
                request = self.live.get(value)
                if request is not None:
                    self.commit.end(request, ABORT, self.now())
            elif callable(value):
                self.settle()  # between two steps: none is under way
                value()
            else:
                self._stopping = True

    def step(self) -> None:
        """One step: schedule, forward, sample, commit; with overlap the next one is started before this one is read."""
        if self.before_step is not None:
            self.before_step()
        flight, self._flight = self._flight or self._launch(ahead=False), None
        if flight is None:
            return
        following = self._launch(ahead=True) if flight.feeds and not flight.plan.short else None
        end = self._land(flight)
        if following is not None:
            self._begin(following, end)
            self._flight = following
            if not following.live:  # nobody wants it any more
                self.settle()

    def settle(self) -> None:
        """Read the step that was started ahead, if there is one; afterwards none is under way."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)

    def _launch(self, *, ahead: bool) -> Flight | None:
        """Plan a step and start it; None where there is nothing to compute.  What fails, fails when it is read.

        ahead: the step before is not read yet, so this one begins later.
        """
        start = self.now()
        plan = self.scheduler.schedule(start, ahead=ahead)
        flight = Flight(plan)
        if not ahead:
            self._begin(flight, start)
        if not plan.size:
            return None
        runner = self.runner
        divided = getattr(runner, "divided_steps", 0)
        try:
            flight.read, flight.feeds = self._start(plan)
            flight.columns = dict(getattr(runner, "last_step", {}))
        except Exception as error:
            flight.read = partial(_raise, error)
        self._fitted(flight, getattr(runner, "divided_steps", 0) == divided)
        return flight

    def _start(self, plan: Plan) -> tuple[Read, bool]:
        """Start a step: how its tokens are read, and whether the next one may take them where they were drawn."""
        launch: Callable[[Sequence[Slice]], Read | None] | None = getattr(self.runner, "launch", None)
        own = launch(plan.slices) if launch is not None else None
        if own is not None:
            return own, getattr(self.runner, "feeds", False)
        return partial(self._drawn, plan, self.runner.forward(plan.slices)), False

    def _fitted(self, flight: Flight, fitted: bool) -> None:
        """Had the device memory for the step as a whole?  What it cannot bear is not planned again."""
        limits = self.scheduler.limits
        if fitted and not limits.reduced:
            return
        if fitted:
            limits.fitted()
        else:
            limits.short(flight.plan.tokens)
        self.admission.resize(limits.batch, limits.budget)

    def _begin(self, flight: Flight, start: int) -> None:
        """The step is the first in line from here on, on the engine's clock."""
        flight.start_ns = start
        since = self._last_end_ns
        if since is None:  # idle until the first of these came; a loop that stood still then is late for it
            since = max(self._ended_ns, min((one.request.arrived_ns for one in flight.plan.slices), default=start))
        flight.gap_ns = start - since
        self.counts.stall_ns += flight.gap_ns
        self.commit.scheduled(flight.plan, start)
        if not flight.plan.size:
            self._last_end_ns = start if self.scheduler.running else None

    def _land(self, flight: Flight) -> int:
        """Read a step and commit it; returns its end (ns)."""
        try:
            tokens, finite = flight.read()
        except Exception as error:  # a failed step must not take the engine down with it
            log.exception("step %d failed", self.counts.steps)
            end, code = self.now(), KV_OOM if isinstance(error, DeviceFull) else None
            for piece in flight.live:
                self.commit.end(piece.request, ERROR, end, error=f"{type(error).__name__}: {error}", code=code)
        else:
            end = self.commit.results(flight, tokens, finite)
            if self.laws.due(self.counts.steps):
                self.check()
        self._ended_ns = end
        self._last_end_ns = end if self.scheduler.running else None
        return end

    def _drawn(self, plan: Plan, answer: torch.Tensor) -> Drawn:
        """The token of every slice that samples, and whether its logits were finite, from the runner's answer."""
        if not self.has_logits:
            tokens: list[int] = answer.tolist()
            return tokens, [True] * len(tokens)
        logits = sampled_rows(answer, plan.slices)
        sampling = [piece.request for piece in plan.slices if piece.sample]
        return self.draw(logits, sampling) if sampling else ([], [])

    def draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> Drawn:
        """``engine.sampling.sample``, or the runner's own, which samples where its logits lie."""
        own: Callable[..., Drawn] = getattr(self.runner, "sample", sample)
        return own(logits, requests, self.end_tokens)


def _raise(error: Exception) -> Drawn:
    raise error
