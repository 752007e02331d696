"""Prometheus metrics of one engine: vLLM's names where it has one, our own beside them, from 50 us up.

What must hold: a request is counted once, when it is over, whatever came of it, and its phases are those of its
clock; a step is counted once, from the step log; gauges are read from the engine at the scrape.  The registry is the
server's own, so that two servers in one process do not meet.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from engine.phase_clock import PhaseClock
from engine.server.counts import LABELS, FromEngine
from engine.server.exchange import Books
from engine.steplog import StepRecord
from telemetry import names
from telemetry.names import DECODE, PHASES, PREEMPTED, PREFILL, QUEUE, RECOMPUTE, SECONDS_BUCKETS, STALL

if TYPE_CHECKING:
    from engine.core import Engine

TOKEN_BUCKETS: Final = tuple(float(2**k) for k in range(14))


class Metrics:
    """All metrics of a server.  ``request_over`` and ``fold_steps`` on the event loop; ``scrape`` on any one thread."""

    def __init__(
        self, engine: Engine, replica: str, version: str, spans_dropped: Callable[[], int], books: Books
    ) -> None:
        self._engine, self._step_seen = engine, -1
        self._values = (engine.model.name, replica)
        self.registry = CollectorRegistry()
        self._ttft = self._seconds(names.M_TTFT, "Request head read to first token")
        self._inter_token = _TokenGaps(self._values)
        self._tpot = self._seconds(names.M_TPOT, "Mean time per output token after the first, per request")
        self._e2e = self._seconds(names.M_E2E, "Request head read to last byte")
        self._queue = self._seconds(names.M_QUEUE_TIME, "Waiting for the first step")
        self._prefill = self._seconds(names.M_PREFILL_TIME, "First step to first token, stalls taken out")
        self._decode = self._seconds(names.M_DECODE_TIME, "First to last token, stalls and preemptions taken out")
        self._inference = self._seconds(names.M_INFERENCE_TIME, "First step to last token, all included")
        self._phase = self._family(Histogram, names.M_PHASE, "Phases; they sum to the end-to-end time", "phase")
        self._phases = {phase: self._phase.labels(*self._values, phase) for phase in PHASES}
        self._step = self._family(Histogram, names.M_STEP, "Engine step", "kind")
        self._gap = self._seconds(names.M_STEP_GAP, "Work was there and no step ran")
        self._tokens = Histogram(
            names.M_ITERATION_TOKENS, "Tokens in a step", LABELS, buckets=TOKEN_BUCKETS, registry=self.registry
        ).labels(*self._values)
        self._loop_lag = self._seconds(names.M_LOOP_LAG, "How late the event loop runs a timer")
        self._gc_pause = self._seconds(names.M_GC_PAUSE, "Garbage collections")
        self._success = self._counter(names.M_SUCCESS, "Requests over, by finish reason", "finished_reason")
        self._ttft_error = self._seconds(names.M_TTFT_ERROR, "Time to first token, predicted against measured")
        self._build_info(replica, version)
        self._device_info(replica)
        self._pauses: deque[float] = deque(maxlen=65_536)
        self._gc_start = 0
        self.registry.register(self._inter_token)
        self.registry.register(FromEngine(engine, self._values, spans_dropped, books))
        gc.callbacks.append(self._on_gc)

    def _family(self, kind: Any, name: str, text: str, *more: str) -> Any:
        return kind(name, text, (*LABELS, *more), buckets=SECONDS_BUCKETS, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Any:
        return self._family(Histogram, name, text).labels(*self._values)

    def _counter(self, name: str, text: str, *more: str) -> Any:
        return Counter(name, text, (*LABELS, *more), registry=self.registry)

    def _build_info(self, replica: str, version: str) -> None:
        shas, dtype = self._engine.model.shas, str(getattr(self._engine.runner, "dtype", "")).removeprefix("torch.")
        values = {
            "version": version,
            "model_sha": shas.get("model", ""),
            "tokenizer_sha": shas.get("tokenizer", ""),
            "template_sha": shas.get("template", ""),
            "quant": dtype,
            "kernels": str(getattr(self._engine.runner, "name", "")),
            "engine": replica,
        }
        Gauge(names.M_BUILD_INFO, "What runs here", tuple(values), registry=self.registry).labels(**values).set(1)

    def _device_info(self, replica: str) -> None:
        """The device and the precision that floors rest on; not shown where none is known."""
        cost = self._engine.floors.cost
        if cost is None:
            return
        device = cost.device
        values = {
            "device": device.name,
            "title": device.title,
            "source": device.source,
            "flops_per_second": f"{device.flops:.4g}",
            "bytes_per_second": f"{device.bandwidth:.4g}",
            "fixed_ns": str(device.fixed_ns),
            "weight_bytes": f"{cost.weight_bytes_per_param:g}",
            "kv_bytes": f"{cost.kv_bytes:g}",
            "engine": replica,
        }
        Gauge(names.M_DEVICE_INFO, "What floors rest on", tuple(values), registry=self.registry).labels(**values).set(1)

    def close(self) -> None:
        """Watch the garbage collector no longer."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    # --- what happens ---
    def request_over(
        self,
        clock: PhaseClock,
        finish_reason: str | None,
        token_ns: list[int],
        trace_id: str | None,
        ttft_error_s: float | None = None,
    ) -> None:
        """One request ended.  token_ns: when each increment of its answer was made; latencies count answers only."""
        if ttft_error_s is not None:
            self._ttft_error.observe(ttft_error_s)
        exemplar = {"trace_id": trace_id} if trace_id is not None else None
        phases = clock.durations()
        for phase, ns in phases.items():
            self._phases[phase].observe(ns / 1e9, exemplar)
        if finish_reason is None:
            return
        self._success.labels(*self._values, finish_reason).inc()
        if clock.first_token_ns is not None:
            self._ttft.observe((clock.first_token_ns - clock.head_ns) / 1e9, exemplar)
        self._inter_token.add(token_ns)
        if finish_reason not in ("stop", "length"):
            return
        if len(token_ns) > 1:
            self._tpot.observe((token_ns[-1] - token_ns[0]) / (len(token_ns) - 1) / 1e9, exemplar)
        self._e2e.observe(clock.duration_ns / 1e9, exemplar)
        self._queue.observe(phases[QUEUE] / 1e9, exemplar)
        self._prefill.observe(phases[PREFILL] / 1e9, exemplar)
        self._decode.observe(phases[DECODE] / 1e9, exemplar)
        inference = sum(phases[phase] for phase in (PREFILL, DECODE, PREEMPTED, RECOMPUTE, STALL))
        self._inference.observe(inference / 1e9, exemplar)

    def loop_lag(self, seconds: float) -> None:
        """The event loop ran a timer this late."""
        self._loop_lag.observe(max(0.0, seconds))

    def fold_steps(self) -> None:
        """Count the steps of the log since the last call; call it more often than the log's ring turns."""
        for record in self._engine.steps.since(self._step_seen):
            self._count_step(record)
        while self._pauses:
            self._gc_pause.observe(self._pauses.popleft())

    def _count_step(self, record: StepRecord) -> None:
        self._step_seen = record.step
        self._step.labels(*self._values, record.kind).observe((record.end_ns - record.start_ns) / 1e9)
        self._tokens.observe(record.decode_tokens + record.prefill_tokens)
        if record.gap_ns:
            self._gap.observe(record.gap_ns / 1e9)

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        # any thread, possibly inside a metric's lock: only note it, ``fold_steps`` observes
        if phase == "start":
            self._gc_start = time.perf_counter_ns()
        else:
            self._pauses.append((time.perf_counter_ns() - self._gc_start) / 1e9)

    # --- reading ---
    def scrape(self, accept: str) -> tuple[bytes, str]:
        """OpenMetrics (with exemplars) where ``accept`` asks for it, else Prometheus text; and the content type."""
        if "application/openmetrics-text" in accept:
            # every name here is valid in both formats; prometheus_client's default escaping turns vllm: into vllm_
            encode: Any = openmetrics.generate_latest
            return encode(self.registry, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


class _TokenGaps:
    """Histogram of the time between tokens.

    There is one for every token: the library's ``observe`` (25 us) would hold up the event loop for milliseconds at
    the end of a long answer; finding the bucket by bisection takes a fiftieth of that.
    """

    def __init__(self, values: tuple[str, str]) -> None:
        self._values = values
        self._counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self._sum_ns = 0

    def add(self, token_ns: list[int]) -> None:
        """Count the gaps between the tokens of one answer."""
        for earlier, later in pairwise(token_ns):
            self._counts[bisect_left(SECONDS_BUCKETS, (later - earlier) / 1e9)] += 1
            self._sum_ns += later - earlier

    def collect(self) -> Iterable[Metric]:
        """The cumulated buckets now."""
        bounds = [*(repr(bound) for bound in SECONDS_BUCKETS), "+Inf"]
        family = HistogramMetricFamily(names.M_INTER_TOKEN, "Between tokens of a request", labels=LABELS)
        buckets = list(zip(bounds, accumulate(map(float, self._counts)), strict=True))
        family.add_metric(self._values, buckets, self._sum_ns / 1e9)
        yield family

    describe = collect
