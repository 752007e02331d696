"""Spans that the receiver passes on: whole, in order, never at the receiver's cost, and counted where they are lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.errors import UserError
from telemetry import forward
from telemetry.forward import Forwarder, checked_collector
from telemetry.parts import read_table
from telemetry.receiver import Receiver
from telemetry.schema import SPANS
from telemetry.spans import tracer_provider

WAIT_S = 20.0


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Receiver]:
    """A collector: our own receiver, which takes what OTLP says."""
    with Receiver(tmp_path / "collector") as running:
        yield running


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def send(receiver: Receiver, spans: int) -> None:
    provider = tracer_provider("engine", receiver.url)
    tracer = provider.get_tracer("t")
    for number in range(spans):
        tracer.start_span(f"s{number}").end()
    assert provider.close(WAIT_S)
    assert (provider.exported, provider.dropped) == (spans, 0)


def test_a_collector_gets_what_the_bundle_gets(tmp_path: Path, collector: Receiver) -> None:
    forwarder = Forwarder(collector.url)
    with Receiver(tmp_path / "spans", forward=forwarder) as receiver:
        send(receiver, 700)
    assert forwarder.to_dict() == {"sent": 700, "dropped": 0}
    ours, theirs = (read_table(tmp_path / name, SPANS).table for name in ("spans", "collector"))
    assert ours.num_rows == 700 and theirs.equals(ours)


def test_without_a_collector_the_bundle_has_everything_and_the_loss_is_counted(tmp_path: Path) -> None:
    forwarder = Forwarder(f"http://127.0.0.1:{closed_port()}")
    began = time.monotonic()
    with Receiver(tmp_path / "spans", forward=forwarder) as receiver:
        send(receiver, 30)
    assert time.monotonic() - began < 15
    assert read_table(tmp_path / "spans", SPANS).table.num_rows == 30
    assert forwarder.to_dict() == {"sent": 0, "dropped": 30}


def test_a_collector_that_comes_back_gets_the_next_spans(tmp_path: Path) -> None:
    port = closed_port()
    forwarder = Forwarder(f"http://127.0.0.1:{port}")
    forwarder.offer(b"", "", 3)
    until = time.monotonic() + WAIT_S
    while forwarder.dropped < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    with Receiver(tmp_path / "collector", port=port):
        forwarder.offer(b"", "", 4)
        forwarder.close(WAIT_S)
    assert forwarder.to_dict() == {"sent": 4, "dropped": 3}


def test_a_refused_payload_is_lost_and_the_next_is_not(collector: Receiver) -> None:
    forwarder = Forwarder(collector.url)
    forwarder.offer(b"\xff\xff", "", 5)
    forwarder.offer(b"", "", 2)
    forwarder.close(WAIT_S)
    assert forwarder.to_dict() == {"sent": 2, "dropped": 5}
    assert collector.bad == 1


def test_a_silent_collector_costs_no_more_than_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "QUEUE", 4)
    monkeypatch.setattr(forward, "TIMEOUT_S", 0.2)
    with socket.socket() as silent:  # takes connections, answers nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        forwarder = Forwarder(f"http://127.0.0.1:{silent.getsockname()[1]}")
        before = time.monotonic()
        for _ in range(100):
            forwarder.offer(b"x", "", 1)
        assert time.monotonic() - before < 5, "offering never waits"
        assert forwarder.dropped >= 95
        forwarder.close(0.1)
        forwarder.close(0.1)
        forwarder.offer(b"x", "", 1)
    until = time.monotonic() + WAIT_S
    while forwarder.dropped < 101:
        assert time.monotonic() < until, "what waited, and what was offered after the end, is counted too"
        time.sleep(0.01)
    while any(thread.name == "spans-forward" for thread in threading.enumerate()):
        assert time.monotonic() < until, "no thread is left"
        time.sleep(0.01)


def test_bytes_are_bounded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LIMIT", 10)
    forwarder = Forwarder(f"http://127.0.0.1:{closed_port()}")
    forwarder.offer(b"x" * 11, "", 7)
    assert forwarder.dropped == 7
    forwarder.close()


def test_addresses() -> None:
    assert checked_collector("http://h:4318/", "w") == "http://h:4318/v1/traces"
    assert checked_collector("https://h/otlp", "w") == "https://h/otlp/v1/traces"
    assert checked_collector("http://h/v1/traces", "w") == "http://h/v1/traces"
    for bad in ("h:4318", "grpc://h:4317", "http://", "http://h:x", "http://h:4318?x=1"):
        with pytest.raises(UserError) as caught:
            checked_collector(bad, "--forward-spans")
        assert caught.value.where == "--forward-spans" and repr(bad) in str(caught.value)
