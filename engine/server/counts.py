"""Gauges and counters that the engine and the server keep themselves, read at the scrape.

What must hold at any scrape: server requests received = live + outcomes; engine requests received = finished +
aborted + rejected + failed + live.  Each set is read under one lock, so it is of one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.request import ABORT, ERROR, LENGTH, STOP
from engine.server.exchange import Books
from models.compiled import spent_s
from telemetry import names

if TYPE_CHECKING:
    from engine.core import Engine

LABELS: Final = ("model_name", "engine")


class FromEngine:
    """A collector of prometheus_client."""

    def __init__(self, engine: Engine, values: tuple[str, str], spans_dropped: Callable[[], int], books: Books) -> None:
        self._engine, self._values, self._spans_dropped, self._books = engine, values, spans_dropped, books

    def describe(self) -> Iterable[Metric]:
        """Names without values, so that registering does not read the engine."""
        return list(self._families(zero=True))

    def collect(self) -> Iterable[Metric]:
        """The values now."""
        return self._families(zero=False)

    def _families(self, *, zero: bool) -> Iterator[Metric]:
        engine = self._engine
        stats, books = engine.stats(), self._books.read()
        shadow, laws, limits = engine.shadow, engine.laws, engine.scheduler.limits
        gauges = (
            (names.M_RUNNING, "Requests that hold KV", stats.running),
            (names.M_WAITING, "Requests in the queue", stats.waiting),
            (names.M_KV_USAGE, "Share of the KV pool in use", min(1.0, stats.kv_used / max(1, stats.kv_total))),
            (names.M_ENGINE_LIVE, "Requests in the engine", stats.live),
            (names.M_SERVER_LIVE, "Requests in the server", books.live),
            (names.M_BACKLOG, "Predicted time until all that waits has its first token", engine.backlog_s()),
            (
                names.M_STEP_MODEL_ERROR,
                "Step time, predicted against measured, running mean",
                engine.admission.model.error,
            ),
            (names.M_TOKEN_BUDGET, "Most tokens of a step, now", limits.budget),
            (names.M_BATCH_LIMIT, "Most requests that run, now", limits.batch),
        )
        counters = (
            (names.M_PREFIX_QUERIES, "Prompt tokens looked up in the prefix cache", stats.prefix_queries),
            (names.M_PREFIX_HITS, "Prompt tokens found in the prefix cache", stats.prefix_hits),
            (names.M_PREEMPTIONS, "Requests that lost their pages", stats.preemptions),
            (names.M_PROMPT_TOKENS, "Prompt tokens computed", stats.prompt_tokens),
            (names.M_GENERATION_TOKENS, "Tokens generated", stats.generation_tokens),
            (names.M_RECOMPUTED, "Tokens computed again after a preemption", stats.recomputed_tokens),
            (names.M_ALLOC_FAILURES, "KV pages were wanted and not there", stats.alloc_failures),
            (names.M_NONFINITE, "Rows whose logits were not finite", stats.nonfinite_rows),
            (names.M_MEMORY_SHORT, "Steps that the device had no memory for as a whole", limits.shortages),
            (names.M_VOID, "Tokens computed ahead for requests that turned out to be over", stats.void_tokens),
            (names.M_LAW_CHECKS, "Checks of the conservation laws", laws.checks),
            (names.M_LAW_VIOLATIONS, "Broken laws that the checks found", laws.violations),
            (names.M_SHADOWED, "Answers run again alone and compared", shadow.compared if shadow else 0),
            (names.M_DIVERGENCE, "Answers that differ from themselves alone", shadow.diverged if shadow else 0),
            (names.M_SERVER_RECEIVED, "Requests that came", books.received),
            (names.M_SPANS_DROPPED, "Spans that no collector took", self._spans_dropped()),
        )
        for family, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in table:
                metric = family(name, text, labels=LABELS)
                if not zero:
                    metric.add_metric(self._values, float(value))
                yield metric
        compiled = GaugeMetricFamily(
            names.M_KERNEL_COMPILE, "Spent on compiling, by kernel, since the start", labels=(*LABELS, "kernel")
        )
        native = {"native": spent_s["llama"]}  # the forward in C
        seconds = native | getattr(engine.runner, "compile_seconds", {})
        for kernel, spent in ({} if zero else seconds).items():
            compiled.add_metric((*self._values, kernel), spent)
        yield compiled
        states = {
            "received": stats.received,
            "finished": stats.finished[STOP] + stats.finished[LENGTH],
            "aborted": stats.finished[ABORT],
            "rejected": sum(stats.rejected.values()),
            "failed": stats.finished[ERROR],
        }
        tables: tuple[tuple[str, str, str, Mapping[str, int]], ...] = (
            (names.M_ENGINE_REQUESTS, "Requests by what became of them", "state", states),
            (names.M_SERVER_REQUESTS, "Every request once: HTTP status, or abort", "outcome", books.outcomes),
            (names.M_REJECTIONS, "Refused before the queue", "reason", stats.rejected + books.refused),
            (names.M_STREAMS_DROPPED, "Streams that the server gave up", "reason", books.dropped),
        )
        for name, text, label, values in tables:
            metric = CounterMetricFamily(name, text, labels=(*LABELS, label))
            for key, value in ({} if zero else values).items():
                metric.add_metric((*self._values, key), float(value))
            yield metric
