"""A client that goes, in every state of its request: everything is given back, counted once, and the span says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.server.lifecycle import Server
from telemetry import names
from tests.engine.serving import Gate, client, serving, until

CHAT = "/v1/chat/completions"
NOBODY = "http://127.0.0.1:9"  # no collector: spans are read from memory


class RawClient:
    """A connection that a test writes to and drops by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer
        self.mate: RawClient | None = None  # another client that stays: kept, else its connection would be closed

    @classmethod
    async def post(cls, server: Server, body: dict[str, Any], *, cut: int | None = None, path: str = CHAT) -> RawClient:
        """Send a request, or its head and the first ``cut`` bytes of its body."""
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[:cut])
        await writer.drain()
        return cls(reader, writer)

    def drop(self) -> None:
        """Gone, without a goodbye."""
        self._writer.transport.abort()


def ask(**more: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    return {**body, **more}


def spans_of(server: Server) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    assert server._provider is not None
    server._provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def roots(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == names.SERVER_SPAN]


async def gone_in(reach: Callable[[Server, Gate], Awaitable[RawClient]], *, phase: str, **config: Any) -> None:
    """Bring a request into a state, drop its client, and check what is left."""
    async with serving(otlp=NOBODY, **config) as server:
        spans, gate = spans_of(server), Gate(server)
        raw = await reach(server, gate)
        service, engine = server.service, server.service.engine
        others = len(service.live) - 1
        raw.drop()
        await until(
            lambda: any(exchange._gone for exchange in service.live) or service.books.outcomes["abort"] > 0, "noticed"
        )
        gate.open()
        await until(lambda: service.books.outcomes["abort"] == 1, "the exchange closes")
        await until(lambda: not service.live, "the others finish")
        await until(lambda: not engine.scheduler.has_work, "the engine is idle")
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)
        assert stats.kv_free == stats.kv_total
        assert engine.integrity() == [] and service.books.violations() == []
        assert service.books.outcomes["abort"] == 1
        assert service.books.outcomes["200"] == others
        aborted = [span for span in roots(spans) if span.status.status_code.name == "ERROR"]
        assert len(roots(spans)) == others + 1
        assert len(aborted) == 1
        attributes = dict(aborted[0].attributes or {})
        assert attributes[names.ATTR_ERROR_TYPE] == "client_disconnected"
        assert attributes[names.ATTR_PHASE_PREFIX + phase] > 0  # type: ignore[operator]
        duration = sum(int(attributes[names.ATTR_PHASE_PREFIX + name]) for name in names.PHASES)  # type: ignore[arg-type]
        assert duration == (aborted[0].end_time or 0) - (aborted[0].start_time or 0)
        assert service.metrics is not None
        text = service.metrics.scrape("")[0].decode()
        assert 'tailspan_server_requests_total{engine="r1",model_name="tiny",outcome="abort"} 1.0' in text


STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


def test_gone_while_sending_the_body() -> None:
    async def reach(server: Server, gate: Gate) -> RawClient:
        raw = await RawClient.post(server, ask(), cut=10)
        await until(lambda: len(server.service.live) == 1, "the head was read")
        return raw

    asyncio.run(gone_in(reach, phase=names.INGRESS))


@STREAMED
def test_gone_while_queued(stream: bool) -> None:
    async def reach(server: Server, gate: Gate) -> RawClient:
        first = await RawClient.post(server, ask(max_tokens=5))
        await gate.arrived()
        raw = await RawClient.post(server, ask(stream=stream))
        raw.mate = first
        await until(lambda: server.service.engine.stats().waiting == 1, "the second waits")
        return raw

    asyncio.run(gone_in(reach, phase=names.QUEUE, max_batch=1))


@STREAMED
def test_gone_in_mid_prefill(stream: bool) -> None:
    async def reach(server: Server, gate: Gate) -> RawClient:
        raw = await RawClient.post(server, ask(stream=stream, messages=[{"role": "user", "content": "word " * 40}]))
        await gate.arrived()
        await gate.step(2)
        request = server.service.engine.scheduler.running[0]
        assert 0 < request.computed < len(request.prompt_ids)
        return raw

    asyncio.run(gone_in(reach, phase=names.PREFILL, max_batch=4, token_budget=8))


@STREAMED
def test_gone_while_decoding(stream: bool) -> None:
    async def reach(server: Server, gate: Gate) -> RawClient:
        raw = await RawClient.post(server, ask(stream=stream))
        await gate.arrived()
        await gate.step(5)
        assert server.service.engine.scheduler.running[0].generated > 2
        return raw

    asyncio.run(gone_in(reach, phase=names.DECODE))


@STREAMED
def test_gone_while_preempted(stream: bool) -> None:
    async def reach(server: Server, gate: Gate) -> RawClient:
        engine = server.service.engine
        first = await RawClient.post(server, ask(max_tokens=60))
        await gate.arrived()
        raw = await RawClient.post(server, ask(stream=stream, max_tokens=60))
        raw.mate = first
        while engine.stats().preemptions == 0:
            await gate.step()
        assert engine.stats().waiting == 1
        return raw

    asyncio.run(gone_in(reach, phase=names.PREEMPTED, kv_blocks=6, prefix_cache=False))


def test_gone_just_when_it_finished() -> None:
    """Client and last token cross: whichever is first, everything is given back and counted once."""

    async def go() -> None:
        async with serving() as server:
            service, engine = server.service, server.service.engine
            for n in range(40):
                raw = await RawClient.post(server, ask(max_tokens=2, stream=bool(n % 2)))
                await until(lambda n=n: sum(engine.stats().finished.values()) > n, "it is over")  # type: ignore[misc]
                raw.drop()
                await until(lambda: not service.live, "the exchange closes")
            assert service.books.received == sum(service.books.outcomes.values()) == 40
            assert engine.integrity() == []

    asyncio.run(go())


def test_many_clients_that_come_and_go() -> None:
    """Random drops, a small pool, preemptions: the books balance, and the others' text is right."""
    import random

    async def go() -> None:
        rng = random.Random(5)
        async with serving(kv_blocks=24, max_batch=4) as server, client(server) as http:
            service, engine = server.service, server.service.engine
            alone = (await (await http.post(CHAT, json=ask(max_tokens=30))).json())["choices"][0]["message"]["content"]

            async def one(n: int) -> None:
                if n % 3:
                    raw = await RawClient.post(server, ask(stream=bool(n % 2), max_tokens=rng.randint(1, 120)))
                    await asyncio.sleep(rng.random() * 0.2)
                    raw.drop()
                else:
                    answer = await (await http.post(CHAT, json=ask(max_tokens=30))).json()
                    assert answer["choices"][0]["message"]["content"] == alone

            for _ in range(3):
                await asyncio.gather(*(one(n) for n in range(16)))
            await until(lambda: not service.live and not engine.scheduler.has_work, "all are over")
            assert engine.integrity() == [] and service.books.violations() == []
            assert engine.stats().kv_used == 0

    asyncio.run(go())
