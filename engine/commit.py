"""What a step changes: tokens, clocks, counts, the step log, and the ends of requests.  Engine thread only.

    scheduled      the plan is made, nothing is computed: marks of preemption and admission
    results        the step is over: every slice's tokens, one stamp for all (the step's end), then the log, then emits
    end            a request leaves, from whatever state: what it holds is given back once, its client is told once

What must hold: a token is in its request before anybody hears of it; the log has the step before anybody hears of it;
a request's clock is marked with the same stamps that stand in the log, so that phases can be rebuilt from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.logprobs import TokenLogprob
from engine.request import ERROR, LENGTH, STOP, Output, Request, SamplingParams
from engine.scheduler import Plan, Slice
from engine.step_load import StepLoad, load_of
from engine.steplog import SeenStep
from engine.structured import GrammarError

if TYPE_CHECKING:
    from engine.core import Engine

_Done = tuple[Request, str, str | None, str]  # reason, error, text
_News = tuple[Request, str, int, tuple[TokenLogprob, ...]]  # text, token, logprobs


class Commit:
    """Writes into the engine's state what its steps brought about."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def scheduled(self, plan: Plan, start: int) -> None:
        """Marks of those whose state the plan changed, at the step's start."""
        engine = self._engine
        stats, number = engine.counts, engine.counts.steps
        for request in plan.preempted:
            stats.preemptions += 1
            request.clock.preempted(start, stats.stall_ns)
        for request in plan.admitted:
            facts = request.clock.facts
            request.clock.scheduled(start, stats.stall_ns)
            request.chunk_end_ns, request.chunk_stall = start, stats.stall_ns
            stats.prefix_queries += len(request.tokens)
            stats.prefix_hits += request.computed
            if facts.step_first < 0:
                facts.step_first = number
                facts.cached_tokens = request.computed
                facts.kv_usage_at_admit = engine.pool.used / engine.pool.total

    def results(self, plan: Plan, tokens: list[int], finite: list[bool], start: int, gap: int) -> int:
        """Take the results over: token by token, then pages, then the log; one stamp, the step's end, for all.

        Returns the stamp (ns).
        """
        done, news = self._take(plan, tokens, finite)
        end = self._engine.now()
        self._book(plan, load_of(plan.slices), start, end, gap)
        for request, text, token, told in news:
            request.emit(Output(request.id, text, (token,), None, None, end, told))
        for request, reason, error, text in done:
            self.end(request, reason, end, error=error, text=text)
        return end

    def _take(self, plan: Plan, tokens: list[int], finite: list[bool]) -> tuple[list[_Done], list[_News]]:
        """Tokens and pages of every slice; returns the requests that are over, and the texts to send."""
        stats, scheduler = self._engine.counts, self._engine.scheduler
        samples = iter(zip(tokens, finite, strict=True))
        done: list[_Done] = []
        news: list[_News] = []
        for piece in plan.slices:
            request = piece.request
            if not piece.sample:
                scheduler.commit(piece)
                continue
            token, ok = next(samples)
            if not ok:  # its pages may hold anything: they must not be found by others
                stats.nonfinite_rows += request.failure is None
                done.append((request, ERROR, request.failure or "the logits are not finite", ""))
                continue
            scheduler.commit(piece)
            try:
                text, reason = self.append(request, token)
            except GrammarError as problem:
                done.append((request, ERROR, f"the grammar of the answer: {problem}", ""))
                continue
            if reason is not None:
                done.append((request, reason, None, text))
            elif request.streamed:
                told = self._told(request, token, text) if request.told is not None else ()
                news.append((request, text, token, told))
        return done, news

    def _book(self, plan: Plan, load: StepLoad, start: int, end: int, gap: int) -> None:
        """The step in clocks, counts and log."""
        engine = self._engine
        stats, batch, recomputed = engine.counts, plan.size, 0
        for piece in plan.slices:
            lost = piece.request.lost
            if lost > piece.start:
                recomputed += min(lost, piece.start + piece.n) - piece.start
            self._account(piece, start, end, stats.steps, batch)
        stats.steps += 1
        stats.step_tokens += load.tokens
        stats.recomputed_tokens += recomputed
        self._log(plan, load, stats.steps - 1, start, end, gap, recomputed)
        engine.context = load.context_tokens
        engine.admission.step(load.tokens, batch, load.context_tokens, (end - start) / 1e9)

    def append(self, request: Request, token: int) -> tuple[str, str | None]:
        """Add a sampled token; returns the text that may be sent, and the finish reason if that was the last."""
        params, stream, engine = request.params, request.text, self._engine
        request.tokens.append(token)
        engine.counts.generation_tokens += 1
        ends = self._ends(params, token)
        if stream is None:  # nobody reads: no bytes, no stop strings
            full = len(request.tokens) - len(request.prompt_ids) >= params.max_tokens
            return "", STOP if ends else LENGTH if full else None
        text = "" if ends else stream.push(engine.model.tokenizer.token_bytes(token))
        if stream.stopped:
            return text, STOP
        if ends or (request.shaper is not None and request.shaper.advance(token)):
            return text + stream.finish(), STOP
        if request.generated >= params.max_tokens:
            return text + stream.finish(), LENGTH
        return text, None

    def _ends(self, params: SamplingParams, token: int) -> bool:
        """Is it a token that ends an answer and is no part of it?"""
        return (token in self._engine.end_tokens and not params.ignore_eos) or token in params.stop_token_ids

    def _told(self, request: Request, token: int, text: str) -> tuple[TokenLogprob, ...]:
        """Logprobs that may be sent with ``text``; a token that ended the answer is not among them."""
        if request.told is None or request.text is None:
            return ()
        entry = None if self._ends(request.params, token) else request.newest
        return request.told.note(entry, text, request.text.decoded)

    def _account(self, piece: Slice, start: int, end: int, number: int, batch: int) -> None:
        """The step as this request saw it: clock marks and facts."""
        stats, request = self._engine.counts, piece.request
        clock, stall = request.clock, stats.stall_ns
        facts = clock.facts
        stats.request_tokens += piece.n
        facts.steps += 1
        facts.batch_sum += batch
        facts.step_last = number
        if not piece.decode:
            facts.prefill_chunks += 1
            facts.prefill_wait_ns += max(0, start - request.chunk_end_ns - (stall - request.chunk_stall))
            request.chunk_end_ns, request.chunk_stall = end, stall
        if request.lost and piece.start + piece.n >= request.lost:
            request.lost = 0
            clock.restored(end, stall)
        if piece.sample:
            if clock.first_token_ns is None:
                stats.prompt_tokens += len(request.prompt_ids)
                clock.first_token(end, stall)
                self._engine.floors.first_token(request)
            elif end - request.token_ns > facts.decode_max_gap_ns:
                facts.decode_max_gap_ns = end - request.token_ns
            request.token_ns = end
            if request.token_steps is not None:
                request.token_steps.append(number)

    def _log(self, plan: Plan, load: StepLoad, number: int, start: int, end: int, gap: int, recomputed: int) -> None:
        engine = self._engine
        requests = tuple([piece.request.id for piece in plan.slices])
        tokens = tuple([piece.n for piece in plan.slices])
        seen = self.seen(plan, load, (number, start, end, gap), recomputed, requests, tokens)
        engine.steps.append(seen.record(engine.floors, getattr(engine.runner, "last_step", {})))

    def seen(
        self,
        plan: Plan,
        load: StepLoad,
        when: tuple[int, int, int, int],
        recomputed: int,
        requests: tuple[str, ...],
        tokens: tuple[int, ...],
    ) -> SeenStep:
        """A step as it stands in the log, before the account of the device; when: number, start, end, gap."""
        scheduler, pool = self._engine.scheduler, self._engine.pool
        return SeenStep(
            *when,
            load=load,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            recomputed=recomputed,
            kv=(pool.used, pool.available),
            preempted=tuple([request.id for request in plan.preempted]),
            admitted=tuple([request.id for request in plan.admitted]),
            admitted_cached=tuple(plan.admitted_cached),
            requests=requests,
            tokens=tokens,
        )

    def end(self, request: Request, reason: str, now: int, *, error: str | None = None, text: str = "") -> None:
        """The request is over: everything it holds is given back, once, and its client is told."""
        engine = self._engine
        token_ids = tuple(request.tokens[-1:]) if reason in (STOP, LENGTH) else ()
        told = self._told(request, token_ids[0], text) if token_ids and request.told is not None else ()
        with engine.lock:
            engine.scheduler.finish(request)
            del engine.live[request.id]
            engine.ledger.ended(reason)
        engine.admission.over(request, reason)
        if engine.shadow is not None and reason in (STOP, LENGTH):
            engine.shadow.remember(request)
        request.clock.ended(now, engine.counts.stall_ns)
        engine.floors.over(request)
        request.emit(Output(request.id, text, token_ids, reason, error, now, told))
