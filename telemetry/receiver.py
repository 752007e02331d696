"""A small OTLP/HTTP receiver: spans of a run into its bundle, with no collector installed.

Owns one socket, one thread that accepts and the spans part file it writes.  What must hold: a payload is written
whole or refused with a reason; nothing that is sent can make it hold more than ``limit`` bytes of one payload.
Spans are written as they come, in the order they come; nothing is merged or dropped.  What was written can be passed on
to a collector (``forward``), which never holds up the writing.
"""

from __future__ import annotations

import json
import sys
import threading
import zlib
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from models.errors import UserError
from telemetry.forward import Forwarder
from telemetry.part_writer import PartWriter
from telemetry.schema import SPANS
from telemetry.spans import TRACES_PATH

PROTOBUF: Final = "application/x-protobuf"
LIMIT: Final = 16 * 1024 * 1024  # bytes of one payload, after decompression
READ_TIMEOUT_S: Final = 10.0

_KINDS: Final = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_STATUS: Final = ("UNSET", "OK", "ERROR")


class PayloadError(Exception):
    """A payload that is not taken; carries the HTTP status."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Receiver:
    """Accepts ``POST /v1/traces`` (protobuf, plain or gzip) and writes rows of ``telemetry.schema.SPANS``.

    folder: the spans folder of a bundle (made when missing); port 0 takes any free port.  ``spans`` counts rows
    written, ``bad`` payloads refused.  forward: gets a copy of each payload that was taken, and is closed by stop().
    on_rows: told the rows of each payload, on the thread that took it, once they are written.  Use start() and stop(),
    or as a context manager.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limit: int = LIMIT,
        name: str = "receiver",
        forward: Forwarder | None = None,
        on_rows: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        self._folder, self._host, self._port, self._limit, self._name = folder, host, port, limit, name
        self.forward, self._on_rows = forward, on_rows
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._writer: PartWriter | None = None
        self.spans = 0
        self.bad = 0

    @property
    def url(self) -> str:
        """Base URL to give to an exporter; the receiver must have been started."""
        if self._server is None:
            raise RuntimeError("receiver: not started")
        host, port = self._server.server_address[:2]
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host!s}:{port}"

    def start(self) -> Receiver:
        """Bind and accept.  Raises UserError when the port is taken."""
        if self._server is not None:
            raise RuntimeError("receiver: started twice")
        try:
            server = _Server((self._host, self._port), _handler_of(self))
        except OSError as error:
            raise UserError(
                f"cannot listen for spans on {self._host}:{self._port}: {error.strerror or error}",
                remedy="name a free port, or 0 for any",
            ) from error
        server.daemon_threads = True
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = PartWriter(self._folder, SPANS, self._name)
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="otlp-receiver", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop accepting, close the part file.  Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        if self.forward is not None:
            self.forward.close()

    def __enter__(self) -> Receiver:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def take(self, payload: bytes, encoding: str) -> int:
        """Decode one payload and write its spans, readable on return; how many.  Raises PayloadError."""
        try:
            message = ExportTraceServiceRequest.FromString(_plain(payload, encoding, self._limit))
        except DecodeError as error:
            raise PayloadError(HTTPStatus.BAD_REQUEST, f"not an OTLP trace payload: {error}") from error
        rows = span_rows(message)
        with self._lock:
            if self._writer is None:
                raise PayloadError(HTTPStatus.SERVICE_UNAVAILABLE, "the receiver has stopped")
            if rows:
                self._writer.append(rows)
                self._writer.flush()
            self.spans += len(rows)
        if self.forward is not None and rows:
            self.forward.offer(payload, encoding, len(rows))
        if self._on_rows is not None and rows:
            self._on_rows(rows)
        return len(rows)

    def switch(self, folder: Path) -> None:
        """From now on spans go into another folder; the part that was open is closed."""
        with self._lock:
            before, self._folder = self._writer, folder
            if self._server is not None:
                folder.mkdir(parents=True, exist_ok=True)
                self._writer = PartWriter(folder, SPANS, self._name)
        if before is not None:
            before.close()

    def count_bad(self) -> None:
        """One more payload was refused."""
        with self._lock:
            self.bad += 1

    @property
    def limit(self) -> int:
        """Most bytes of one payload, before and after decompression."""
        return self._limit


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """An exporter that hangs up before its answer is nobody's concern; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def span_rows(message: ExportTraceServiceRequest) -> list[dict[str, Any]]:
    """Rows of schema SPANS, one per span, in the order of the message."""
    rows: list[dict[str, Any]] = []
    for resource_spans in message.resource_spans:
        service = next(
            (item.value.string_value for item in resource_spans.resource.attributes if item.key == "service.name"), ""
        )
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                rows.append(
                    {
                        "trace_id": span.trace_id.hex(),
                        "span_id": span.span_id.hex(),
                        "parent_span_id": span.parent_span_id.hex() or None,
                        "name": span.name,
                        "kind": _named(_KINDS, span.kind),
                        "service": service,
                        "start_unix_ns": span.start_time_unix_nano,
                        "end_unix_ns": span.end_time_unix_nano,
                        "status": _named(_STATUS, span.status.code),
                        "attributes": json.dumps(_attributes(span.attributes)),
                        "events": json.dumps(
                            [
                                {
                                    "name": event.name,
                                    "unix_ns": event.time_unix_nano,
                                    "attributes": _attributes(event.attributes),
                                }
                                for event in span.events
                            ]
                        ),
                    }
                )
    return rows


def _named(table: tuple[str, ...], code: int) -> str:
    return table[code] if 0 <= code < len(table) else str(code)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return None if kind is None else getattr(value, kind)


def _plain(payload: bytes, encoding: str, limit: int) -> bytes:
    """The payload without its encoding; never more than ``limit`` bytes are unpacked."""
    if encoding in ("", "identity"):
        return payload
    if encoding != "gzip":
        raise PayloadError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content encoding {encoding!r} is not supported; send gzip or none"
        )
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(payload, limit + 1)
    except zlib.error as error:
        raise PayloadError(HTTPStatus.BAD_REQUEST, f"broken gzip: {error}") from error
    if len(plain) > limit:
        raise PayloadError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"payload is above {limit} bytes")
    if not unpacker.eof:
        raise PayloadError(HTTPStatus.BAD_REQUEST, "broken gzip: cut short")
    return plain


def _handler_of(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = READ_TIMEOUT_S  # of a silent connection, so that its thread ends

        def do_POST(self) -> None:
            try:
                self._take()
            except PayloadError as refused:
                receiver.count_bad()
                self.close_connection = True  # the body may not have been read
                self._answer(refused.status, "text/plain; charset=utf-8", f"{refused}\n".encode())
            else:
                self._answer(HTTPStatus.OK, PROTOBUF, ExportTraceServiceResponse().SerializeToString())

        def _take(self) -> None:
            if self.path.split("?")[0] != TRACES_PATH:
                raise PayloadError(HTTPStatus.NOT_FOUND, f"only {TRACES_PATH} is served")
            kind = self.headers.get_content_type()
            if kind != PROTOBUF:
                raise PayloadError(
                    HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content type {kind!r} is not supported; send {PROTOBUF}"
                )
            length = self.headers.get("content-length", "")
            if not length.isdecimal():
                raise PayloadError(HTTPStatus.LENGTH_REQUIRED, "a Content-Length is needed")
            if int(length) > receiver.limit:
                raise PayloadError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"payload of {length} bytes is above {receiver.limit}"
                )
            payload = self.rfile.read(int(length))
            if len(payload) < int(length):
                raise PayloadError(HTTPStatus.BAD_REQUEST, "the body ended early")
            receiver.take(payload, (self.headers.get("content-encoding") or "").lower())

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: what matters is counted."""

    return Handler
