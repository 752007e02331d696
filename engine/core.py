"""The engine: one thread that owns all state and runs step after step.

    step = schedule -> forward -> sample -> commit          others talk to it through one inbox

Its laws (``engine.laws``) are checked when idle, every so many steps, and on demand (``check``).
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch

from engine.admission import Admission, Backlog, Limits
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.detokenizer import TextStream
from engine.floors import Floors
from engine.laws import Laws, Ledger
from engine.logprobs import LogprobStream, TokenLogprob, sampled_rows
from engine.native.build import NoCompiler
from engine.native.runner import NativeRunner, fits
from engine.phase_clock import PhaseClock
from engine.request import (
    ABORT,
    ERROR,
    LENGTH,
    STOP,
    NeverFits,
    Output,
    Refusal,
    Request,
    RequestTooLong,
    SamplingParams,
)
from engine.runner_cpu import CpuRunner
from engine.sampling import Shaper, sample
from engine.scheduler import Plan, Scheduler, Slice
from engine.shadow import Shadow
from engine.steplog import StepLog, StepRecord
from engine.structured import GrammarError
from models.cpu_device import this_cpu
from models.errors import UserError
from models.roofline import StepCost
from models.store import LoadedModel

log = logging.getLogger("tailspan.engine")

T = TypeVar("T")


class Runner(Protocol):
    """What computes a step."""

    kv_blocks: int
    max_context: int

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Logits [sum of the slices' ``rows``, vocabulary] float32."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the state now.  Tokens, pages, requests."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_used: int = 0
    kv_free: int = 0
    kv_total: int = 0
    received: int = 0
    live: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    rejected: Counter[str] = field(default_factory=Counter)  # by reason of the refusal
    alloc_failures: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    nonfinite_rows: int = 0
    steps: int = 0
    step_tokens: int = 0
    request_tokens: int = 0
    stall_ns: int = 0


class Engine:
    """``submit`` and ``abort`` from any thread; answers come through each request's ``emit``, on the engine thread.

    cost: the model on its device, for the floors of steps and requests; without it they are left out.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel, runner: Runner, cost: StepCost | None = None) -> None:
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
        self.has_logits = bool(getattr(runner, "has_logits", True))  # False: a runner that only takes the time
        self._inbox: queue.SimpleQueue[tuple[str, Request | str | Callable[[], object] | None]] = queue.SimpleQueue()
        self._live: dict[str, Request] = {}
        self._pending = 0  # submitted, not yet seen by the engine thread
        self._pending_tokens = 0
        self._context = 0  # tokens that the last step attended to
        self._now = time.monotonic_ns
        self._lock = threading.Lock()
        self._stats = EngineStats(kv_total=runner.kv_blocks, kv_free=runner.kv_blocks)
        self._last_end_ns: int | None = None  # end of the last step after which someone was still runnable
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
        request.text = TextStream(params.stop if params.grammar is None else ())
        request.shaper = Shaper.of(params)
        request.told = LogprobStream() if params.logprobs is not None else None
        request.seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        request.arrived_ns = self._now()
        if self.shadow is not None:
            self.shadow.choose(request)
        with self._lock:
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
            context=self._context,
        )

    def backlog_s(self) -> float:
        """Predicted seconds until everything that waits has its first token."""
        with self._lock:
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
        with self._lock:
            books, pending = self.ledger.read(), self._pending
            waiting_tokens = self.scheduler.waiting.tokens + self._pending_tokens
        return replace(
            self._stats,
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
        stats = self._stats
        with self._lock:
            books, pending = self.ledger.read(), self._pending
        wrong = self.scheduler.violations() + books.violations()
        if books.live != len(self._live) + pending:
            wrong.append(f"{books.live} requests are live, but the engine has {len(self._live)} and {pending} to come")
        if len(self._live) != len(self.scheduler.running) + len(self.scheduler.waiting):
            wrong.append("live requests are not the running and the waiting ones")
        if stats.step_tokens != stats.request_tokens:
            wrong.append(f"steps computed {stats.step_tokens} tokens, requests account for {stats.request_tokens}")
        return wrong

    # --- on the engine thread, between two steps ---
    def check(self) -> list[str]:
        """Check the laws, and remember what came of it."""
        found = self.integrity()
        self.laws.checked(found, self._stats.steps)
        return found

    def resize_pool(self, total: int) -> None:
        """Serve from so many pages from now on; what is in flight and cannot fit any more fails."""
        self.pool.resize(total)
        for request in list(self._live.values()):
            self._fail_unfit(request)

    def _fail_unfit(self, request: Request) -> None:
        need, room = len(request.prompt_ids) + request.params.max_tokens, self.pool.total * self.pool.size
        if need > room:
            self._end(request, ERROR, self._now(), error=str(NeverFits(need, room)))

    # --- the engine thread ---
    def _run(self) -> None:
        while not self._stopping:
            if not self.scheduler.has_work:
                self._idle()
            self._drain(wait=not self.scheduler.has_work)
            if self.scheduler.has_work and not self._stopping:
                self.step()
        for request in list(self._live.values()):
            self._end(request, ABORT, time.monotonic_ns(), error="the engine is shutting down")

    def _idle(self) -> None:
        """Nothing to do: check the laws, then run shadows as long as nothing comes."""
        self._last_end_ns = None
        if self.laws.last_step != self._stats.steps:
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
                with self._lock:
                    self._live[value.id] = value
                    self.scheduler.add(value, self._now())
                    self._pending -= 1
                    self._pending_tokens -= len(value.prompt_ids)
                self._fail_unfit(value)  # the pool may have become smaller since it was let in
            elif what == "abort" and isinstance(value, str):
                request = self._live.get(value)
                if request is not None:
                    self._end(request, ABORT, self._now())
            elif callable(value):
                value()
            else:
                self._stopping = True

    def step(self) -> None:
        """One step: schedule, forward, sample, commit."""
        if self.before_step is not None:
            self.before_step()
        start = self._now()
        gap = start - self._last_end_ns if self._last_end_ns is not None else 0
        self._stats.stall_ns += gap
        plan = self.scheduler.schedule(start)
        self._mark_scheduled(plan, start)
        if not plan.slices:
            self._last_end_ns = start if self.scheduler.running else None
            return
        try:
            logits = self.runner.forward(plan.slices)
            sampling = [piece.request for piece in plan.slices if piece.sample]
            logits = sampled_rows(logits, plan.slices)
            tokens, finite = sample(logits, sampling, self.end_tokens) if sampling else ([], [])
        except Exception as error:  # a failed step must not take the engine down with it
            log.exception("step %d failed", self._stats.steps)
            now = self._now()
            for piece in plan.slices:
                self._end(piece.request, ERROR, now, error=f"{type(error).__name__}: {error}")
            self._last_end_ns = now if self.scheduler.running else None
            return
        self._commit(plan, tokens, finite, start, gap)

    def _mark_scheduled(self, plan: Plan, start: int) -> None:
        stats, number = self._stats, self._stats.steps
        for request in plan.preempted:
            stats.preemptions += 1
            request.clock.preempted(start, stats.stall_ns)
        for request in plan.admitted:
            first = request.clock.facts.step_first < 0
            request.clock.scheduled(start, stats.stall_ns)
            request.chunk_end_ns, request.chunk_stall = start, stats.stall_ns
            stats.prefix_queries += len(request.tokens)
            stats.prefix_hits += request.computed
            if first:
                request.clock.facts.step_first = number
                request.clock.facts.cached_tokens = request.computed
                request.clock.facts.kv_usage_at_admit = self.pool.used / self.pool.total

    def _commit(self, plan: Plan, tokens: list[int], finite: list[bool], start: int, gap: int) -> None:
        """Take the results over: token by token, then pages, then the log; one stamp, the step's end, for all."""
        stats, batch = self._stats, len(plan.slices)
        number = stats.steps
        recomputed = 0
        samples = iter(zip(tokens, finite, strict=True))
        done: list[tuple[Request, str, str | None, str]] = []
        news: list[tuple[Request, str, int, tuple[TokenLogprob, ...]]] = []
        context = 0
        decodes = [piece.decode for piece in plan.slices]  # before the tokens move on
        for piece in plan.slices:
            request = piece.request
            context += piece.start + piece.n
            if request.lost > piece.start:
                recomputed += min(request.lost, piece.start + piece.n) - piece.start
            if not piece.sample:
                self.scheduler.commit(piece)
                continue
            token, ok = next(samples)
            if not ok:  # its pages may hold anything: they must not be found by others
                stats.nonfinite_rows += request.failure is None
                done.append((request, ERROR, request.failure or "the logits are not finite", ""))
                continue
            self.scheduler.commit(piece)
            try:
                text, reason = self._append(request, token)
            except GrammarError as problem:
                done.append((request, ERROR, f"the grammar of the answer: {problem}", ""))
                continue
            if reason is not None:
                done.append((request, reason, None, text))
            else:
                told = self._told(request, token, text) if request.told is not None else ()
                news.append((request, text, token, told))
        end = self._now()
        for piece, decode in zip(plan.slices, decodes, strict=True):
            self._account(piece, decode=decode, start=start, end=end, number=number, batch=batch)
        stats.steps += 1
        stats.step_tokens += plan.tokens
        stats.recomputed_tokens += recomputed
        self._log(plan, decodes, number, start, end, gap, recomputed, context)
        self._context = context
        self.admission.step(plan.tokens, batch, context, (end - start) / 1e9)
        for request, text, token, told in news:
            request.emit(Output(request.id, text, (token,), None, None, end, told))
        for request, reason, error, text in done:
            self._end(request, reason, end, error=error, text=text)
        self._last_end_ns = end if self.scheduler.running else None
        if self.laws.due(stats.steps):
            self.check()

    def _append(self, request: Request, token: int) -> tuple[str, str | None]:
        """Add a sampled token; returns the text that may be sent, and the finish reason if that was the last."""
        params, stats = request.params, self._stats
        request.tokens.append(token)
        stats.generation_tokens += 1
        if request.text is None:
            raise RuntimeError("request without a text stream")
        ends = self._ends(params, token)
        text = "" if ends else request.text.push(self.model.tokenizer.token_bytes(token))
        if request.text.stopped:
            return text, STOP
        if ends or (request.shaper is not None and request.shaper.advance(token)):
            return text + request.text.finish(), STOP
        if request.generated >= params.max_tokens:
            return text + request.text.finish(), LENGTH
        return text, None

    def _ends(self, params: SamplingParams, token: int) -> bool:
        """Is it a token that ends an answer and is no part of it?"""
        return (token in self.end_tokens and not params.ignore_eos) or token in params.stop_token_ids

    def _told(self, request: Request, token: int, text: str) -> tuple[TokenLogprob, ...]:
        """Logprobs that may be sent with ``text``; a token that ended the answer is not among them."""
        if request.told is None or request.text is None:
            return ()
        entry = None if self._ends(request.params, token) else request.newest
        return request.told.note(entry, text, request.text.decoded)

    def _account(self, piece: Slice, *, decode: bool, start: int, end: int, number: int, batch: int) -> None:
        """The step as this request saw it: clock marks and facts."""
        request, stall = piece.request, self._stats.stall_ns
        clock, facts = request.clock, request.clock.facts
        self._stats.request_tokens += piece.n
        facts.steps += 1
        facts.batch_sum += batch
        facts.step_last = number
        if not decode:
            facts.prefill_chunks += 1
            facts.prefill_wait_ns += max(0, start - request.chunk_end_ns - (stall - request.chunk_stall))
            request.chunk_end_ns, request.chunk_stall = end, stall
        if request.lost and piece.start + piece.n >= request.lost:
            request.lost = 0
            clock.restored(end, stall)
        if piece.sample:
            if clock.first_token_ns is None:
                self._stats.prompt_tokens += len(request.prompt_ids)
                clock.first_token(end, stall)
                self.floors.first_token(request)
            else:
                facts.decode_max_gap_ns = max(facts.decode_max_gap_ns, end - request.token_ns)
            request.token_ns = end
            if request.token_steps is not None:
                request.token_steps.append(number)

    def _log(
        self,
        plan: Plan,
        decodes: list[bool],
        number: int,
        start: int,
        end: int,
        gap: int,
        recomputed: int,
        context: int,
    ) -> None:
        n_decodes = sum(decodes)
        prefills = len(plan.slices) - n_decodes
        self.steps.append(
            StepRecord(
                step=number,
                start_ns=start,
                end_ns=end,
                gap_ns=gap,
                kind="mixed" if n_decodes and prefills else "decode" if n_decodes else "prefill",
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                decode_seqs=n_decodes,
                decode_tokens=n_decodes,
                prefill_seqs=prefills,
                prefill_tokens=plan.tokens - n_decodes,
                recomputed_tokens=recomputed,
                cached_tokens=plan.cached_tokens,
                context_tokens=context,
                kv_used=self.pool.used,
                kv_free=self.pool.available,
                preempted=len(plan.preempted),
                requests=tuple(piece.request.id for piece in plan.slices),
                request_tokens=tuple(piece.n for piece in plan.slices),
                **self.floors.step(plan.slices, n_decodes, end - start),
            )
        )

    def _end(self, request: Request, reason: str, now: int, *, error: str | None = None, text: str = "") -> None:
        """The request is over: everything it holds is given back, once, and its client is told."""
        token_ids = tuple(request.tokens[-1:]) if reason in (STOP, LENGTH) else ()
        told = self._told(request, token_ids[0], text) if token_ids and request.told is not None else ()
        with self._lock:
            self.scheduler.finish(request)
            del self._live[request.id]
            self.ledger.ended(reason)
        self.admission.over(request, reason)
        if self.shadow is not None and reason in (STOP, LENGTH):
            self.shadow.remember(request)
        request.clock.ended(now, self._stats.stall_ns)
        self.floors.over(request)
        request.emit(Output(request.id, text, token_ids, reason, error, now, told))


def build(config: EngineConfig, model: LoadedModel) -> Engine:
    """An engine on the CPU, warm: the first request meets no cold code."""
    runner = _cpu_runner(config, model)
    cost = StepCost(model.shape, this_cpu(), runner.weight_bytes, runner.kv_bytes)
    engine = Engine(config, model, runner, cost)
    seconds = runner.warm_up(lambda n: _warm_slices(engine, n))
    gc.collect()
    gc.freeze()  # the model and its tables live for ever: the collector need not walk them in a step
    log.info("forward: %s, %s, %d threads; warm-up took %.2f s", runner.name, runner.dtype, runner.threads, seconds)
    return engine


def _cpu_runner(config: EngineConfig, model: LoadedModel) -> NativeRunner | CpuRunner:
    """The forward in C where it can be had, else in torch, which says why."""
    reason = fits(model, config)
    if reason is None:
        try:
            return NativeRunner(model, config)
        except NoCompiler as error:
            reason = str(error)
    if config.dtype.startswith("int"):
        raise UserError(
            f"{config.dtype} weights need the forward in C, which cannot be had: {reason}",
            where="engine configuration",
            remedy="use fp32, bf16 or auto",
        )
    log.warning("the forward runs in torch, which is slower: %s", reason)
    return CpuRunner(model, config)


def _warm_slices(engine: Engine, n: int) -> list[Slice]:
    n = min(n, engine.max_context, engine.pool.total * engine.pool.size)
    request = Request(
        "warm-up", [0] * n, SamplingParams(max_tokens=1), PhaseClock(time.monotonic_ns()), lambda _output: None
    )
    request.tokens = list(request.prompt_ids)
    request.blocks = list(range(engine.pool.pages(n)))
    return [Slice(request, 0, n, True)]
