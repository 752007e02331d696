"""Kinds of fault that users of engines report: text, stops, finish reasons, usage, limits.  docs/engine-behaviours.md
says which report each test stands for."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from tests.engine.serving import client, serving
from tests.engine.test_server_choices import CHAT, TEXT, ask, chat, of_choice, streamed, text

SAID = "😀👍🏽🚀 안녕하세요 세계 東京は日本の首都です。Привет 👩‍👩‍👧"
SPOKEN = {
    "type": "json_schema",
    "json_schema": {
        "name": "said",
        "schema": {"type": "object", "properties": {"said": {"const": SAID}}, "required": ["said"]},
    },
}


def test_characters_of_several_tokens_arrive_whole_and_all_of_them() -> None:
    """A grammar leaves one way to go: the characters come as bytes over many tokens."""

    async def go() -> None:
        async with serving() as server, client(server) as http:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "x"}],
                "response_format": SPOKEN,
                "temperature": 0,
            }
            body |= {"logit_bias": {str(token): -5 for token in range(3, 200)}}  # rather the longer tokens

            async def one(n: int) -> None:
                whole = (await ask(http, CHAT, body))["choices"][0]
                stream = await streamed(http, CHAT, body)
                said, reasons, _ = of_choice(stream, 0)
                assert said == whole["message"]["content"]
                assert json.loads(said)["said"] == SAID
                assert "\ufffd" not in "".join(json.dumps(chunk, ensure_ascii=False) for chunk in stream.chunks)
                assert reasons == ["stop"] == [whole["finish_reason"]]

            await asyncio.gather(*(one(n) for n in range(6)))  # together in a batch

    asyncio.run(go())


def test_any_stop_of_any_length_cuts_at_the_same_place_streamed_and_not() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            words = (await ask(http, "/tokenize", {"prompt": "the queue grows longer than the server can carry"}))[
                "tokens"
            ]
            asked = chat(max_tokens=40, logit_bias={str(token): 9 for token in words}, frequency_penalty=0.5)
            full = (await ask(http, CHAT, asked))["choices"][0]["message"]["content"]
            for start, length in itertools.product((0, 1, 9, 30), (1, 2, 5, 17)):
                stop = full[start : start + length]
                want = full[: full.index(stop)]
                whole = (await ask(http, CHAT, {**asked, "stop": stop}))["choices"][0]
                stream = await streamed(http, CHAT, {**asked, "stop": [stop, "\x00never"]})
                said, reasons, _ = of_choice(stream, 0)
                assert (whole["message"]["content"], whole["finish_reason"]) == (want, "stop")
                assert (said, reasons) == (want, ["stop"])
                # beside the role, the end and the usage no frame is empty
                deltas = [chunk["choices"][0]["delta"].get("content") for chunk in stream.chunks[1:-2]]
                assert all(deltas)
                # what is counted is what was computed, the tokens of the stop too
                assert stream.chunks[-1]["usage"]["completion_tokens"] <= 40
            # a stop that never completes holds text back and gives it all out, in order
            for stop in (full[-1:] + "\x00", full[-7:] + "\x00", full[:3] + "\x00"):
                said, reasons, _ = of_choice(await streamed(http, CHAT, {**asked, "stop": stop}), 0)
                assert (said, reasons) == (full, ["length"])

    asyncio.run(go())


def test_finish_reasons() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            end = {"ignore_eos": False, "logit_bias": {"2": 100}}
            cases: list[tuple[dict[str, Any], str, int]] = [
                ({**end, "max_tokens": 5}, "stop", 1),  # end of text
                ({**end, "max_tokens": 1}, "stop", 1),  # end of text exactly at the limit
                ({**end, "max_tokens": 5, "min_tokens": 3}, "stop", 4),
                ({"max_tokens": 1}, "length", 1),
                ({"max_tokens": 5}, "length", 5),
                ({"max_tokens": 5, "stop_token_ids": list(range(512))}, "stop", 1),
            ]
            for more, reason, tokens in cases:
                for path, body in ((CHAT, chat(**more)), (TEXT, text(**more))):
                    whole = await ask(http, path, body)
                    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == (
                        reason,
                        tokens,
                    )
                    stream = await streamed(http, path, body)
                    assert of_choice(stream, 0)[1] == [reason]
                    assert stream.chunks[-1]["usage"]["completion_tokens"] == tokens
                    last = next(chunk for chunk in reversed(stream.chunks) if chunk["choices"])["choices"][0]
                    assert not last.get("text") and not last.get("delta")  # the end carries no text

    asyncio.run(go())


@pytest.mark.parametrize("include", [True, False, None])
def test_usage_comes_when_it_is_asked_for_and_at_no_other_time(include: bool | None) -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            options = {} if include is None else {"stream_options": {"include_usage": include}}
            for path, body in ((CHAT, chat(n=2)), (TEXT, text())):
                raw = (await (await http.post(path, json={**body, "stream": True, **options})).read()).decode()
                chunks = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
                bare = [chunk for chunk in chunks if not chunk["choices"]]
                if include:
                    assert bare == [chunks[-1]] and chunks[-1]["choices"] == []
                    assert chunks[-1]["usage"]["completion_tokens"] == body["max_tokens"] * body.get("n", 1)
                    assert all(chunk["usage"] is None for chunk in chunks[:-1])
                else:
                    assert bare == [] and not any("usage" in chunk for chunk in chunks)

    asyncio.run(go())


def test_limits_are_told_with_true_numbers() -> None:
    async def go() -> None:
        async with serving(max_context=64, kv_blocks=3) as server, client(server) as http:
            for tokens, limit in ((60, 20), (64, 1), (100, 5), (200, None)):
                body = text(prompt=[5] * tokens, max_tokens=limit)
                error = (await ask(http, TEXT, body, 400))["error"]
                assert error["code"] == "context_length_exceeded" and error["param"] in ("prompt", "max_tokens")
                assert "64 tokens" in error["message"] and f"{tokens} tokens in the prompt" in error["message"]
                assert "-" not in error["message"]  # never a negative number
            never = (await ask(http, TEXT, text(prompt=[5] * 50, max_tokens=4), 400))["error"]
            assert never["code"] == "kv_oom" and "54 tokens" in never["message"] and "48" in never["message"]
            # the newer name limits like the older one, and is named when it is wrong
            newer = chat(max_completion_tokens=3)
            del newer["max_tokens"]
            assert (await ask(http, CHAT, newer))["usage"]["completion_tokens"] == 3
            error = (await ask(http, CHAT, {**newer, "max_completion_tokens": 100}, 400))["error"]
            assert error["param"] == "max_completion_tokens"
            for wrong in (0, -5):
                error = (await ask(http, CHAT, chat(max_tokens=wrong), 400))["error"]
                assert error["param"] == "max_tokens"
            # left out: what the context or the pool has room for, never a negative number
            body = text(prompt=[5] * 40)
            del body["max_tokens"]
            assert (await ask(http, TEXT, body))["usage"]["total_tokens"] == 48
            assert server.service.engine.integrity() == []

    asyncio.run(go())


def test_prompts_of_two_cache_salts_share_no_page_and_say_the_same() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:

            async def say(salt: str | None) -> tuple[int, str]:
                body: dict[str, Any] = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "a prompt of more than one page of the pool, " * 4}],
                    "temperature": 0,
                    "max_tokens": 8,
                    "cache_salt": salt,
                }
                answer = await (await http.post("/v1/chat/completions", json=body)).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached, answer["choices"][0]["message"]["content"]

            (first, text), (again, _) = await say("one"), await say("one")
            (other, same), (plain, _), (none, _) = await say("two"), await say(None), await say(None)
            assert first == other == plain == 0 and again == none > 0
            assert text == same

    asyncio.run(go())
