"""OpenTelemetry spans out of this process: one provider, head-sampled, exported over OTLP/HTTP (protobuf).

Owns the set-up of the SDK and the client spans of a run.  What must hold: nobody listening is normal, so a failed
export is counted and never logged; closing takes at most two seconds; a client span carries exactly the ids that
went to the server as ``traceparent``, so that its server span is its child.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from telemetry import names

TRACES_PATH: Final = "/v1/traces"
EXPORT_TIMEOUT_S: Final = 2.0  # of one batch; a refused connection gives up at once or after one retry
QUEUE: Final = 16_384  # finished spans that may wait while a collector is slow or restarts
BATCH: Final = 512  # spans in one export
DELAY_MS: Final = 500  # how long a finished span may wait for company
SCOPE: Final = InstrumentationScope("tailspan", schema_url="")

# The SDK reports every failed export as an error with a reason; here that is a count (``SpanProvider.dropped``).
_EXPORT_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk._shared_internal",
)


class CountingExporter(SpanExporter):
    """Passes batches on and counts what arrived and what did not; thread-safe."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.exported = 0
        self.dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch, trying again for EXPORT_TIMEOUT_S; a failure only counts."""
        result = self._inner.export(spans)
        with self._lock:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
        if result is not SpanExportResult.SUCCESS:
            self.drop(len(spans))
        return result

    def drop(self, spans: int) -> None:
        """Count spans that are not even tried."""
        with self._lock:
            self.dropped += spans

    def shutdown(self) -> None:
        """Close the connection; an export that waits for a retry gives up."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered here."""
        return True


class SpanProvider(TracerProvider):
    """A TracerProvider that knows its exporter, so that spans can be counted, flushed and closed within a limit."""

    def __init__(self, exporter: CountingExporter, ratio: float, resource: Resource) -> None:
        super().__init__(sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False)
        self.exporter = exporter
        self.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE, schedule_delay_millis=DELAY_MS, max_export_batch_size=BATCH
            )
        )
        self._closed = False

    @property
    def exported(self) -> int:
        """Spans a collector took."""
        return self.exporter.exported

    @property
    def dropped(self) -> int:
        """Spans that no collector took."""
        return self.exporter.dropped

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Send what is finished; False when that took longer than ``timeout_s`` (it goes on behind)."""
        return _bounded(lambda: self.force_flush(int(timeout_s * 1000)), "spans-flush", timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Send what is finished and stop, in at most ``timeout_s``; False when spans may be lost.  Idempotent."""
        if self._closed:
            return True
        self._closed = True
        if _bounded(self.shutdown, "spans-close", timeout_s):
            return True
        self.exporter.shutdown()
        return False


def tracer_provider(
    service: str,
    endpoint: str,
    ratio: float = 1.0,
    attributes: Mapping[str, str] | None = None,
) -> SpanProvider:
    """A provider whose spans go to ``endpoint`` (base URL of an OTLP/HTTP collector).

    ratio: share of traces sampled where the caller did not decide; a ``traceparent`` decides otherwise.
    attributes: of the resource, beside service.name.  Raises ValueError on a ratio outside 0..1.
    """
    for name in _EXPORT_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    url = endpoint.rstrip("/")
    if not url.endswith(TRACES_PATH):
        url += TRACES_PATH
    inner = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S, compression=Compression.Gzip)
    resource = Resource.create({"service.name": service, **(attributes or {})})
    return SpanProvider(CountingExporter(inner), ratio, resource)


def emit_client_spans(rows: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any], provider: SpanProvider) -> int:
    """Export the client spans of finished rows (schema REQUESTS); returns how many spans were handed over.

    Only rows with ``sampled`` are taken.  A root span ``chat {model}`` runs from the intended send to the end, its
    children cover it without a gap: client_wait, connect, send, wait_first_chunk, stream (those that took no time,
    like connect on a reused connection, are left out).
    """
    zero = int(manifest["clock"]["zero_unix_ns"])
    run_id = str(manifest.get("run_id", ""))
    ids = RandomIdGenerator()
    batch: list[ReadableSpan] = []
    count, reachable = 0, True

    def send() -> None:
        nonlocal count, reachable
        if reachable:  # a collector that took no batch takes no further one: each try costs seconds
            reachable = provider.exporter.export(batch) is SpanExportResult.SUCCESS
        else:
            provider.exporter.drop(len(batch))
        count += len(batch)
        batch.clear()

    for row in rows:
        if not row.get("sampled") or not row.get("trace_id") or not row.get("span_id"):
            continue
        batch.extend(_client_tree(row, zero, run_id, provider.resource, ids))
        if len(batch) >= BATCH:
            send()
    if batch:
        send()
    return count


def client_moments(row: Mapping[str, Any]) -> list[float]:
    """The six bounds (s after clock zero) of the five client phases of a row; they never go back.

    A phase that was not reached begins and ends at the end of the request; the one in which it failed lasts until then.
    """
    start = float(row["intended_s"])
    lag, connect, sent, first = (row.get(key) for key in ("lag_s", "connect_s", "sent_s", "first_chunk_s"))
    ends = [value for value in (row.get("end_s"), first, sent, start) if value is not None]
    end = max(start, float(ends[0]))
    if lag is None:
        work = end if sent is None else float(sent) - float(connect or 0.0)
    else:
        work = start + float(lag)
    if connect is None and sent is None:
        connected = end
    else:
        connected = work + float(connect or 0.0)
    bounds = [start, work, connected, end if sent is None else float(sent), end if first is None else float(first), end]
    for at in range(1, len(bounds)):
        bounds[at] = min(max(bounds[at], bounds[at - 1]), end)
    return bounds


def _client_tree(
    row: Mapping[str, Any], zero_unix_ns: int, run_id: str, resource: Resource, ids: RandomIdGenerator
) -> list[ReadableSpan]:
    context = SpanContext(int(row["trace_id"], 16), int(row["span_id"], 16), is_remote=False, trace_flags=TraceFlags(1))
    stamps = [zero_unix_ns + round(moment * 1e9) for moment in client_moments(row)]
    error = row.get("error")
    status = Status(StatusCode.ERROR, row.get("error_detail") or error) if error else Status(StatusCode.UNSET)
    model = row.get("model") or ""
    root = ReadableSpan(
        f"{names.CLIENT_SPAN_PREFIX} {model}".strip(),
        context=context,
        resource=resource,
        attributes=_client_attributes(row, run_id),
        kind=SpanKind.CLIENT,
        status=status,
        start_time=stamps[0],
        end_time=stamps[-1],
        instrumentation_scope=SCOPE,
    )
    spans = [root]
    for name, start, end in zip(names.CLIENT_CHILDREN, stamps[:-1], stamps[1:], strict=True):
        if end > start:
            own = SpanContext(context.trace_id, ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(1))
            spans.append(
                ReadableSpan(
                    name,
                    context=own,
                    parent=context,
                    resource=resource,
                    attributes={},
                    kind=SpanKind.INTERNAL,
                    start_time=start,
                    end_time=end,
                    instrumentation_scope=SCOPE,
                )
            )
    return spans


def _client_attributes(row: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    target = urlsplit(str(row.get("target") or ""))
    finish = row.get("finish_reason")
    found = {
        names.ATTR_OPERATION: "chat",
        names.ATTR_REQUEST_MODEL: row.get("model"),
        names.ATTR_RESPONSE_MODEL: row.get("model"),
        names.ATTR_RESPONSE_ID: row.get("server_request_id"),
        names.ATTR_FINISH_REASONS: [finish] if finish else None,
        names.ATTR_INPUT_TOKENS: row.get("prompt_tokens_reported"),
        names.ATTR_OUTPUT_TOKENS: row.get("completion_tokens_reported"),
        names.ATTR_SERVER_ADDRESS: target.hostname,
        names.ATTR_SERVER_PORT: target.port or {"http": 80, "https": 443}.get(target.scheme),
        names.ATTR_HTTP_STATUS: row.get("status"),
        names.ATTR_ERROR_TYPE: row.get("error"),
        names.ATTR_RUN_ID: run_id or None,
        names.ATTR_TRACE_INDEX: row.get("index"),
        names.ATTR_INTENDED_TIME: row.get("intended_s"),
        names.ATTR_SCHEDULE_LAG: row.get("lag_s"),
        names.ATTR_REPLICA: row.get("replica"),
        names.ATTR_CONNECTION_REUSED: row.get("connection_reused"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _bounded(call: Callable[[], object], name: str, timeout_s: float) -> bool:
    """Run ``call`` on a daemon thread for at most ``timeout_s``; True when it finished in time."""
    done = threading.Event()

    def work() -> None:
        call()
        done.set()

    threading.Thread(target=work, name=name, daemon=True).start()
    return done.wait(timeout_s)
