"""The server span of a request, ``llm_request``, and a child for every interval of its phase clock.

What must hold: one root span per request of any outcome, opened with the time at which the request head was read;
its children tile it, so that they sum to it exactly; every figure on it is read from the clock.  Unix times are one
anchor, taken at the start, plus monotonic stamps: a clock that is set in between moves no span.

Imported only where spans are made: a server without them needs no OpenTelemetry.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, Final

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from engine.phase_clock import PhaseClock
from engine.request import GREEDY_BELOW, Request
from engine.steplog import StepRecord
from telemetry import names
from telemetry.names import DECODE, PREEMPTED, PREFILL, QUEUE, RECOMPUTE, STALL

GAP_FACTOR: Final = 5.0  # a gap between tokens beyond this many medians is an event of the decode span
MAX_EVENTS: Final = 64  # of one kind on one span

_PROPAGATOR: Final = TraceContextTextMapPropagator()


def anchor_ns() -> int:
    """Unix time minus monotonic time (ns), from the closest of a few pairs of readings."""
    best = min(_pair() for _ in range(8))
    return best[1]


def _pair() -> tuple[int, int]:
    before = time.monotonic_ns()
    unix = time.time_ns()
    after = time.monotonic_ns()
    return after - before, unix - (before + after) // 2


class RequestTracer:
    """Opens and closes the server spans of one engine."""

    def __init__(self, tracer: Tracer, fixed: Mapping[str, AttributeValue]) -> None:
        self._tracer, self._fixed = tracer, dict(fixed)
        self._label: dict[str, AttributeValue] = {}
        self._anchor = anchor_ns()

    def open(self, head_ns: int, headers: Mapping[str, str], *, chat: bool) -> Span:
        """The root span from the head on; its parent, from ``traceparent``, decides on sampling."""
        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        operation = "chat" if chat else "text_completion"
        return self._tracer.start_span(
            names.SERVER_SPAN,
            context=_PROPAGATOR.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={**self._fixed, names.ATTR_OPERATION: operation},
            start_time=self._anchor + head_ns,
        )

    def label(self, attributes: Mapping[str, AttributeValue]) -> None:
        """From now on every span of this engine carries these too, children included."""
        self._fixed.update(attributes)
        self._label = dict(attributes)

    def close(
        self,
        span: Span,
        clock: PhaseClock,
        attributes: Mapping[str, AttributeValue],
        *,
        error: tuple[str, str] | None,
        steps: Iterable[StepRecord] = (),
        work: Request | None = None,
    ) -> None:
        """End it when the clock was closed; error: type and message.  steps: of the log, while the request ran."""
        if clock.sent_ns is None:
            raise RuntimeError("a span is closed by a closed clock")
        if span.is_recording():
            span.set_attributes(attributes)
            span.set_attributes(clock_attributes(clock))
            if work is not None:
                span.set_attributes(sampling_attributes(work))
            if error is not None:
                span.set_attribute(names.ATTR_ERROR_TYPE, error[0])
                span.set_status(Status(StatusCode.ERROR, error[1]))
            own = [record for record in steps if work is not None and work.id in record.requests]
            self._children(span, clock, own)
        span.end(self._anchor + clock.sent_ns)

    @staticmethod
    def trace_id(span: Span) -> str | None:
        """Trace id of a sampled span in hex, for exemplars and logs."""
        context = span.get_span_context()
        return format_trace_id(context.trace_id) if context.trace_flags.sampled else None

    def _children(self, root: Span, clock: PhaseClock, steps: list[StepRecord]) -> None:
        context = set_span_in_context(root)
        chunks, gaps = _chunks(clock, steps), _gaps(clock, steps)
        for tile in clock.intervals:
            if tile.end_ns == tile.start_ns:
                continue
            child = self._tracer.start_span(
                tile.phase,
                context=context,
                start_time=self._anchor + tile.start_ns,
                attributes={
                    **self._label,
                    names.ATTR_PHASE_DURATION: tile.end_ns - tile.start_ns - tile.stall_ns,
                    names.ATTR_PHASE_STALL: tile.stall_ns,
                },
            )
            for name, at, more in chunks if tile.phase == PREFILL else gaps if tile.phase == DECODE else ():
                if tile.start_ns < at <= tile.end_ns:
                    child.add_event(name, more, self._anchor + at)
            child.end(self._anchor + tile.end_ns)


def clock_attributes(clock: PhaseClock) -> dict[str, AttributeValue]:
    """Everything that the clock knows, under its names: phases in ns, vLLM's latencies in seconds, facts."""
    phases, facts = clock.durations(), clock.facts
    found: dict[str, AttributeValue] = {names.ATTR_PHASE_PREFIX + phase: ns for phase, ns in phases.items()}
    model = sum(phases[phase] for phase in (PREFILL, DECODE, PREEMPTED, RECOMPUTE, STALL))
    seconds = {
        names.ATTR_LATENCY_QUEUE: phases[QUEUE],
        names.ATTR_LATENCY_SCHEDULER: phases[QUEUE] + phases[PREEMPTED],
        names.ATTR_LATENCY_PREFILL: phases[PREFILL],
        names.ATTR_LATENCY_DECODE: phases[DECODE],
        names.ATTR_LATENCY_INFERENCE: model,
        names.ATTR_LATENCY_E2E: clock.duration_ns,
        names.ATTR_DECODE_MAX_GAP: facts.decode_max_gap_ns,
    }
    if clock.first_token_ns is not None:
        seconds[names.ATTR_LATENCY_TTFT] = clock.first_token_ns - clock.head_ns
    if facts.floor_ttft_ns is not None:
        seconds[names.ATTR_FLOOR_TTFT] = facts.floor_ttft_ns
    if facts.floor_tpot_ns is not None:
        seconds[names.ATTR_FLOOR_TPOT] = facts.floor_tpot_ns
    found.update({name: ns / 1e9 for name, ns in seconds.items()})
    found.update(
        {
            names.ATTR_QUEUE_DEPTH: facts.queue_depth_at_arrival,
            names.ATTR_QUEUE_TOKENS: facts.queue_tokens_ahead,
            names.ATTR_PREEMPTIONS: facts.preemptions,
            names.ATTR_CACHED_TOKENS: facts.cached_tokens,
            names.ATTR_PREFILL_CHUNKS: facts.prefill_chunks,
            names.ATTR_DRAFTS_ACCEPTED: facts.drafts_accepted,
        }
    )
    if facts.step_first >= 0:
        found.update(
            {
                names.ATTR_KV_AT_ADMIT: facts.kv_usage_at_admit,
                names.ATTR_BATCH_MEAN: facts.batch_size_mean,
                names.ATTR_STEP_FIRST: facts.step_first,
                names.ATTR_STEP_LAST: facts.step_last,
            }
        )
    return found


def sampling_attributes(work: Request) -> dict[str, AttributeValue]:
    """What sampling really used, defaults and the drawn seed included (a seed may exceed 64 bits signed: a string).

    stop_strings: those that can cut (under a grammar none can).  logprobs, prompt_logprobs: -1 for none.
    """
    params = work.params
    used: dict[str, AttributeValue] = {
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": str(work.seed),
        "method": "greedy" if params.temperature < GREEDY_BELOW else "sample",
        "ignore_eos": params.ignore_eos,
        "stop_strings": 0 if params.grammar is not None else len(params.stop),
        "stop_token_ids": len(params.stop_token_ids),
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": len(params.logit_bias),
        "logprobs": -1 if params.logprobs is None else params.logprobs,
        "prompt_logprobs": -1 if params.prompt_logprobs is None else params.prompt_logprobs,
        "grammar": params.grammar is not None,
    }
    return {names.ATTR_SAMPLING_PREFIX + key: value for key, value in used.items()}


_Event = tuple[str, int, dict[str, Any]]


def _chunks(clock: PhaseClock, steps: list[StepRecord]) -> list[_Event]:
    """An event at the end of every step that computed a chunk of the prompt."""
    first = clock.first_token_ns
    return [
        (names.EVENT_CHUNK, step.end_ns, {names.ATTR_EVENT_STEP: step.step})
        for step in steps
        if first is None or step.end_ns <= first
    ][:MAX_EVENTS]


def _gaps(clock: PhaseClock, steps: list[StepRecord]) -> list[_Event]:
    """An event for every silence between tokens beyond GAP_FACTOR medians, at its end."""
    first = clock.first_token_ns
    ends = [step.end_ns for step in steps if first is not None and step.end_ns >= first]
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    if len(gaps) < 3:
        return []
    bound = GAP_FACTOR * median(gaps)
    return [
        (names.EVENT_GAP, end, {names.ATTR_EVENT_GAP: gap})
        for end, gap in zip(ends[1:], gaps, strict=True)
        if gap > bound
    ][:MAX_EVENTS]
