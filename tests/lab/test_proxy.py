"""The fault proxy in front of a real socket: what it spoils, and that the rest passes byte for byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from loadgen.lab.proxy import Proxy, ProxyFault, make, parse
from models.errors import UserError
from tests.loadgen.stub import Request, Stub, answer, plain

ASK = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXTS = tuple(f"t{number}" for number in range(8))


def script(request: Request) -> Any:
    if request.path.startswith("/v1/models"):
        return [plain("200 OK", {"data": [{"id": "m"}]}, "x-seen: yes")]
    return answer(*TEXTS)


def through(*faults: ProxyFault, work: Callable[[str, list[Stub]], Awaitable[Any]], servers: int = 1) -> Any:
    async def run() -> Any:
        stubs = [Stub(script) for _ in range(servers)]
        for stub in stubs:
            await stub.__aenter__()
        try:
            async with Proxy([stub.url for stub in stubs], faults) as proxy:
                return await work(proxy.url, stubs)
        finally:
            for stub in stubs:
                await stub.__aexit__()

    return asyncio.run(run())


async def ask(url: str, times: int = 1) -> list[tuple[int, bytes, str]]:
    """Status, body, and how it ended: "", or the name of an exception."""
    found = []
    async with aiohttp.ClientSession() as session:
        for _ in range(times):
            body = b""
            try:
                async with session.post(f"{url}/v1/chat/completions", json=ASK) as response:
                    try:
                        async for data in response.content.iter_any():
                            body += data
                    except aiohttp.ClientError as error:
                        found.append((response.status, body, type(error).__name__))
                        continue
                    found.append((response.status, body, ""))
            except aiohttp.ClientError as error:
                found.append((0, body, type(error).__name__))
    return found


def texts(body: bytes) -> list[str]:
    events = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") for event in events for choice in json.loads(event)["choices"]]
    return [text for text in deltas if text]


def test_without_a_fault_everything_passes_byte_for_byte() -> None:
    async def work(url: str, stubs: list[Stub]) -> Any:
        ((_, passed, _),) = await ask(url)
        ((_, direct, _),) = await ask(stubs[0].url)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models?x=1") as response:
            return passed, direct, await response.json(), response.headers["x-seen"], stubs[0].requests

    passed, direct, models, seen, requests = through(work=work)
    assert passed == direct and models == {"data": [{"id": "m"}]} and seen == "yes"
    assert requests[0].json == ASK and requests[-1].path == "/v1/models?x=1"


def test_a_rejection_never_reaches_the_server() -> None:
    async def work(url: str, stubs: list[Stub]) -> Any:
        return await ask(url), len(stubs[0].requests)

    ((status, body, _),), reached = through(make("reject", size=7), work=work)
    assert status == 429 and json.loads(body)["error"]["code"] == 429 and reached == 0


@pytest.mark.parametrize(
    ("kind", "ends", "text"),
    [
        ("cut", True, list(TEXTS[:3])),
        ("reset", True, None),  # what was sent before a reset may be lost on the way
        ("truncate", False, list(TEXTS[:3])),
        ("duplicate", False, [*TEXTS[:3], TEXTS[2], *TEXTS[3:]]),
    ],
)
def test_streams_are_spoilt_after_so_many_frames(kind: str, ends: bool, text: list[str] | None) -> None:
    async def work(url: str, stubs: list[Stub]) -> Any:
        return await ask(url)

    ((_, body, ended),) = through(make(kind, size=3), work=work)
    assert bool(ended) is ends
    if text is not None:
        assert texts(body) == text
    assert (b"[DONE]" in body) is (kind == "duplicate")


def test_a_delay_comes_before_the_answer_and_a_slow_way_before_every_frame() -> None:
    async def work(url: str, stubs: list[Stub]) -> Any:
        began = time.monotonic()
        ((_, body, _),) = await ask(url)
        return time.monotonic() - began, texts(body)

    took, text = through(make("delay", size=0.2), work=work)
    assert took >= 0.2 and text == list(TEXTS)
    took, text = through(make("slow", size=0.02), work=work)
    assert took >= 0.02 * 10 and text == list(TEXTS)


def test_servers_are_asked_in_turn_and_one_of_them_may_be_bad() -> None:
    async def work(url: str, stubs: list[Stub]) -> Any:
        return [status for status, _, _ in await ask(url, 6)], [len(stub.requests) for stub in stubs]

    statuses, reached = through(make("reject", replica=1), work=work, servers=3)
    assert statuses == [200, 429, 200, 200, 429, 200] and reached == [2, 0, 2]


def test_a_share_meets_so_many() -> None:
    async def work(url: str, stubs: list[Stub]) -> Any:
        return [status for status, _, _ in await ask(url, 60)]

    first = through(make("reject", share=0.3, seed=1), work=work)
    assert 8 <= first.count(429) <= 28
    assert first == through(make("reject", share=0.3, seed=1), work=work)


def test_a_server_that_is_gone_is_a_reset() -> None:
    async def work(url: str, stubs: list[Stub]) -> Any:
        await stubs[0].__aexit__()
        return await ask(url)

    ((status, _, ended),) = through(work=work)
    assert status == 0 and ended


@pytest.mark.parametrize("text", ["melt", "cut:2", "cut:0.5:-1", "cut:a", "cut:1:2:3"])
def test_a_bad_fault_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse(text)


def test_a_fault_in_words() -> None:
    assert parse("cut") == ProxyFault("cut", 1.0, 3.0)
    assert parse("delay:0.5:1.5", 4, 1) == ProxyFault("delay", 0.5, 1.5, 4, 1)
