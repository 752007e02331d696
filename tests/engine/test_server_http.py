"""Answers over HTTP: streamed and whole, their order, their account, and errors that say what was wrong."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa

from engine.flight import DeviceFull
from engine.server.lifecycle import Server
from engine.server.service import Limits
from models.tiny import write_tiny
from telemetry.names import PHASES
from telemetry.schema import STEPS
from tests.engine.serving import Gate, client, parse_stream, read_stream, serving, tiny_folder, until

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"x-tailspan-phases": "1"}


def greedy(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **more}


def check_account(account: dict[str, Any]) -> None:
    assert set(account["phases"]) == set(PHASES)
    assert sum(account["phases"].values()) == account["duration_ns"]
    assert all(isinstance(ns, int) and ns >= 0 for ns in account["phases"].values())


def test_streamed_and_whole_say_the_same() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            whole = await (await http.post("/v1/chat/completions", json=greedy(), headers=ASK)).json()
            answer = await http.post(
                "/v1/chat/completions", json=greedy(stream=True, stream_options={"include_usage": True}), headers=ASK
            )
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert answer.headers["x-tailspan-replica"] == "r1"
            stream = await read_stream(answer)
            assert stream.text == whole["choices"][0]["message"]["content"] != ""
            assert whole["choices"][0]["finish_reason"] == "length"
            # role, content..., finish, usage, account, [DONE]
            chunks = stream.chunks
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-2])
            assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-2])
            assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
            assert chunks[-1]["choices"] == []
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            assert [event for event, _ in stream.frames[-2:]] == ["tailspan.phases", ""]
            assert stream.frames[-1][1] == "[DONE]"
            # usage: the second found the first's prompt in the cache, but for the block that is not full
            prompt = whole["usage"]["prompt_tokens"]
            assert whole["usage"] == {
                "prompt_tokens": prompt,
                "completion_tokens": 24,
                "total_tokens": prompt + 24,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            used = chunks[-1]["usage"]
            assert used["prompt_tokens"] == prompt
            assert 0 < used["prompt_tokens_details"]["cached_tokens"] < prompt
            for account, chunk in ((whole["tailspan"], whole), (stream.account, chunks[0])):
                check_account(account)
                assert account["request_id"] == chunk["id"]
                assert account["phases"]["decode"] > 0
            assert stream.account["cached_tokens"] == used["prompt_tokens_details"]["cached_tokens"]

    asyncio.run(go())


def test_without_being_asked_nothing_extra_is_sent() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            answer = await http.post("/v1/chat/completions", json=greedy())
            assert "Content-Length" in answer.headers
            assert answer.headers["x-request-id"] == (await answer.json())["id"]
            assert "tailspan" not in await answer.json()
            stream = await read_stream(await http.post("/v1/chat/completions", json=greedy(stream=True)))
            assert {event for event, _ in stream.frames} == {""}
            assert not any("usage" in chunk for chunk in stream.chunks)
            assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"

    asyncio.run(go())


def test_text_completion_streamed_and_whole() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            ids = (await (await http.post("/tokenize", json={"prompt": "The quick brown"})).json())["tokens"]
            body = {"model": "tiny", "prompt": "The quick brown", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
            whole = await (await http.post("/v1/completions", json=body)).json()
            by_ids = await (await http.post("/v1/completions", json={**body, "prompt": ids})).json()
            stream = await read_stream(await http.post("/v1/completions", json={**body, "stream": True}))
            assert whole["object"] == "text_completion"
            assert whole["choices"][0]["text"] == by_ids["choices"][0]["text"] == stream.text != ""
            assert stream.chunks[-1]["choices"][0] == {
                "index": 0,
                "text": "",
                "logprobs": None,
                "finish_reason": "length",
            }

    asyncio.run(go())


def test_a_stop_string_across_tokens_is_never_seen() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            full = (await (await http.post("/v1/chat/completions", json=greedy())).json())["choices"][0]["message"][
                "content"
            ]
            pieces = [
                chunk["choices"][0]["delta"]["content"]
                for chunk in (
                    await read_stream(await http.post("/v1/chat/completions", json=greedy(stream=True)))
                ).chunks[1:-1]
            ]
            # the end of one delta with the whole next one and the beginning of a third: a stop over three tokens
            at = next(
                n
                for n in range(3, len(pieces) - 2)
                if all("\ufffd" not in piece and piece for piece in pieces[n : n + 3])
            )
            stop = pieces[at][-1] + pieces[at + 1] + pieces[at + 2][:1]
            expected = full[: full.index(stop)]
            answer = await (await http.post("/v1/chat/completions", json=greedy(stop=stop))).json()
            stream = await read_stream(
                await http.post("/v1/chat/completions", json=greedy(stream=True, stop=["\x00never", stop]))
            )
            assert answer["choices"][0]["message"]["content"] == stream.text == expected
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert stream.chunks[-1]["choices"][0]["finish_reason"] == "stop"
            # a stop that never completes: what was held back comes out at the end
            held = await read_stream(
                await http.post("/v1/chat/completions", json=greedy(stream=True, stop=full[-2:] + "\x00"))
            )
            assert held.text == full

    asyncio.run(go())


def test_max_tokens_missing_fills_up_the_context() -> None:
    async def go() -> None:
        async with serving(max_context=96) as server, client(server) as http:
            body = greedy()
            del body["max_tokens"]
            used = (await (await http.post("/v1/chat/completions", json=body)).json())["usage"]
            assert used["total_tokens"] == 96

    asyncio.run(go())


def test_errors_have_openais_shape_and_true_numbers() -> None:
    async def go() -> None:
        async with serving(limits=Limits(body=20_000), max_context=128, kv_blocks=6) as server, client(server) as http:

            async def error(
                status: int, path: str = "/v1/chat/completions", method: str = "POST", **kwargs: Any
            ) -> dict[str, Any]:
                answer = await http.request(method, path, **kwargs)
                assert answer.status == status
                body = await answer.json()
                assert set(body["error"]) == {"message", "type", "param", "code"}
                return dict(body["error"], headers=answer.headers)

            wrong_model = await error(404, json=greedy(model="gpt-9"))
            assert (wrong_model["code"], wrong_model["param"]) == ("model_not_found", "model")
            prompt = (await (await http.post("/tokenize", json={"messages": HELLO})).json())["count"]
            long = await error(400, json=greedy(max_tokens=200))
            assert long["code"] == "context_length_exceeded"
            assert long["param"] == "max_tokens"
            assert (
                f"{prompt} tokens" in long["message"]
                and "200 tokens" in long["message"]
                and "128 tokens" in long["message"]
            )
            longer = await error(400, "/v1/completions", json={"model": "tiny", "prompt": [5] * 128})
            assert longer["code"] == "context_length_exceeded"
            assert "128 tokens in" in longer["message"]
            never = await error(400, "/v1/completions", json={"model": "tiny", "prompt": [5] * 100, "max_tokens": 1})
            assert never["code"] == "kv_oom"
            assert "101 tokens" in never["message"] and "96" in never["message"]
            assert (await error(400, "/v1/completions", json={"model": "tiny", "prompt": [512]}))["param"] == "prompt"
            assert (await error(400, "/v1/completions", json={"model": "tiny", "prompt": ""}))["param"] == "prompt"
            assert (await error(400, data=b"{nope"))["code"] == "invalid_json"
            big = await error(413, data=b" " * 20_001)
            assert big["code"] == "request_too_large"

            async def slowly() -> Any:
                for _ in range(30):
                    yield b" " * 1000

            assert (await error(413, data=slowly()))["code"] == "request_too_large"  # no Content-Length to go by
            assert (await error(413, "/tokenize", data=b" " * 20_001))["code"] == "request_too_large"
            assert (await error(404, "/v2/nothing"))["code"] == "not_found"
            assert (await error(405, method="GET"))["headers"]["Allow"] == "POST"
            assert (await error(400, "/debug/steps?after=x", "GET"))["param"] == "after"
            assert (await error(400, "/debug/steps?newest=0", "GET"))["param"] == "newest"
            # an error carries the account too, where asked
            answer = await (await http.post("/v1/chat/completions", json=greedy(max_tokens=0), headers=ASK)).json()
            check_account(answer["tailspan"])
            assert answer["tailspan"]["phases"]["queue"] == answer["tailspan"]["phases"]["prefill"] == 0
            assert server.service.books.violations() == []
            assert server.service.books.outcomes == {"404": 1, "400": 7, "413": 2}
            assert server.service.live == set()

    asyncio.run(go())


def test_a_full_queue_answers_429_at_once() -> None:
    async def go() -> None:
        async with serving(max_batch=1, queue_limit=2) as server, client(server) as http:
            gate = Gate(server)
            running = asyncio.create_task(http.post("/v1/chat/completions", json=greedy()))
            await gate.arrived()
            queued = [asyncio.create_task(http.post("/v1/chat/completions", json=greedy())) for _ in range(2)]
            await until(lambda: server.service.engine.stats().waiting == 2, "two in the queue")
            refused = await http.post("/v1/chat/completions", json=greedy())
            assert refused.status == 429
            assert int(refused.headers["Retry-After"]) > 0
            assert (await refused.json())["error"]["code"] == "queue_full"
            gate.open()
            assert [(await task).status for task in (running, *queued)] == [200] * 3
            assert server.service.books.outcomes == {"200": 3, "429": 1}

    asyncio.run(go())


def test_a_failed_step_is_a_500_streamed_or_not() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            engine = server.service.engine
            inner = engine.runner

            class Broken:
                kv_blocks, max_context = inner.kv_blocks, inner.max_context

                def forward(self, slices: Any) -> Any:
                    raise ArithmeticError("no such number")

            engine.runner = Broken()
            answer = await http.post("/v1/chat/completions", json=greedy(), headers=ASK)
            assert answer.status == 500
            body = await answer.json()
            assert body["error"]["code"] == "engine_error"
            assert "no such number" in body["error"]["message"]
            check_account(body["tailspan"])
            stream = await read_stream(await http.post("/v1/chat/completions", json=greedy(stream=True)))
            assert stream.chunks[-1]["error"]["code"] == "engine_error"
            assert not any(chunk.get("choices", [{}])[0].get("finish_reason") for chunk in stream.chunks[:-1])
            engine.runner = inner
            assert (await http.post("/v1/chat/completions", json=greedy())).status == 200
            assert server.service.books.outcomes == {"500": 2, "200": 1}
            assert engine.integrity() == []

    asyncio.run(go())


def test_a_device_without_memory_is_a_503_that_says_so_and_when_to_come_back() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            engine = server.service.engine
            inner = engine.runner

            class Full:
                kv_blocks, max_context = inner.kv_blocks, inner.max_context
                divided_steps = 0

                def forward(self, slices: Any) -> Any:
                    self.divided_steps += 1
                    raise DeviceFull("no memory for a step of 5 tokens")

            engine.runner = Full()
            answer = await http.post("/v1/chat/completions", json=greedy(), headers=ASK)
            body = await answer.json()
            assert answer.status == 503 and int(answer.headers["Retry-After"]) >= 1
            assert body["error"]["code"] == "kv_oom" and "no memory for a step" in body["error"]["message"]
            check_account(body["tailspan"])
            stream = await read_stream(await http.post("/v1/chat/completions", json=greedy(stream=True)))
            assert stream.chunks[-1]["error"]["code"] == "kv_oom"
            engine.runner = inner
            assert (await http.post("/v1/chat/completions", json=greedy())).status == 200
            assert server.service.books.outcomes == {"503": 2, "200": 1}
            text = await (await http.get("/metrics")).text()
            found = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line[:1] != "#"}
            assert found["tailspan_device_memory_shortages_total"] == 2
            assert found["tailspan_token_budget"] < engine.config.token_budget
            assert engine.integrity() == []

    asyncio.run(go())


def test_models_health_tokenize() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            listed = await (await http.get("/v1/models")).json()
            assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [("tiny", 2048)]
            assert (await (await http.get("/v1/models/tiny")).json())["id"] == "tiny"
            assert (await http.get("/v1/models/other")).status == 404
            for path in ("/health", "/health/live", "/health/ready"):
                assert (await http.get(path)).status == 200
            counted = await (await http.post("/tokenize", json={"messages": HELLO})).json()
            answer = await (await http.post("/v1/chat/completions", json=greedy(max_tokens=1))).json()
            assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
            long = await (await http.post("/tokenize", json={"prompt": "word " * 3000})).json()  # encoded on a thread
            assert long["count"] >= 3000

    asyncio.run(go())


def test_a_plain_prompt_begins_with_what_the_model_wants(tmp_path: Path) -> None:
    """A tokenizer whose post-processor puts a BOS first: completions and /tokenize do too, a chat template does not."""
    folder = write_tiny(tmp_path / "tiny")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    file.write_text(json.dumps(content))

    async def go() -> None:
        async with serving(folder=folder) as server, client(server) as http:

            async def tokens(**body: Any) -> list[int]:
                return list((await (await http.post("/tokenize", json=body)).json())["tokens"])

            bare = await tokens(prompt="hello", add_special_tokens=False)
            assert await tokens(prompt="hello") == [1, *bare]
            assert (await tokens(messages=HELLO)).count(1) == 2  # the two turns of the template
            answer = await (
                await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 1})
            ).json()
            assert answer["usage"]["prompt_tokens"] == len(bare) + 1

    asyncio.run(go())


def test_live_but_not_ready_while_the_model_loads() -> None:
    async def go() -> None:
        from engine.config import EngineConfig
        from engine.server.lifecycle import ServeOptions

        server = Server(ServeOptions(EngineConfig(model=str(tiny_folder()), threads=1, kv_blocks=64), port=0))
        try:
            await server.open()
            async with client(server) as http:
                assert (await http.get("/health/live")).status == 200
                for path in ("/health/ready", "/metrics", "/v1/models", "/debug/steps", "/debug/invariants"):
                    answer = await http.get(path)
                    assert answer.status == 503
                    assert "Retry-After" in answer.headers
                assert (await http.post("/v1/chat/completions", json=greedy())).status == 503
                await server.load()
                assert (await http.get("/health/ready")).status == 200
                assert (await http.post("/v1/chat/completions", json=greedy())).status == 200
        finally:
            await server.close()

    asyncio.run(go())


def test_the_step_log_joins_to_the_request() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            answer = await (await http.post("/v1/chat/completions", json=greedy(), headers=ASK)).json()
            account = answer["tailspan"]
            raw = await (await http.get("/debug/steps")).read()
            table = pa.ipc.open_stream(io.BytesIO(raw)).read_all()
            assert table.schema.equals(STEPS)
            mine = [row for row in table.to_pylist() if account["request_id"] in row["requests"]]
            assert [row["step"] for row in mine] == list(range(account["step_first"], account["step_last"] + 1))
            assert {row["replica"] for row in mine} == {"r1"}
            newest = await (await http.get("/debug/steps?newest=2")).read()
            with pa.ipc.open_stream(newest) as stream:
                assert stream.read_all().column("step").to_pylist() == table.column("step").to_pylist()[-2:]
            later = await (await http.get(f"/debug/steps?after={account['step_last'] - 2}")).read()
            assert pa.ipc.open_stream(io.BytesIO(later)).read_all().num_rows == 2
            laws = await (await http.get("/debug/invariants")).json()
            assert laws["ok"] and laws["violations"] == []
            assert laws["requests"] == {"received": 1, "live": 0, "outcomes": {"200": 1}}
            assert laws["engine"]["finished"] == {"length": 1}

    asyncio.run(go())


def test_a_slow_reader_holds_up_nobody_else(tmp_path: Path) -> None:
    async def go() -> None:
        name = "t" * 150  # stands in every frame: fewer tokens fill the buffers
        folder = write_tiny(tmp_path / name)
        async with serving(folder=folder) as server, client(server) as http:
            assert server._socket is not None
            server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by accepted connections
            loop, engine = asyncio.get_running_loop(), server.service.engine
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            host, port = server.url.removeprefix("http://").split(":")
            await loop.sock_connect(slow, (host, int(port)))
            asked = {"model": name, "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
            body = json.dumps(asked).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(slow, head.encode() + body)
            await until(lambda: engine.stats().running == 1, "the slow one runs")
            other = await (await http.post("/v1/chat/completions", json=greedy(model=name))).json()
            assert other["usage"]["completion_tokens"] == 24
            await until(lambda: engine.stats().finished["length"] == 2, "the engine is done with both")
            assert len(server.service.live) == 1  # its handler alone waits for the reader
            got = bytearray()
            while piece := await loop.sock_recv(slow, 1 << 16):
                got += piece
            slow.close()
            assert got.endswith(b"0\r\n\r\n")
            lines = [line for line in got.decode().split("\r\n") if line.startswith("data: ")]
            stream = parse_stream("\n\n".join(line.rstrip("\n") for line in lines))
            assert stream.frames[-1][1] == "[DONE]"
            await until(lambda: not server.service.live, "the exchange closes")
            assert server.service.books.outcomes == {"200": 2}

    asyncio.run(go())
