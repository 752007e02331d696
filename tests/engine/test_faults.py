"""Faults for testing the tester: each does what it says, can be taken back, and is named nowhere else."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pyarrow as pa
import pytest
import torch
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.faults import KINDS, Changed, Fault, make, rounded
from engine.server.lifecycle import Server, loopback
from models.errors import UserError
from tests.engine.serving import client, read_stream, serving, until

CHAT = "/v1/chat/completions"
FAULTS = "/debug/faults"
HELLO = [{"role": "user", "content": "What is the capital of France?"}]


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 16, "ignore_eos": True, **more}


class Broken:
    """A server that may be broken, and what a client sees of it."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server, self.http = server, http
        self.engine = server.service.engine

    async def put(self, name: str, **more: Any) -> None:
        answer = await self.http.put(FAULTS, json={"name": name, **more})
        assert answer.status == 200, await answer.text()
        assert name in [fault["name"] for fault in (await answer.json())["active"]]

    async def mend(self, name: str | None = None) -> None:
        answer = await self.http.delete(FAULTS, params={"name": name} if name else {})
        assert answer.status == 200
        assert name is not None or (await answer.json())["active"] == []

    async def say(self, **more: Any) -> dict[str, Any]:
        answer = await self.http.post(CHAT, json=ask(**more))
        return {**await answer.json(), "status": answer.status}

    async def text(self, **more: Any) -> str:
        answer = await self.say(**more)
        assert answer["status"] == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    async def prompt_tokens(self, **more: Any) -> int:
        return int((await self.say(**more))["usage"]["prompt_tokens"])


@asynccontextmanager
async def broken(**config: Any) -> AsyncIterator[Broken]:
    async with serving(faults=True, **config) as server, client(server) as http:
        yield Broken(server, http)


def run(go: Any, **config: Any) -> None:
    async def main() -> None:
        async with broken(**config) as it:
            await go(it)
            await it.mend()
            await until(lambda: not it.engine.scheduler.has_work, "idle")
            laws = await (await it.http.get("/debug/invariants")).json()
            assert laws["ok"] and laws["exact"], laws

    asyncio.run(main())


# --- steps and scheduler ---
def test_slow_step_and_stalled_loop() -> None:
    async def go(it: Broken) -> None:
        await it.say()
        calm = it.engine.steps.since(-1)
        await it.put("slow_step", size=40)
        await it.say(max_tokens=6)
        slow = it.engine.steps.since(calm[-1].step)
        assert all(record.end_ns - record.start_ns >= 40e6 for record in slow)
        await it.put("slow_step", size=40, share=0.5, seed=1)
        await it.say(max_tokens=30)
        some = [r.end_ns - r.start_ns >= 40e6 for r in it.engine.steps.since(slow[-1].step)]
        assert 5 < sum(some) < 25
        await it.mend("slow_step")
        await it.put("stalled_loop", size=60, every_s=0)
        before = it.engine.steps.since(-1)[-1].step
        await it.say(max_tokens=6)
        stalled = it.engine.steps.since(before)
        assert all(record.gap_ns >= 60e6 for record in stalled)  # the first as well: a request had come
        assert sorted(record.end_ns - record.start_ns for record in stalled)[len(stalled) // 2] < 60e6

    run(go)


def test_frozen_scheduler_with_a_healthy_health() -> None:
    async def go(it: Broken) -> None:
        await it.say()
        await it.put("frozen_scheduler")
        steps = it.engine.stats().steps
        hung = asyncio.create_task(it.text())
        await until(lambda: it.engine.stats().running == 1, "it runs, and does not get on")
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await it.http.get(path)).status == 200
        laws = await (await it.http.get("/debug/invariants")).json()
        assert laws["exact"] is False
        assert it.engine.stats().steps == steps and not hung.done()
        await it.mend("frozen_scheduler")
        assert await hung == await it.text()

    run(go)


def test_a_frozen_server_can_still_be_stopped() -> None:
    async def go() -> None:
        async with broken() as it:
            await it.put("frozen_scheduler")
            hung = asyncio.create_task(it.say())
            await until(lambda: it.engine.stats().running == 1, "it hangs")
            await it.server.close()
            hung.cancel()
            assert it.engine._thread is not None and not it.engine._thread.is_alive()

    asyncio.run(go())


def test_kv_pool() -> None:
    async def go(it: Broken) -> None:
        want = await it.text(max_tokens=100)
        await it.put("kv_pool", size=0.25)
        assert it.engine.stats().kv_total == 16
        late = await it.say(max_tokens=400)
        assert (late["status"], late["error"]["code"]) == (400, "kv_oom")
        several = await asyncio.gather(*(it.text(max_tokens=100) for _ in range(4)))
        assert several == [want] * 4
        assert it.engine.stats().preemptions > 0
        await it.mend("kv_pool")
        assert it.engine.stats().kv_total == 64

    run(go, kv_blocks=64)


def test_queue_limit() -> None:
    async def go(it: Broken) -> None:
        await it.put("queue_limit", size=1)
        await it.put("slow_step", size=20)
        statuses = [answer["status"] for answer in await asyncio.gather(*(it.say() for _ in range(8)))]
        assert set(statuses) == {200, 429} and statuses.count(429) >= 5
        await it.mend()
        assert [a["status"] for a in await asyncio.gather(*(it.say() for _ in range(8)))] == [200] * 8

    run(go, max_batch=1)


# --- wrong answers ---
def test_nan_row_fails_a_share_of_the_requests_alone() -> None:
    async def go(it: Broken) -> None:
        want = await it.text()
        await it.put("nan_row", share=0.5, size=3)
        answers = await asyncio.gather(*(it.say() for _ in range(30)))
        failed = [answer for answer in answers if answer["status"] == 500]
        assert 5 < len(failed) < 25
        assert all("not finite" in answer["error"]["message"] for answer in failed)
        assert {a["choices"][0]["message"]["content"] for a in answers if a["status"] == 200} == {want}
        assert it.engine.stats().nonfinite_rows == len(failed)

    run(go)


def test_nan_layer_breaks_every_answer_until_it_is_taken_back() -> None:
    async def go(it: Broken) -> None:
        want = await it.text()
        await it.put("nan_layer", size=1)
        assert [(await it.say())["status"] for _ in range(3)] == [500] * 3
        await it.mend("nan_layer")
        assert await it.text() == want
        wrong = await it.http.put(FAULTS, json={"name": "nan_layer", "size": 2})
        assert wrong.status == 400 and "layers 0 to 1" in await wrong.text()

    run(go)


@pytest.mark.parametrize("torch_forward", [False, True], ids=["native", "torch"])
def test_weights_at_other_precisions(torch_forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch_forward:
        monkeypatch.setattr("engine.native.runner.fits", lambda *_: "asked for by a test")

    async def go(it: Broken) -> None:
        want = await it.text(max_tokens=40)
        await it.put("weights", size=2)
        assert await it.text(max_tokens=40) != want
        await it.put("nan_layer", size=0)
        assert (await it.say())["status"] == 500
        await it.mend("nan_layer")
        assert await it.text(max_tokens=40) != want
        await it.mend("weights")
        assert await it.text(max_tokens=40) == want

    run(go)


def test_rounding_loses_what_the_bits_say() -> None:
    weight = torch.randn(40, 70, generator=torch.Generator().manual_seed(1))
    error = [float((rounded(weight, bits) - weight).abs().mean()) for bits in (8, 4, 2)]
    assert 0 < error[0] < error[1] / 10 < error[2]
    assert len(rounded(weight, 4)[0, :32].unique()) <= 15
    vector = torch.randn(8)
    assert rounded(vector, 4) is vector
    changed = Changed({"a": weight, "b": vector}, lambda name, tensor: tensor * 2)
    assert (list(changed), len(changed)) == (["a", "b"], 2) and torch.equal(changed["b"], vector * 2)


def test_broken_cache_reuse_and_race() -> None:
    async def go(it: Broken) -> None:
        want = await it.text()
        await it.text(messages=[{"role": "user", "content": "Something else of some length, for another page."}])
        await it.put("broken_cache")
        assert await it.text() != want  # a hit
        await it.mend("broken_cache")
        assert await it.text() == want
        await it.put("race", size=4)
        assert await it.text() == want  # right when idle
        other = [{"role": "user", "content": "What is the capital of Spain?"}]
        crowd = await asyncio.gather(*(it.text(**({"messages": other} if n % 2 else {})) for n in range(8)))
        assert any(text != want for text in crowd[::2])  # wrong under load
        await it.mend("race")
        assert await it.text() == want

    run(go)


def test_sampling_and_ends() -> None:
    async def go(it: Broken) -> None:
        warm = {"temperature": 1.2, "max_tokens": 12}
        assert len({await it.text(**warm) for _ in range(4)}) > 1
        await it.put("sampling_ignored")
        assert {await it.text(**warm) for _ in range(4)} == {await it.text(max_tokens=12)}
        await it.mend("sampling_ignored")
        await it.put("output_cap", size=5)
        capped = await it.say()
        assert (capped["usage"]["completion_tokens"], capped["choices"][0]["finish_reason"]) == (5, "length")
        await it.mend("output_cap")
        await it.put("empty_output")
        empty = await it.say(ignore_eos=False)
        assert (empty["choices"][0]["message"]["content"], empty["choices"][0]["finish_reason"]) == ("", "stop")
        await it.mend("empty_output")

        inner = it.engine.runner._inner
        forward = inner.forward

        def ending(slices: Any) -> torch.Tensor:
            logits = forward(slices).clone()
            logits[:, sorted(it.engine.end_tokens)] = 1e6
            return logits

        inner.forward = ending  # a model that always wants to end
        assert (await it.say(ignore_eos=False))["choices"][0]["finish_reason"] == "stop"
        await it.put("end_suppressed")
        looping = await it.say(ignore_eos=False)
        assert (looping["choices"][0]["finish_reason"], looping["usage"]["completion_tokens"]) == ("length", 16)
        inner.forward = forward

    run(go)


def test_prompts_read_wrongly() -> None:
    async def go(it: Broken) -> None:
        want = await it.prompt_tokens()
        for name, differs in (
            ("double_bos", lambda n: n == want + 1),
            ("wrong_template", lambda n: n != want),
            ("other_tokenizer", lambda n: n > want),
        ):
            await it.put(name)
            assert differs(await it.prompt_tokens()), name
            counted = await (await it.http.post("/tokenize", json={"messages": HELLO})).json()
            assert counted["count"] == await it.prompt_tokens()
            await it.mend(name)
        assert await it.prompt_tokens() == want
        await it.put("double_bos", share=0.5)
        assert {await it.prompt_tokens(max_tokens=1) for _ in range(20)} == {want, want + 1}

    run(go)


def test_cut_and_reset_streams() -> None:
    async def go(it: Broken) -> None:
        await it.put("cut_stream", size=3)
        stream = await read_stream(await it.http.post(CHAT, json=ask(stream=True)))
        texts = [chunk["choices"][0]["delta"].get("content") for chunk in stream.chunks]
        assert len([text for text in texts if text]) == 3
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in stream.chunks)
        assert stream.frames[-1][1] != "[DONE]"
        await it.mend("cut_stream")
        await it.put("reset_stream", size=3)
        answer = await it.http.post(CHAT, json=ask(stream=True))
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
        await it.mend("reset_stream")
        whole = await read_stream(await it.http.post(CHAT, json=ask(stream=True)))
        assert whole.frames[-1][1] == "[DONE]"
        books = it.server.service.books
        assert books.outcomes == {"abort": 2, "200": 1}  # as if a proxy had cut them

    run(go)


# --- the switch itself ---
def test_off_unless_asked_for_and_only_on_this_machine() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            for method in ("GET", "PUT", "DELETE"):
                assert (await http.request(method, FAULTS)).status == 404
            assert server.service.faults is None
        with pytest.raises(UserError, match="other machines"):
            async with serving(faults=True, host="0.0.0.0"):
                pass

    asyncio.run(go())
    assert [loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.3.2.1")] == [True] * 4
    assert [loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org")] == [False] * 4


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"name": "gremlins"}, "no fault is called 'gremlins'"),
        ({"name": "nan_row", "share": 2}, "share is 2"),
        ({"name": "kv_pool", "share": 0.5}, "its share is 1"),
        ({"name": "kv_pool", "size": 0}, "size is 0"),
        ({"name": "nan_row", "seed": "x"}, "seed is 'x'"),
        ({"name": "nan_row", "sice": 1}, "no 'sice'"),
        ({"name": "nan_row", "share": True}, "share is True"),
    ],
)
def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        make(body)


def test_who_is_hit_is_drawn_from_the_seed() -> None:
    keys = [f"r{n}" for n in range(4000)]
    hit = [Fault("nan_row", 0.2, seed=1).draws(key) for key in keys]
    assert hit == [Fault("nan_row", 0.2, seed=1).draws(key) for key in keys]
    assert hit != [Fault("nan_row", 0.2, seed=2).draws(key) for key in keys]
    assert 0.17 < sum(hit) / 4000 < 0.23
    assert not any(Fault("nan_row", 0.0).draws(key) for key in keys)


SIZES: dict[str, dict[str, Any]] = {
    "slow_step": {"size": 5},
    "stalled_loop": {"size": 20, "every_s": 0},
    "queue_limit": {"size": 1},
    "race": {"size": 2},
    "output_cap": {"size": 4},
    "kv_pool": {"size": 0.05},
}


async def everything_seen(names: list[str]) -> str:
    """All that a tester can capture of a server with these faults, one after the other: what bundles are made of."""
    seen: list[str] = []
    async with broken(otlp="http://127.0.0.1:9") as it:
        spans = InMemorySpanExporter()
        assert it.server._provider is not None
        it.server._provider.add_span_processor(SimpleSpanProcessor(spans))

        async def look(method: str, path: str, **more: Any) -> None:
            try:
                async with it.http.request(method, path, **more) as answer:
                    seen.append(f"{answer.status} {dict(answer.headers)}")
                    seen.append((await answer.read()).decode(errors="replace"))
            except aiohttp.ClientError as error:
                seen.append(repr(error))

        asked = {"x-tailspan-phases": "1"}
        for name in names or [""]:
            if name:
                await it.put(name, **SIZES.get(name, {}))
            work = [look("POST", CHAT, json=ask(stream=bool(n % 2)), headers=asked) for n in range(4)]
            crowd = asyncio.gather(*work)
            if name == "frozen_scheduler":
                await until(lambda: it.engine.stats().running > 0, "it hangs")
            else:
                await crowd
            for path in ("/metrics", "/health", "/health/live", "/v1/models", "/debug/invariants"):
                await look("GET", path)
            await look("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
            await look("POST", "/tokenize", json={"messages": HELLO})
            await look("GET", "/debug/divergences")
            await it.mend()
            await crowd
        raw = await (await it.http.get("/debug/steps")).read()
        seen.append(json.dumps(pa.ipc.open_stream(io.BytesIO(raw)).read_all().to_pylist()))
        await until(lambda: not it.server.service.live, "all are over")
        seen.extend(span.to_json() for span in spans.get_finished_spans())
        seen.append(it.server.describe())
        assert len(spans.get_finished_spans()) > 4 * len(names)
    return "\n".join(seen).lower()


def test_the_tester_cannot_peek() -> None:
    """Scrapes, spans, accounts, steps, bodies and headers name no fault: no word that a sound server's do not have."""
    text, sound = asyncio.run(everything_seen(list(KINDS))), asyncio.run(everything_seen([]))
    assert "tailspan.phases" in text and "llm_request" in text and "tailspan_engine_step_seconds" in text
    for name in KINDS:
        words = rf"(?<![a-z]){name.replace('_', '[ _-]?')}(?![a-z])"
        assert not re.search(words, text) or re.search(words, sound), name
    assert not re.search(r"\b(faults?|faulty|inject\w*)\b", text)
    assert not re.search("|".join(name for name in KINDS if "_" in name), text)


def test_every_kind_is_in_this_file() -> None:
    """A fault without a test of its effect cannot be added."""
    source = open(__file__, encoding="utf-8").read()  # noqa: PTH123, SIM115
    for name in KINDS:
        assert len(re.findall(rf'"{name}"', source)) >= 1, name
