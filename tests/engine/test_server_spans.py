"""Server spans through a real receiver: one root a request, tiled by its children, saying what the client was told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from engine.server.lifecycle import Server
from telemetry import names
from telemetry.parts import read_table
from telemetry.receiver import Receiver
from telemetry.schema import SPANS
from tests.engine.serving import Gate, client, read_stream, serving

TRACE = "0af7651916cd43dd8448eb211c80319c"
CHAT = "/v1/chat/completions"


def ask(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "ignore_eos": True,
        **more,
    }


def parent(span: int, *, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{span:016x}-{'01' if sampled else '00'}", "x-tailspan-phases": "1"}


def flushed(server: Server, folder: Path) -> list[dict[str, Any]]:
    assert server._provider is not None
    assert server._provider.flush()
    rows = read_table(folder, SPANS).table.to_pylist()
    return [{**row, "attributes": json.loads(row["attributes"]), "events": json.loads(row["events"])} for row in rows]


def check_tiling(root: dict[str, Any], spans: list[dict[str, Any]], account: dict[str, Any] | None) -> None:
    children = sorted((s for s in spans if s["parent_span_id"] == root["span_id"]), key=lambda s: s["start_unix_ns"])
    assert {span["service"] for span in children} == {names.ENGINE_SERVICE}
    at = root["start_unix_ns"]
    own = dict.fromkeys(names.PHASES, 0)
    for child in children:
        assert child["start_unix_ns"] == at
        at = child["end_unix_ns"]
        mine, stall = child["attributes"][names.ATTR_PHASE_DURATION], child["attributes"][names.ATTR_PHASE_STALL]
        assert mine + stall == child["end_unix_ns"] - child["start_unix_ns"]
        own[child["name"]] += mine
        own[names.STALL] += stall
    assert at == root["end_unix_ns"]
    assert own == {phase: root["attributes"][names.ATTR_PHASE_PREFIX + phase] for phase in names.PHASES}
    if account is not None:
        assert own == account["phases"]
        assert account["duration_ns"] == root["end_unix_ns"] - root["start_unix_ns"]
        assert account["request_id"] == root["attributes"][names.ATTR_RESPONSE_ID]


def test_spans_say_what_the_wire_said(tmp_path: Path) -> None:
    async def go() -> None:
        with Receiver(tmp_path) as receiver:
            async with serving(otlp=receiver.url) as server, client(server) as http:
                whole = await (await http.post(CHAT, json=ask(seed=7, temperature=0.5), headers=parent(1))).json()
                stream = await read_stream(await http.post(CHAT, json=ask(stream=True), headers=parent(2)))
                silent = await (await http.post(CHAT, json=ask(), headers=parent(3, sampled=False))).json()
                assert silent["tailspan"]["phases"]["decode"] > 0
                await http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
                spans = flushed(server, tmp_path)
                roots = {span["parent_span_id"]: span for span in spans if span["name"] == names.SERVER_SPAN}
                assert set(roots) == {
                    f"{1:016x}",
                    f"{2:016x}",
                    None,
                }  # the unsampled one made none, the last has no parent
                for number, account in ((1, whole["tailspan"]), (2, stream.account)):
                    root = roots[f"{number:016x}"]
                    assert (root["trace_id"], root["kind"], root["status"]) == (TRACE, "SERVER", "UNSET")
                    check_tiling(root, spans, account)
                    found = root["attributes"]
                    assert found[names.ATTR_INPUT_TOKENS] == whole["usage"]["prompt_tokens"]
                    assert found[names.ATTR_OUTPUT_TOKENS] == 12
                    assert found[names.ATTR_FINISH_REASONS] == ["length"]
                    assert found[names.ATTR_HTTP_STATUS] == 200
                    assert found[names.ATTR_STEP_LAST] == account["step_last"]
                    assert found[names.ATTR_CACHED_TOKENS] == account["cached_tokens"]
                    ttft = found[names.ATTR_LATENCY_TTFT]
                    assert 0 < ttft < found[names.ATTR_LATENCY_E2E] == account["duration_ns"] / 1e9
                    assert found[names.ATTR_LATENCY_QUEUE] == account["phases"]["queue"] / 1e9
                used = {
                    key: value
                    for key, value in roots[f"{1:016x}"]["attributes"].items()
                    if key.startswith(names.ATTR_SAMPLING_PREFIX)
                }
                assert used[names.ATTR_SAMPLING_PREFIX + "seed"] == "7"
                assert used[names.ATTR_SAMPLING_PREFIX + "temperature"] == 0.5
                assert used[names.ATTR_SAMPLING_PREFIX + "max_tokens"] == 12
                prefill = next(
                    s for s in spans if s["name"] == "prefill" and s["parent_span_id"] == roots[f"{1:016x}"]["span_id"]
                )
                assert [event["name"] for event in prefill["events"]] == [names.EVENT_CHUNK]
                assert roots[None]["attributes"][names.ATTR_OPERATION] == "text_completion"

    asyncio.run(go())


def test_chunks_and_preemptions_have_their_places(tmp_path: Path) -> None:
    async def go() -> None:
        with Receiver(tmp_path) as receiver:
            async with (
                serving(otlp=receiver.url, kv_blocks=8, token_budget=16, prefix_cache=False) as server,
                client(server) as http,
            ):
                body = ask(messages=[{"role": "user", "content": "word " * 6}], max_tokens=60)
                answers = await asyncio.gather(*(http.post(CHAT, json=body, headers=parent(n)) for n in (1, 2)))
                accounts = [(await answer.json())["tailspan"] for answer in answers]
                assert sum(account["preemptions"] for account in accounts) > 0
                spans = flushed(server, tmp_path)
                for number, account in enumerate(accounts, 1):
                    root = next(span for span in spans if span["parent_span_id"] == f"{number:016x}")
                    check_tiling(root, spans, account)
                    children = [span for span in spans if span["parent_span_id"] == root["span_id"]]
                    assert sum(span["name"] == names.PREEMPTED for span in children) == account["preemptions"]
                    chunks = [event for span in children if span["name"] == names.PREFILL for event in span["events"]]
                    assert len(chunks) >= 2
                    assert root["attributes"][names.ATTR_PREEMPTIONS] == account["preemptions"]

    asyncio.run(go())


def test_every_outcome_has_one_root_with_its_error(tmp_path: Path) -> None:
    async def go() -> None:
        with Receiver(tmp_path) as receiver:
            async with serving(otlp=receiver.url, max_batch=1, queue_limit=1) as server, client(server) as http:
                cases: list[tuple[int, dict[str, Any], str]] = [
                    (400, {"json": ask(max_tokens=0)}, "invalid_value"),
                    (400, {"data": b"nope"}, "invalid_json"),
                    (400, {"json": ask(max_tokens=5000)}, "context_length_exceeded"),
                    (404, {"json": ask(model="x")}, "model_not_found"),
                    (413, {"data": bytes(5 * 1024 * 1024)}, "request_too_large"),
                ]
                for number, (status, kwargs, _code) in enumerate(cases):
                    assert (await http.post(CHAT, **kwargs, headers=parent(number + 1))).status == status
                gate = Gate(server)
                running = asyncio.create_task(http.post(CHAT, json=ask()))
                await gate.arrived()
                waiting = asyncio.create_task(http.post(CHAT, json=ask()))
                while server.service.engine.stats().waiting < 1:
                    await asyncio.sleep(0.002)
                assert (await http.post(CHAT, json=ask(), headers=parent(90))).status == 429
                gate.open()
                assert [(await task).status for task in (running, waiting)] == [200, 200]
                spans = flushed(server, tmp_path)
                roots = [span for span in spans if span["name"] == names.SERVER_SPAN]
                assert len(roots) == len(cases) + 3 == server.service.books.received
                by_parent = {root["parent_span_id"]: root for root in roots}
                expected = [(n + 1, status, code) for n, (status, _, code) in enumerate(cases)] + [
                    (90, 429, "queue_full")
                ]
                for number, status, code in expected:
                    root = by_parent[f"{number:016x}"]
                    assert root["status"] == "ERROR"
                    assert root["attributes"][names.ATTR_ERROR_TYPE] == code
                    assert root["attributes"][names.ATTR_HTTP_STATUS] == status
                    assert root["attributes"][names.ATTR_PHASE_PREFIX + "prefill"] == 0
                    check_tiling(root, spans, None)

    asyncio.run(go())
