"""What a step changes: tokens, clocks, counts, the step log, and the ends of requests.  Engine thread only.

    scheduled      the step begins: marks of preemption and admission
    results        the step is over: every slice's tokens, one stamp for all (the step's end), then the log, then emits
    end            a request leaves, from whatever state: what it holds is given back once, its client is told once

What must hold: a token is in its request before anybody hears of it; the log has the step before anybody hears of it;
a request's clock is marked with the same stamps that stand in the log, so that phases can be rebuilt from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.flight import Flight
from engine.logprobs import TokenLogprob
from engine.request import ERROR, LENGTH, STOP, Output, Request, SamplingParams
from engine.scheduler import Plan, Slice
from engine.step_load import StepLoad, load_of
from engine.steplog import StepRecord
from engine.structured import GrammarError

if TYPE_CHECKING:
    from engine.core import Engine


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
        for request, cached in zip(plan.admitted, plan.admitted_cached, strict=True):
            facts = request.clock.facts
            request.clock.scheduled(start, stats.stall_ns)
            request.chunk_end_ns, request.chunk_stall = start, stats.stall_ns
            stats.prefix_queries += len(request.tokens)
            stats.prefix_hits += cached
            if facts.step_first < 0:
                facts.step_first = number
                facts.cached_tokens = cached
                facts.kv_usage_at_admit = engine.pool.used / engine.pool.total

    def results(self, flight: Flight, tokens: list[int], finite: list[bool]) -> int:
        """Take the results over: token by token, then pages, then the log; one stamp, the step's end, for all.

        Rows of requests that are over are left out, and a step of such rows alone is no step.  Returns the stamp (ns).
        """
        engine = self._engine
        stats, scheduler, start = engine.counts, engine.scheduler, flight.start_ns
        live = flight.live
        stats.void_tokens += flight.plan.tokens - sum([piece.n for piece in live])
        if not live:
            return engine.now()
        number, batch = stats.steps, len(live)
        recomputed = 0
        samples = iter(zip(tokens, finite, strict=True))
        done: list[tuple[Request, str, str | None, str]] = []
        news: list[tuple[Request, str, int, tuple[TokenLogprob, ...]]] = []
        load = load_of(live)
        for piece in flight.plan.slices:
            request = piece.request
            if request.state == "finished":
                if piece.sample:
                    next(samples)
                continue
            if request.lost > piece.start:
                recomputed += min(request.lost, piece.start + piece.n) - piece.start
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
        end = engine.now()
        for piece in live:
            self._account(piece, start, end, number, batch)
        stats.steps += 1
        stats.step_tokens += load.tokens
        stats.recomputed_tokens += recomputed
        self._log(flight, live, load, number, end, recomputed)
        engine.context = load.context_tokens
        engine.admission.step(load.tokens, batch, load.context_tokens, (end - start) / 1e9)
        for request, text, token, told in news:
            request.emit(Output(request.id, text, (token,), None, None, end, told))
        for request, reason, error, text in done:
            self.end(request, reason, end, error=error, text=text)
        return end

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

    def _log(self, flight: Flight, live: list[Slice], load: StepLoad, number: int, end: int, recomputed: int) -> None:
        engine, plan, start = self._engine, flight.plan, flight.start_ns
        prefills, columns, void = len(live) - load.decode_seqs, flight.columns, plan.tokens - load.tokens
        if void:
            columns = {**columns, "padded_tokens": columns.get("padded_tokens", 0) + void}
        engine.steps.append(
            StepRecord(
                step=number,
                start_ns=start,
                end_ns=end,
                gap_ns=flight.gap_ns,
                kind="mixed" if load.decode_seqs and prefills else "decode" if load.decode_seqs else "prefill",
                running=len(engine.scheduler.running),
                waiting=len(engine.scheduler.waiting),
                decode_seqs=load.decode_seqs,
                decode_tokens=load.decode_seqs,
                prefill_seqs=prefills,
                prefill_tokens=load.prefill_tokens,
                recomputed_tokens=recomputed,
                cached_tokens=plan.cached_tokens,
                context_tokens=load.context_tokens,
                sampled_rows=load.sampled_rows,
                attended=load.attended,
                kv_used=engine.pool.used,
                kv_free=engine.pool.available,
                preempted=len(plan.preempted),
                preempted_requests=tuple([request.id for request in plan.preempted]),
                admitted=tuple([request.id for request in plan.admitted]),
                admitted_cached=tuple(plan.admitted_cached),
                requests=tuple([piece.request.id for piece in live]),
                request_tokens=tuple([piece.n for piece in live]),
                **engine.floors.step(load, end - start),
                **columns,
            )
        )

    def end(
        self,
        request: Request,
        reason: str,
        now: int,
        *,
        error: str | None = None,
        code: str | None = None,
        text: str = "",
    ) -> None:
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
        request.emit(Output(request.id, text, token_ids, reason, error, now, told, code))
