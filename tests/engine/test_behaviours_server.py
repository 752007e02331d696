"""Behaviours 20 to 23 of the engine's design, each under its number, with a real server."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine.server.lifecycle import Server
from engine.server.service import Limits
from models.tiny import write_tiny
from telemetry import names
from tests.engine.serving import Gate, client, serving, until

CHAT = "/v1/chat/completions"
ACCOUNT = {"x-tailspan-phases": "1"}


def ask(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
        **more,
    }


def totals(text: str, metric: str, label: str) -> dict[str, float]:
    """Label value -> value of a counter."""
    families = {family.name: family for family in parse_text(text)}
    found = families.get(metric)
    samples = found.samples if found else ()
    return {sample.labels.get(label, ""): sample.value for sample in samples if not sample.name.endswith("_created")}


def check_balance(text: str) -> None:
    """The conservation laws, from the counters of one scrape."""
    states = totals(text, names.M_ENGINE_REQUESTS, "state")
    live = totals(text, names.M_ENGINE_LIVE, "")[""]
    assert states["received"] == sum(n for state, n in states.items() if state != "received") + live
    received, server_live = totals(text, names.M_SERVER_RECEIVED, "")[""], totals(text, names.M_SERVER_LIVE, "")[""]
    assert received == sum(totals(text, names.M_SERVER_REQUESTS, "outcome").values()) + server_live


@pytest.mark.parametrize("limit", ["requests", "tokens"])
def test_behaviour_20_a_full_queue_refuses_at_once_and_the_counters_balance(limit: str) -> None:
    async def go() -> None:
        n, prompt = 6, 18
        bound = {"queue_limit": n} if limit == "requests" else {"queue_tokens": n * prompt}
        async with serving(max_batch=1, **bound) as server, client(server) as http:
            counted = await (await http.post("/tokenize", json={"messages": ask()["messages"]})).json()
            assert counted["count"] == prompt
            gate = Gate(server)
            first = asyncio.create_task(http.post(CHAT, json=ask()))
            await gate.arrived()  # from here on the engine computes nothing: no answer can have waited for a step
            crowd = [asyncio.create_task(http.post(CHAT, json=ask(), headers=ACCOUNT)) for _ in range(10 * n)]

            def over() -> bool:
                return sum(task.done() for task in crowd) == 9 * n

            scrapes = 0
            while not over():
                check_balance(await (await http.get("/metrics")).text())
                scrapes += 1
            for task in crowd:
                if task.done():
                    answer = task.result()
                    body = await answer.json()
                    assert answer.status == 429
                    assert int(answer.headers["Retry-After"]) >= 1
                    assert body["error"]["code"] == ("queue_full" if limit == "requests" else "queue_tokens")
                    phases = body["tailspan"]["phases"]
                    assert phases["prefill"] == phases["stall"] == 0
            gate.open()
            while not all(task.done() for task in (first, *crowd)):
                check_balance(await (await http.get("/metrics")).text())
            statuses = [task.result().status for task in (first, *crowd)]
            assert (statuses.count(200), statuses.count(429)) == (n + 1, 9 * n)
            text = await (await http.get("/metrics")).text()
            check_balance(text)
            reason = "queue_full" if limit == "requests" else "queue_tokens"
            assert totals(text, names.M_REJECTIONS, "reason") == {reason: 9 * n}
            assert scrapes > 0

    asyncio.run(go())


def test_a_first_token_that_would_come_too_late_is_a_503() -> None:
    async def go() -> None:
        async with serving(max_batch=1, max_predicted_ttft=0.5) as server, client(server) as http:
            engine = server.service.engine
            for _ in range(100):  # a machine that takes 20 ms a step
                engine.admission.step(4, 1, 100, 0.02)
                engine.admission.step(128, 1, 200, 0.02)
            gate = Gate(server)
            first = asyncio.create_task(http.post(CHAT, json=ask(max_tokens=300)))
            await gate.arrived()
            done = 0
            engine.admission._answer, engine.admission._answers = 40.0, 1
            waiting = []
            for done in range(1, 5):
                waiting.append(asyncio.create_task(http.post(CHAT, json=ask())))
                await until(
                    lambda done=done: engine.stats().waiting == done or waiting[-1].done(),  # type: ignore[misc]
                    "it is queued or refused",
                )
                if waiting[-1].done():
                    break
            refused = waiting.pop().result()
            assert refused.status == 503
            assert (await refused.json())["error"]["code"] == "predicted_ttft"
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
            gate.open()
            assert [(await task).status for task in (first, *waiting)] == [200] * (1 + len(waiting))
            text = await (await http.get("/metrics")).text()
            assert totals(text, names.M_REJECTIONS, "reason") == {"predicted_ttft": 1}
            check_balance(text)

    asyncio.run(go())


def test_behaviour_21_a_drain_refuses_new_requests_at_once_and_lets_the_others_end() -> None:
    async def go() -> None:
        async with serving(limits=Limits(drain_s=60)) as server, client(server) as http:
            gate = Gate(server)
            flying = [asyncio.create_task(http.post(CHAT, json=ask())) for _ in range(3)]
            await until(lambda: server.service.engine.stats().live == 3, "three in flight")
            drain = asyncio.create_task(server.drain(asyncio.Event()))
            await asyncio.sleep(0)
            ready, live = await http.get("/health/ready"), await http.get("/health/live")
            assert (ready.status, live.status) == (503, 200)
            refused = await http.post(CHAT, json=ask())
            assert refused.status == 503
            assert (await refused.json())["error"]["code"] == "shutting_down"
            assert int(refused.headers["Retry-After"]) >= 1
            assert not drain.done() and not any(task.done() for task in flying)
            gate.open()
            assert [(await task).status for task in flying] == [200] * 3
            await drain
            text = await (await http.get("/metrics")).text()
            assert totals(text, names.M_REJECTIONS, "reason") == {"draining": 1}
            check_balance(text)

    asyncio.run(go())


def spans_of(server: Server) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    assert server._provider is not None
    server._provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def roots(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == names.SERVER_SPAN]


def test_behaviour_22_one_root_span_for_a_request_of_any_outcome() -> None:
    async def go() -> None:
        limits = Limits(body=4096, drain_s=60)
        config: dict[str, Any] = {"max_batch": 1, "queue_limit": 1, "max_context": 256, "kv_blocks": 8}
        async with (
            serving(otlp="http://127.0.0.1:9", limits=limits, faults=True, **config) as server,
            client(server) as http,
        ):
            spans, service = spans_of(server), server.service
            expected: list[tuple[str, int | None, str | None]] = []  # who, status, error.type

            async def one(who: str, status: int, error: str | None, **more: Any) -> None:
                answer = await http.post(CHAT, **(more if more.keys() & {"json", "data"} else {"json": ask(), **more}))
                assert answer.status == status, (who, await answer.text())
                await answer.read()
                expected.append((who, status, error))
                await until(lambda: len(roots(spans)) == len(expected), who)
                root = roots(spans)[-1]
                attributes = dict(root.attributes or {})
                assert attributes.get(names.ATTR_HTTP_STATUS) == status, who
                assert attributes.get(names.ATTR_ERROR_TYPE) == error, who
                assert root.status.status_code.name == ("UNSET" if error is None else "ERROR"), who
                children = [
                    s for s in spans.get_finished_spans() if s.parent and s.parent.span_id == root.context.span_id
                ]
                assert sum(s.end_time - s.start_time for s in children) == root.end_time - root.start_time, who

            await one("answer", 200, None)
            await one("stream", 200, None, json=ask(stream=True))
            await one("not JSON", 400, "invalid_json", data=b"{")
            await one("no such model", 404, "model_not_found", json=ask(model="x"))
            await one("too many bytes", 413, "request_too_large", data=b" " * 5000)
            await one("beyond the context", 400, "context_length_exceeded", json=ask(max_tokens=300))
            await one("beyond the pool", 400, "kv_oom", json=ask(max_tokens=150))
            await one("bad deadline", 400, "invalid_value", headers={names.DEADLINE_HEADER: "soon"})
            await http.put("/debug/faults", json={"name": "nan_row"})
            await one("not finite", 500, "engine_error")
            await http.delete("/debug/faults")

            async def impatient() -> None:
                limit = aiohttp.ClientTimeout(total=30, sock_read=0.5)
                async with http.post(CHAT, json=ask(stream=True), timeout=limit) as answer:
                    await answer.read()

            gate = Gate(server)
            first = asyncio.create_task(impatient())
            await gate.arrived()
            second = asyncio.create_task(http.post(CHAT, json=ask()))
            await until(lambda: service.engine.stats().waiting == 1, "one waits")
            await one("queue full", 429, "queue_full")
            with pytest.raises(TimeoutError):
                await first
            second.cancel()
            await until(lambda: sum(exchange._gone for exchange in service.live) == 2, "both are missed")
            gate.open()
            await until(lambda: not service.live, "all are over")
            await server.drain(asyncio.Event())
            answer = await http.post(CHAT, json=ask())
            assert answer.status == 503
            books = service.books.read()
            await until(lambda: len(roots(spans)) == books.received, "a root for every request")
            kinds = [dict(root.attributes or {}).get(names.ATTR_ERROR_TYPE) for root in roots(spans)]
            assert kinds[-1] == "shutting_down"
            assert kinds.count("client_disconnected") == books.outcomes["abort"] == 2
            assert len({root.context.trace_id for root in roots(spans)}) == books.received

    asyncio.run(go())


def test_behaviour_23_a_slow_reader_blocks_nobody_and_is_dropped_when_too_much_waits(tmp_path: Path) -> None:
    async def go() -> None:
        name = "t" * 150  # stands in every frame: fewer tokens fill the buffers
        folder = write_tiny(tmp_path / name)
        limits = Limits(stream=30_000)
        async with serving(folder=folder, otlp="http://127.0.0.1:9", limits=limits) as server, client(server) as http:
            spans, service, engine = spans_of(server), server.service, server.service.engine
            assert server._socket is not None
            server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by accepted connections
            loop = asyncio.get_running_loop()
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            host, port = server.url.removeprefix("http://").split(":")
            await loop.sock_connect(slow, (host, int(port)))
            asked = {"model": name, "prompt": "hello", "max_tokens": 480, "ignore_eos": True, "stream": True}
            body = json.dumps(asked).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(slow, head.encode() + body)
            await until(lambda: engine.stats().running == 1, "the slow one runs")
            mates = [http.post(CHAT, json=ask(model=name, max_tokens=40)) for _ in range(3)]
            assert [answer.status for answer in await asyncio.gather(*mates)] == [200] * 3
            await until(lambda: not service.live, "its stream is dropped")
            await until(lambda: engine.stats().kv_used == 0, "and its pages are given back")
            slow.close()
            assert service.books.outcomes == {"200": 3, "abort": 1}
            assert service.books.dropped == {names.SLOW_READER: 1}
            assert engine.integrity() == [] and service.books.violations() == []
            errors = [dict(root.attributes or {}).get(names.ATTR_ERROR_TYPE) for root in roots(spans)]
            assert errors.count(names.SLOW_READER) == 1
            text = await (await http.get("/metrics")).text()
            assert totals(text, names.M_STREAMS_DROPPED, "reason") == {names.SLOW_READER: 1}
            check_balance(text)

    asyncio.run(go())


def test_the_counters_balance_at_any_scrape_of_a_busy_server() -> None:
    """Answers, refusals, errors and clients that go, while somebody scrapes as fast as it can."""

    async def go() -> None:
        async with serving(max_batch=3, queue_limit=4, kv_blocks=16, faults=True) as server, client(server) as http:
            await http.put("/debug/faults", json={"name": "nan_row", "share": 0.2, "seed": 4})

            async def one(n: int) -> None:
                body = ask(max_tokens=5 + n % 40, stream=bool(n % 2), **({"n": 3} if n % 11 == 0 else {}))
                try:
                    limit = aiohttp.ClientTimeout(total=0.02 if n % 5 == 0 else 30)
                    async with http.post(CHAT, json=body, timeout=limit) as answer:
                        await answer.read()
                except TimeoutError:
                    return

            crowd = asyncio.gather(*(one(n) for n in range(120)))
            scrapes = 0
            while not crowd.done() or scrapes < 3:
                check_balance(await (await http.get("/metrics")).text())
                scrapes += 1
            await crowd
            await until(lambda: not server.service.live, "all are over")
            laws = await (await http.get("/debug/invariants")).json()
            assert laws["ok"] and laws["exact"]
            text = await (await http.get("/metrics")).text()
            check_balance(text)
            assert totals(text, names.M_LAW_VIOLATIONS, "")[""] == 0
            assert totals(text, names.M_ENGINE_LIVE, "")[""] == totals(text, names.M_SERVER_LIVE, "")[""] == 0

    asyncio.run(go())
