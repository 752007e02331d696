"""Behaviours 1 to 10 of docs/engine-behaviours.md, over HTTP: texts, stops, ends, limits, usage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.scripted import END, said, speaking
from tests.engine.serving import Gate, client, read_stream, serving, until

COMPLETIONS = "/v1/completions"


def pieces(text: str, size: int) -> list[bytes]:
    raw = text.encode()
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def test_behaviour_01_an_emoji_over_three_tokens_arrives_whole() -> None:
    async def go() -> None:
        script = [b"so ", b"\xf0\x9f", b"\x98", b"\x80", b" good", END]
        async with speaking(script) as http:
            text, finish, deltas = await said(http)
            assert (text, finish) == ("so 😀 good", "stop")
            assert "".join(deltas) == text
            assert not any("\ufffd" in delta for delta in deltas)
            assert "😀" in deltas  # with its last byte, not later

    asyncio.run(go())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_behaviour_02_cjk_tails_never_take_back_what_was_sent(size: int) -> None:
    async def go() -> None:
        whole = "東京は日本の首都です。안녕하세요 세계"
        script = pieces(whole, size)
        async with speaking([*script, END]) as http:
            for cut in (*range(1, len(script) + 1, 3), len(script)):
                text, finish, deltas = await said(http, max_tokens=cut)
                sent = ""
                for delta in deltas:
                    sent += delta
                    assert whole.startswith(sent)
                assert text == sent == b"".join(script[:cut]).decode(errors="ignore")
                assert finish == "length"

    asyncio.run(go())


STOP = "DEFGHIJ"


def test_behaviour_03_a_stop_string_over_four_tokens_is_never_seen() -> None:
    async def go() -> None:
        async with speaking([b"abc ", b"DEF", b"G", b"HI", b"J", b" more", END]) as http:
            text, finish, deltas = await said(http, stop=[STOP])
            assert (text, finish) == ("abc ", "stop")
            assert not any(letter in "".join(deltas) for letter in STOP)

    asyncio.run(go())


def test_behaviour_04_what_was_held_for_a_stop_is_released_whole_and_in_order() -> None:
    async def go() -> None:
        async with speaking([b"abc ", b"DEF", b"G", b"HI", b"X", b" more", END]) as http:
            text, finish, deltas = await said(http, stop=[STOP])
            assert (text, finish) == ("abc DEFGHIX more", "stop")
            assert deltas == ["abc ", "DEFGHIX", " more"]
        async with speaking([b"abc ", b"DEF", b"G"]) as http:  # the answer ends while it is held
            text, finish, deltas = await said(http, stop=[STOP], max_tokens=3)
            assert (text, finish) == ("abc DEFG", "length")

    asyncio.run(go())


@pytest.mark.parametrize("stops", [["END", "ENDING"], ["ENDING", "END"]])
@pytest.mark.parametrize("script", [[b"one ENDING two"], [b"one E", b"N", b"DI", b"NG two"]])
def test_behaviour_05_of_two_stops_the_earliest_end_wins(stops: list[str], script: list[bytes | None]) -> None:
    async def go() -> None:
        async with speaking([*script, END]) as http:
            text, finish, _deltas = await said(http, stop=stops)
            assert (text, finish) == ("one ", "stop")

    asyncio.run(go())


def test_behaviour_06_one_token_is_one_token() -> None:
    async def go() -> None:
        async with speaking([b"yes", b" and", b" more", END]) as http:
            assert await said(http, max_tokens=1) == ("yes", "length", ["yes"])
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
            usage = (await (await http.post(COMPLETIONS, json=body)).json())["usage"]
            assert usage["completion_tokens"] == 1

    asyncio.run(go())


def test_behaviour_07_an_end_of_text_at_the_last_token_is_a_stop() -> None:
    async def go() -> None:
        async with speaking([b"yes", b" and", END]) as http:
            assert await said(http, max_tokens=3) == ("yes and", "stop", ["yes", " and"])
            assert await said(http, max_tokens=2) == ("yes and", "length", ["yes", " and"])

    asyncio.run(go())


@pytest.mark.parametrize("prompt", [256, 255, 300])
def test_behaviour_08_a_prompt_that_fills_the_context_is_refused_with_true_numbers(prompt: int) -> None:
    async def go() -> None:
        async with serving(max_context=256) as server, client(server) as http:
            body: dict[str, Any] = {"model": "tiny", "prompt": [5] * prompt}
            answer = await http.post(COMPLETIONS, json=body)
            if prompt == 255:  # one token fits
                assert (await answer.json())["usage"]["total_tokens"] <= 256
                return
            assert answer.status == 400
            message = (await answer.json())["error"]["message"]
            assert "256 tokens" in message and f"{prompt} tokens in the prompt" in message
            assert "-" not in message  # no negative number of tokens

    asyncio.run(go())


def test_behaviour_09_what_never_fits_is_refused_at_once_and_holds_nobody_up() -> None:
    async def go() -> None:
        async with serving(kv_blocks=4, max_batch=1) as server, client(server) as http:
            gate = Gate(server)
            fits = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 4, "ignore_eos": True}
            first = asyncio.create_task(http.post(COMPLETIONS, json=fits))
            await gate.arrived()  # no step ends from here on
            refused = await http.post(COMPLETIONS, json={**fits, "prompt": [5] * 90})
            body = await refused.json()
            assert (refused.status, body["error"]["code"]) == (400, "kv_oom")
            assert "94 tokens" in body["error"]["message"] and "64" in body["error"]["message"]
            second = asyncio.create_task(http.post(COMPLETIONS, json=fits))
            await until(lambda: server.service.engine.stats().waiting == 1, "the next one waits")
            gate.open()
            assert [(await one).status for one in (first, second)] == [200, 200]

    asyncio.run(go())


@pytest.mark.parametrize("asked", [None, False, True])
def test_behaviour_10_usage_comes_exactly_when_it_is_asked_for(asked: bool | None) -> None:
    async def go() -> None:
        async with speaking([b"yes", END]) as http:
            body: dict[str, Any] = {"model": "tiny", "prompt": [5] * 7, "stream": True}
            if asked is not None:
                body["stream_options"] = {"include_usage": asked}
            stream = await read_stream(await http.post(COMPLETIONS, json=body))
            *others, last = stream.chunks
            if asked:
                assert last["choices"] == []
                used = last["usage"]
                assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (7, 2, 9)
                assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
            else:
                assert all("usage" not in chunk and chunk["choices"] for chunk in stream.chunks)

    asyncio.run(go())
