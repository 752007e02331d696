"""Several choices, logprobs, echo and JSON over HTTP: streamed and whole say the same, and the books balance."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from typing import Any

import aiohttp
import jsonschema
import pytest

from engine.server.lifecycle import Server
from telemetry import names
from telemetry.names import PHASES
from tests.engine.serving import Gate, Stream, client, read_stream, serving, until
from tests.engine.test_server_abort import NOBODY, RawClient, roots, spans_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "What is the capital of France?"}]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 16, "ignore_eos": True, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "The quick", "temperature": 0, "max_tokens": 8, "ignore_eos": True, **more}


async def ask(http: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = await http.post(path, json=body, headers={"x-tailspan-phases": "1"})
    found: dict[str, Any] = await answer.json()
    assert answer.status == status, found
    return found


async def streamed(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Stream:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return await read_stream(await http.post(path, json={**body, **options}, headers={"x-tailspan-phases": "1"}))


def of_choice(stream: Stream, index: int) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Text, finish reasons and logprob objects of one choice."""
    found, reasons, told = "", [], []
    for chunk in stream.chunks:
        for choice in chunk.get("choices", []):
            if choice["index"] == index:
                found += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                told += [choice["logprobs"]] if choice["logprobs"] else []
    return found, reasons, told


def test_choices_are_the_answers_that_their_seeds_give_alone() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            engine = server.service.engine
            body = chat(messages=[{"role": "user", "content": "word " * 20}], n=4, seed=7, temperature=1.0)
            whole = await ask(http, CHAT, body)
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
            said = [choice["message"]["content"] for choice in whole["choices"]]
            assert len(set(said)) == 4
            alone = await ask(http, CHAT, {**body, "n": 1})
            assert alone["choices"][0]["message"]["content"] == said[0]
            assert whole["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]  # once, not four times
            assert whole["usage"]["completion_tokens"] == 4 * 16
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            # the other three found the first one's pages
            pages = alone["usage"]["prompt_tokens"] // 16
            assert engine.stats().prefix_hits >= 3 * 16 * (pages - 1) > 0
            stream = await streamed(http, CHAT, body)
            assert [of_choice(stream, index)[:2] for index in range(4)] == [(one, ["length"]) for one in said]
            assert stream.chunks[-1]["usage"]["completion_tokens"] == 64
            for account in (whole["tailspan"], stream.account):
                assert sum(account["phases"].values()) == account["duration_ns"]
                assert set(account["phases"]) == set(PHASES)
                assert account["phases"]["decode"] > 0
            assert server.service.books.outcomes == {"200": 3}
            assert engine.integrity() == [] and engine.stats().kv_used == 0

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_of_several_choices_that_goes_frees_them_all(stream: bool) -> None:
    async def go() -> None:
        async with serving(otlp=NOBODY) as server:
            spans, gate = spans_of(server), Gate(server)
            raw = await RawClient.post(server, chat(n=5, max_tokens=400, stream=stream))
            await gate.arrived()
            await gate.step(4)
            engine = server.service.engine
            assert engine.stats().running == 5
            raw.drop()
            await until(lambda: any(exchange._gone for exchange in server.service.live), "noticed")
            gate.open()
            await until(lambda: not server.service.live and not engine.scheduler.has_work, "all are over")
            assert engine.stats().finished == {"abort": 5}
            assert engine.stats().kv_used == 0 and engine.integrity() == []
            assert server.service.books.outcomes == {"abort": 1}
            root = roots(spans)
            assert len(root) == 1
            attributes = dict(root[0].attributes or {})
            assert sum(int(attributes[names.ATTR_PHASE_PREFIX + name]) for name in PHASES) == (  # type: ignore[arg-type]
                (root[0].end_time or 0) - (root[0].start_time or 0)
            )

    asyncio.run(go())


def test_several_choices_are_refused_whole() -> None:
    async def go() -> None:
        async with serving(max_batch=1, queue_limit=3) as server, client(server) as http:
            gate = Gate(server)
            running = asyncio.create_task(http.post(CHAT, json=chat()))
            await gate.arrived()
            refused = await http.post(CHAT, json=chat(n=4))
            assert refused.status == 429
            gate.open()
            assert (await running).status == 200
            engine = server.service.engine
            await until(lambda: not engine.scheduler.has_work, "idle")
            assert engine.integrity() == [] and engine.stats().kv_used == 0
            assert server.service.books.outcomes == {"429": 1, "200": 1}

    asyncio.run(go())


def test_when_one_choice_fails_all_do() -> None:
    class Breaks:
        """Makes the row of one choice NaN."""

        def __init__(self, server: Server) -> None:
            self._inner = server.service.engine.runner
            self.kv_blocks, self.max_context = self._inner.kv_blocks, self._inner.max_context

        def forward(self, slices: Any) -> Any:
            logits = self._inner.forward(slices)
            rows = [piece for piece in slices if piece.sample]
            for row, piece in enumerate(rows):
                if piece.request.id.endswith("-1") and piece.request.generated == 3:
                    logits[row] = math.nan
            return logits

    async def go() -> None:
        async with serving() as server, client(server) as http:
            server.service.engine.runner = Breaks(server)  # type: ignore[assignment]
            broken = await ask(http, CHAT, chat(n=3, max_tokens=300), status=500)
            assert "not finite" in broken["error"]["message"]
            assert sum(broken["tailspan"]["phases"].values()) == broken["tailspan"]["duration_ns"]
            stream = await streamed(http, CHAT, chat(n=3, max_tokens=300))
            assert "not finite" in stream.chunks[-1]["error"]["message"]
            assert all(of_choice(stream, index)[1] == [] for index in range(3))
            engine = server.service.engine
            assert engine.stats().kv_used == 0 and engine.integrity() == []

    asyncio.run(go())


def test_chat_logprobs() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            whole = await ask(http, CHAT, chat(logprobs=True, top_logprobs=3))
            choice = whole["choices"][0]
            content = choice["logprobs"]["content"]
            assert len(content) == 16 == whole["usage"]["completion_tokens"]
            raw = b"".join(bytes(entry["bytes"]) for entry in content)
            assert raw.decode(errors="replace").startswith(choice["message"]["content"].rstrip("\ufffd"))
            for entry in content:  # greedy: the token is the likeliest
                best = [top["logprob"] for top in entry["top_logprobs"]]
                assert len(best) == 3 and best == sorted(best, reverse=True)
                assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
                assert entry["logprob"] == best[0] < 0
            stream = await streamed(http, CHAT, chat(logprobs=True, top_logprobs=3))
            said, _, told = of_choice(stream, 0)
            assert said == choice["message"]["content"]
            assert [entry for one in told for entry in one["content"]] == content
            plain = await ask(http, CHAT, chat(logprobs=True))
            assert all(entry["top_logprobs"] == [] for entry in plain["choices"][0]["logprobs"]["content"])
            assert (await ask(http, CHAT, chat()))["choices"][0]["logprobs"] is None

    asyncio.run(go())


def test_logprobs_tell_nothing_of_a_stop_string() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            words = (await ask(http, "/tokenize", {"prompt": "the queue grows longer than the server can carry"}))[
                "tokens"
            ]
            asked = chat(
                max_tokens=24, logprobs=True, logit_bias=dict.fromkeys(map(str, words), 9), frequency_penalty=1
            )
            full = (await ask(http, CHAT, asked))["choices"][0]
            pieces = [bytes(entry["bytes"]) for entry in full["logprobs"]["content"]]
            fit = (n for n in range(3, 20) if all(piece.isascii() and len(piece) > 1 for piece in pieces[n : n + 2]))
            at = next(fit, 0)
            stop = (pieces[at][-1:] + pieces[at + 1]).decode()  # begins inside a token
            cut = full["message"]["content"].index(stop)
            for answer in (
                (await ask(http, CHAT, {**asked, "stop": [stop]}))["choices"][0],
                None,
            ):
                if answer is None:
                    said, reasons, told = of_choice(await streamed(http, CHAT, {**asked, "stop": [stop]}), 0)
                    entries = [entry for one in told for entry in one["content"]]
                else:
                    said, reasons = answer["message"]["content"], [answer["finish_reason"]]
                    entries = answer["logprobs"]["content"]
                assert (said, reasons) == (full["message"]["content"][:cut], ["stop"])
                shown = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
                assert stop[0] not in shown[cut:] and said.startswith(shown.rstrip("\ufffd"))

    asyncio.run(go())


def test_echo_scores_the_prompt() -> None:
    """What evaluation harnesses ask: echo, logprobs, no new token.  The cache and the chunks change nothing."""

    async def go() -> None:
        async with serving(token_budget=16, max_batch=4) as server, client(server) as http:
            prompt = "The quick brown fox jumps over the lazy dog, and every deadline that passes is a person. 你好 😀"
            ids = (await ask(http, "/tokenize", {"prompt": prompt}))["tokens"]
            body = text(prompt=prompt, max_tokens=0, echo=True, logprobs=2)
            cold = await ask(http, TEXT, body)
            choice = cold["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
            assert cold["usage"]["completion_tokens"] == 0
            told = choice["logprobs"]
            assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == len(ids)
            assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
            assert all(value < 0 for value in told["token_logprobs"][1:])
            for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
                assert token.startswith("bytes:") or prompt[offset:].startswith(token)
            again = await ask(http, TEXT, body)
            assert again["choices"][0]["logprobs"] == told
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # every row is needed
            # token by token, each scored as the answer to what precedes it
            for at in (1, 7, len(ids) - 1):
                bias = {str(ids[at]): 100}
                one = await ask(http, TEXT, text(prompt=ids[:at], max_tokens=1, logprobs=0, logit_bias=bias))
                assert one["choices"][0]["logprobs"]["token_logprobs"] == [told["token_logprobs"][at]]
            # with an answer behind it, whole and streamed
            more = {**body, "max_tokens": 5}
            whole = (await ask(http, TEXT, more))["choices"][0]
            assert whole["text"].startswith(prompt) and len(whole["logprobs"]["tokens"]) == len(ids) + 5
            assert whole["logprobs"]["text_offset"][len(ids)] == len(prompt)
            said, _, frames = of_choice(await streamed(http, TEXT, more), 0)
            assert said == whole["text"]
            assert {key: [item for one in frames for item in one[key]] for key in frames[0]} == whole["logprobs"]
            # vLLM's shape says the same numbers
            vllm = (await ask(http, TEXT, text(prompt=prompt, prompt_logprobs=2)))["choices"][0]["prompt_logprobs"]
            assert [entry and entry[str(token)]["logprob"] for entry, token in zip(vllm, ids, strict=True)] == [
                None,
                *told["token_logprobs"][1:],
            ]
            in_chat = await ask(http, CHAT, chat(prompt_logprobs=0))
            assert len(in_chat["prompt_logprobs"]) == in_chat["usage"]["prompt_tokens"]

    asyncio.run(go())


def test_prompt_logprobs_survive_a_preemption() -> None:
    async def go() -> None:
        async with serving(kv_blocks=8, token_budget=16, max_batch=4) as server, client(server) as http:
            body = text(prompt="word " * 6, prompt_logprobs=1, max_tokens=60)
            alone = await ask(http, TEXT, body)
            pair = await asyncio.gather(ask(http, TEXT, body), ask(http, TEXT, body))
            assert server.service.engine.stats().preemptions > 0
            for answer in pair:
                assert answer["choices"] == alone["choices"]

    asyncio.run(go())


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}


def test_json_always_parses_unless_cut_by_length() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:

            async def one(seed: int) -> str:
                form = STRICT if seed % 2 else {"type": "json_object"}
                body = {"model": "tiny", "messages": HELLO, "seed": seed, "response_format": form, "max_tokens": 120}
                body |= {"stop": ['"', "}", "a"]} if seed % 3 == 0 else {}
                plain = asyncio.create_task(ask(http, CHAT, chat()))  # a mate without a grammar
                if seed % 5 == 0:
                    said, reasons, _ = of_choice(await streamed(http, CHAT, body), 0)
                else:
                    choice = (await ask(http, CHAT, {**body, "logprobs": True}))["choices"][0]
                    said, reasons = choice["message"]["content"], [choice["finish_reason"]]
                if reasons == ["stop"]:
                    value = json.loads(said)
                    jsonschema.validate(value, SCHEMA if seed % 2 else {"type": "object"})
                else:
                    assert reasons == ["length"]
                assert (await plain)["choices"][0]["message"]["content"] == want
                return reasons[0]

            want = (await ask(http, CHAT, chat()))["choices"][0]["message"]["content"]
            reasons = await asyncio.gather(*(one(seed) for seed in range(30)))
            assert reasons.count("stop") >= 15
            assert all(reason == "stop" for reason in reasons[1::2])  # the schema bounds its length
            cut = await ask(
                http, CHAT, {"model": "tiny", "messages": HELLO, "response_format": STRICT, "max_tokens": 3}
            )
            assert cut["choices"][0]["finish_reason"] == "length"
            several = await ask(http, CHAT, {"model": "tiny", "messages": HELLO, "response_format": STRICT, "n": 3})
            for choice in several["choices"]:
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)

    asyncio.run(go())


def test_json_that_cannot_be_had_is_refused_by_name() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
            refused = (await ask(http, CHAT, {"model": "tiny", "messages": HELLO, "response_format": wrong}, 400))[
                "error"
            ]
            assert refused["param"] == "response_format" and "objekt" in refused["message"]
            body = {"model": "tiny", "messages": HELLO, "response_format": STRICT, "stop_token_ids": [300]}
            assert (await ask(http, CHAT, body, 400))["error"]["param"] == "stop_token_ids"
            body["stop_token_ids"] = [1]
            ended = await ask(http, CHAT, body)
            jsonschema.validate(json.loads(ended["choices"][0]["message"]["content"]), SCHEMA)
            assert (await ask(http, CHAT, chat(logit_bias={"512": 1}), 400))["error"]["param"] == "logit_bias"

    asyncio.run(go())


def test_a_simulated_model_refuses_what_needs_logits() -> None:
    async def go() -> None:
        async with serving(backend="simulated", device="H100") as server, client(server) as http:
            cases = {
                "logprobs": {"logprobs": True},
                "prompt_logprobs": {"prompt_logprobs": 1},
                "response_format": {"response_format": {"type": "json_object"}, "ignore_eos": False},
                "logit_bias": {"logit_bias": {"5": 1}},
                "presence_penalty": {"presence_penalty": 1},
            }
            for name, more in cases.items():
                assert (await ask(http, CHAT, chat(**more), 400))["error"]["param"] == name
            await ask(http, CHAT, chat())

    asyncio.run(go())


def test_penalties_and_bias_act() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            ids = (await ask(http, "/tokenize", {"prompt": "fox"}))["tokens"]
            only = await ask(http, TEXT, text(logit_bias={str(ids[0]): 100}))
            one = (await ask(http, "/detokenize", {"tokens": ids[:1]}))["prompt"]
            assert only["choices"][0]["text"] == one * 8
            varied = await ask(http, TEXT, text(logit_bias={str(ids[0]): 5}, frequency_penalty=2, max_tokens=40))
            assert 0 < varied["choices"][0]["text"].count(one) < 40
            banned = await ask(http, TEXT, text(logprobs=0))
            first = banned["choices"][0]["logprobs"]["tokens"][0]
            token = (await ask(http, "/tokenize", {"prompt": first}))["tokens"][0]
            without = await ask(http, TEXT, text(logprobs=0, logit_bias={str(token): -100}))
            assert without["choices"][0]["logprobs"]["tokens"][0] != first

    asyncio.run(go())


def test_detokenize_is_the_way_back() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            for prompt in ("hello <|im_end|> 你好 😀", ""):
                tokens = (await ask(http, "/tokenize", {"prompt": prompt}))["tokens"]
                assert await ask(http, "/detokenize", {"tokens": tokens, "model": "tiny"}) == {"prompt": prompt}
            assert (await ask(http, "/detokenize", {"tokens": [512]}, 400))["error"]["param"] == "tokens"
            assert (await ask(http, "/detokenize", {"tokens": [1], "model": "x"}, 404))["error"]["param"] == "model"

    asyncio.run(go())


def test_a_key_is_asked_for_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        with caplog.at_level(logging.DEBUG):
            async with serving(api_key="open-sesame", otlp=NOBODY) as server, client(server) as http:
                assert "open-sesame" not in repr(server.options) + repr(vars(server.service))
                spans = spans_of(server)
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open-sesame"}):
                    for method, path in (
                        ("POST", CHAT),
                        ("GET", "/v1/models"),
                        ("POST", "/tokenize"),
                        ("GET", "/debug/steps"),
                    ):
                        answer = await http.request(
                            method, path, headers=headers, json=chat() if method == "POST" else None
                        )
                        assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
                        assert (await answer.json())["error"]["code"] == "invalid_api_key"
                for path in ("/health", "/health/live", "/metrics", "/openapi.json"):
                    assert (await http.get(path)).status == 200
                right = {"Authorization": "Bearer open-sesame"}
                assert (await http.post(CHAT, json=chat(), headers=right)).status == 200
                assert (await http.get("/v1/models", headers=right)).status == 200
                assert server.service.books.outcomes == {"401": 3, "200": 1}
                assert len(roots(spans)) == 4
        assert "open-sesame" not in caplog.text

    asyncio.run(go())


def test_the_span_says_what_sampling_used() -> None:
    async def go() -> None:
        async with serving(otlp=NOBODY) as server, client(server) as http:
            spans = spans_of(server)
            body = chat(temperature=0.7, min_p=0.1, presence_penalty=1, n=2, seed=5, logprobs=True, logit_bias={"5": 1})
            await ask(http, CHAT, body)
            attributes = dict(roots(spans)[0].attributes or {})
            used = {
                key.removeprefix(names.ATTR_SAMPLING_PREFIX): value
                for key, value in attributes.items()
                if key.startswith(names.ATTR_SAMPLING_PREFIX)
            }
            assert used["method"] == "sample" and used["n"] == 2
            assert (used["min_p"], used["presence_penalty"], used["logit_bias"], used["logprobs"]) == (0.1, 1.0, 1, 0)
            assert attributes[names.ATTR_FINISH_REASONS] == ("length", "length")
            assert attributes[names.ATTR_OUTPUT_TOKENS] == 32

    asyncio.run(go())
