"""Spans over OTLP/HTTP into a bundle's part files, and exporters that find nobody."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import SpanKind, Status, StatusCode

from models.errors import UserError
from telemetry import names
from telemetry.parts import read_table
from telemetry.receiver import PROTOBUF, Receiver
from telemetry.schema import SPANS
from telemetry.spans import client_moments, emit_client_spans, tracer_provider


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    with Receiver(tmp_path / "spans", limit=20_000) as running:
        yield running


def rows_of(receiver: Receiver) -> list[dict[str, Any]]:
    return read_table(receiver._folder, SPANS).table.to_pylist()


def post(receiver: Receiver, body: bytes | None, path: str = "/v1/traces", **headers: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(receiver.url).netloc, timeout=5)
    try:
        connection.request(
            "POST", path, body, {"Content-Type": PROTOBUF, **{k.replace("_", "-"): v for k, v in headers.items()}}
        )
        return connection.getresponse().status
    finally:
        connection.close()


def payload(n: int = 1) -> bytes:
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for number in range(n):
        scope.spans.add(name=f"s{number}", trace_id=bytes(16), span_id=number.to_bytes(8, "big"))
    return message.SerializeToString()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_spans_of_the_sdk_arrive_as_rows(receiver: Receiver) -> None:
    provider = tracer_provider("svc", receiver.url, 1.0, {"service.instance.id": "a"})
    tracer = provider.get_tracer("t")
    root = tracer.start_span(
        "root", kind=SpanKind.SERVER, start_time=1_000, attributes={"n": 1, "list": ["a", "b"], "f": 0.5, "b": True}
    )
    root.add_event("tick", {"k": 2}, 1_500)
    root.set_status(Status(StatusCode.ERROR, "bad"))
    root.end(2_000)
    assert provider.flush()
    assert provider.exported == 1 and provider.dropped == 0
    (row,) = rows_of(receiver)  # readable while the receiver still runs
    context = root.get_span_context()
    assert row["trace_id"] == f"{context.trace_id:032x}"
    assert row["span_id"] == f"{context.span_id:016x}"
    assert row["parent_span_id"] is None
    assert (row["name"], row["kind"], row["service"], row["status"]) == ("root", "SERVER", "svc", "ERROR")
    assert (row["start_unix_ns"], row["end_unix_ns"]) == (1_000, 2_000)
    assert json.loads(row["attributes"]) == {"n": 1, "list": ["a", "b"], "f": 0.5, "b": True}
    assert json.loads(row["events"]) == [{"name": "tick", "unix_ns": 1_500, "attributes": {"k": 2}}]
    assert provider.close()
    assert receiver.spans == 1 and receiver.bad == 0


def test_plain_and_gzip(receiver: Receiver) -> None:
    assert post(receiver, payload(2)) == 200
    assert post(receiver, gzip.compress(payload(3)), Content_Encoding="gzip") == 200
    assert post(receiver, b"") == 200  # an empty message is a message
    assert (receiver.spans, receiver.bad, len(rows_of(receiver))) == (5, 0, 5)


def test_bad_payloads_are_refused_with_a_reason_and_counted(receiver: Receiver) -> None:
    assert post(receiver, b"{}", Content_Type="application/json") == 415
    assert post(receiver, payload(), Content_Encoding="zstd") == 415
    assert post(receiver, b"\xff\xff\xff") == 400
    assert post(receiver, b"no gzip", Content_Encoding="gzip") == 400
    assert post(receiver, gzip.compress(payload(9))[:-9], Content_Encoding="gzip") == 400
    assert post(receiver, bytes(20_001)) == 413
    assert post(receiver, gzip.compress(bytes(50_000_000)), Content_Encoding="gzip") == 413  # a bomb
    assert post(receiver, payload(), "/v1/metrics") == 404
    assert receiver.bad == 8
    assert post(receiver, payload()) == 200
    assert receiver.spans == len(rows_of(receiver)) == 1


def test_many_at_once_lose_nothing(receiver: Receiver) -> None:
    def send() -> None:
        for _ in range(5):
            assert post(receiver, payload(7)) == 200

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert receiver.spans == len(rows_of(receiver)) == 210


def test_a_taken_port_is_an_error_with_a_remedy(tmp_path: Path, receiver: Receiver) -> None:
    with pytest.raises(UserError) as caught:
        Receiver(tmp_path / "other", port=urlsplit(receiver.url).port or 0).start()
    assert "remedy" in str(caught.value)


def test_stop_is_idempotent_and_closes_the_port(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path).start()
    url = receiver.url
    receiver.stop()
    receiver.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((urlsplit(url).hostname or "", urlsplit(url).port or 0), timeout=2)


def test_an_exporter_is_quiet_when_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    provider = tracer_provider("svc", f"http://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            provider.get_tracer("t").start_span("lost").end()
        began = time.monotonic()
        provider.close(2.0)
        assert time.monotonic() - began < 3.0
    assert [
        record
        for record in caplog.records
        if record.name.startswith("opentelemetry") and record.levelno >= logging.WARNING
    ] == []
    assert (provider.exported, provider.dropped) == (0, 3)


def test_closing_is_bounded_when_the_collector_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        provider = tracer_provider("svc", f"http://127.0.0.1:{silent.getsockname()[1]}")
        provider.get_tracer("t").start_span("lost").end()
        began = time.monotonic()
        assert not provider.close(0.3)
        assert time.monotonic() - began < 1.5


def test_head_sampling_keeps_its_share_and_follows_the_parent(receiver: Receiver) -> None:
    provider = tracer_provider("svc", receiver.url, 0.25)
    tracer = provider.get_tracer("t")
    random.seed(1)  # where the SDK takes its ids from
    for _ in range(400):
        root = tracer.start_span("root")
        root.end()
    assert provider.flush()
    assert 60 < provider.exported < 140
    provider.close()


# --- client spans from finished rows ---
ZERO = 1_700_000_000_000_000_000
MANIFEST = {"run_id": "20260101-000000-abcd", "clock": {"zero_unix_ns": ZERO}}


def client_row(**more: Any) -> dict[str, Any]:
    row = {
        "index": 4,
        "model": "m",
        "target": "http://127.0.0.1:8000",
        "intended_s": 1.0,
        "lag_s": 0.01,
        "connect_s": 0.02,
        "sent_s": 1.04,
        "first_chunk_s": 1.5,
        "end_s": 2.0,
        "status": 200,
        "error": None,
        "finish_reason": "stop",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
        "sampled": True,
        "prompt_tokens_reported": 5,
        "completion_tokens_reported": 7,
        "connection_reused": False,
        "replica": "r1",
    }
    return {**row, **more}


def test_client_spans_carry_the_ids_that_went_out_and_cover_the_root(receiver: Receiver) -> None:
    provider = tracer_provider("tailspan-loadgen", receiver.url)
    rows = [
        client_row(),
        client_row(sampled=False),
        client_row(index=5, span_id="b7ad6b7169203332", connect_s=0.0, connection_reused=True),
    ]
    assert emit_client_spans(rows, MANIFEST, provider) == 6 + 5
    provider.close()
    spans = rows_of(receiver)
    root = next(span for span in spans if span["span_id"] == "b7ad6b7169203331")
    assert (root["name"], root["kind"], root["parent_span_id"]) == ("chat m", "CLIENT", None)
    assert (root["start_unix_ns"], root["end_unix_ns"]) == (ZERO + 10**9, ZERO + 2 * 10**9)
    attributes = json.loads(root["attributes"])
    assert attributes[names.ATTR_TRACE_INDEX] == 4
    assert attributes[names.ATTR_RUN_ID] == MANIFEST["run_id"]
    assert (attributes[names.ATTR_SERVER_ADDRESS], attributes[names.ATTR_SERVER_PORT]) == ("127.0.0.1", 8000)
    children = [span for span in spans if span["parent_span_id"] == root["span_id"]]
    assert [span["name"] for span in children] == list(names.CLIENT_CHILDREN)
    assert {span["trace_id"] for span in children} == {root["trace_id"]}
    bounds = [children[0]["start_unix_ns"], *(span["end_unix_ns"] for span in children)]
    assert bounds == [ZERO + round(s * 1e9) for s in (1.0, 1.01, 1.03, 1.04, 1.5, 2.0)]
    assert [span["start_unix_ns"] for span in children] == bounds[:-1]


def test_a_failed_client_span_says_why(receiver: Receiver) -> None:
    provider = tracer_provider("tailspan-loadgen", receiver.url)
    gone = {"connect_s": None, "sent_s": None, "first_chunk_s": None, "status": None, "finish_reason": None}
    assert (
        emit_client_spans(
            [client_row(**gone, end_s=1.2, error="refused", error_detail="connection refused")], MANIFEST, provider
        )
        == 3
    )
    provider.close()
    root, *children = rows_of(receiver)
    assert root["status"] == "ERROR"
    assert json.loads(root["attributes"])[names.ATTR_ERROR_TYPE] == "refused"
    assert [span["name"] for span in children] == ["client_wait", "connect"]


def test_client_spans_for_nobody_are_counted_without_a_try_each() -> None:
    provider = tracer_provider("tailspan-loadgen", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    assert emit_client_spans([client_row()] * 2000, MANIFEST, provider) == 12_000
    assert time.monotonic() - began < 10  # 24 batches, one of them tried
    assert (provider.exported, provider.dropped) == (0, 12_000)
    provider.close()


def test_a_collector_that_starts_late_gets_the_spans(tmp_path: Path) -> None:
    port = free_port()
    provider = tracer_provider("svc", f"http://127.0.0.1:{port}")
    provider.get_tracer("t").start_span("early").end()
    flushing = threading.Thread(target=provider.flush, args=(5.0,))
    flushing.start()
    with Receiver(tmp_path, port=port) as receiver:
        flushing.join()
        assert (provider.exported, provider.dropped, receiver.spans) == (1, 0, 1)
    provider.close()


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({}, [1.0, 1.01, 1.03, 1.04, 1.5, 2.0]),
        ({"first_chunk_s": None}, [1.0, 1.01, 1.03, 1.04, 2.0, 2.0]),
        ({"first_chunk_s": None, "sent_s": None}, [1.0, 1.01, 1.03, 2.0, 2.0, 2.0]),
        ({"first_chunk_s": None, "sent_s": None, "connect_s": None, "lag_s": None}, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ({"lag_s": None}, [1.0, 1.02, 1.04, 1.04, 1.5, 2.0]),
        ({"connect_s": None}, [1.0, 1.01, 1.01, 1.04, 1.5, 2.0]),
        ({"end_s": 1.45}, [1.0, 1.01, 1.03, 1.04, 1.45, 1.45]),
        ({"end_s": None, "first_chunk_s": None, "sent_s": None, "connect_s": None, "lag_s": None}, [1.0] * 6),
    ],
)
def test_bounds_never_go_back(missing: dict[str, Any], expected: list[float]) -> None:
    assert client_moments(client_row(**missing)) == pytest.approx(expected)
