"""The official openai client against our server: it must not notice that we are not OpenAI."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Literal

import openai
import pydantic
import pytest

from tests.engine.serving import serving, tiny_folder

HELLO = [{"role": "user", "content": "What is the capital of France?"}]


def run(folder: Path, test: object, **config: object) -> None:
    async def go() -> None:
        async with (
            serving(folder=folder, **config) as server,  # type: ignore[arg-type]
            openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as ai,
        ):
            await test(ai, server.service.engine.model.name)  # type: ignore[operator]

    asyncio.run(go())


def test_chat_streamed_and_not() -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        more = {"ignore_eos": True, "min_tokens": 2, "top_k": 5}
        whole = await ai.chat.completions.create(
            model=model, messages=HELLO, max_tokens=9, temperature=0, extra_body=more
        )  # type: ignore[call-overload]
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 9
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        text, finish, usage = "", None, None
        stream = await ai.chat.completions.create(
            model=model,
            messages=HELLO,
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=more,
        )  # type: ignore[call-overload]
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            usage = chunk.usage or usage
        assert (text, finish) == (whole.choices[0].message.content, "length")
        assert usage.completion_tokens == 9  # type: ignore[union-attr]
        # the phase account does not confuse the client
        stream = await ai.chat.completions.create(
            model=model, messages=HELLO, max_tokens=3, stream=True, extra_headers={"x-tailspan-phases": "1"}
        )  # type: ignore[call-overload]
        assert [chunk async for chunk in stream if chunk.choices][-1].choices[0].finish_reason in ("stop", "length")

    run(tiny_folder(), test)


def test_completions_models_and_a_seed() -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        assert [item.id async for item in ai.models.list()] == [model]
        texts = {
            (
                await ai.completions.create(
                    model=model, prompt="Once", max_tokens=12, seed=42, extra_body={"ignore_eos": True}
                )
            )
            .choices[0]
            .text
            for _ in range(3)
        }
        assert len(texts) == 1

    run(tiny_folder(), test)


def test_errors_become_the_clients_exceptions() -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await ai.chat.completions.create(model="gpt-9", messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(model=model, messages=HELLO, tools=[{"type": "function"}])  # type: ignore
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(model=model, messages=HELLO, max_tokens=100_000)  # type: ignore[arg-type]
        assert caught.value.code == "context_length_exceeded"

    run(tiny_folder(), test)


def test_choices_stop_and_logprobs() -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        asked = {"model": model, "messages": HELLO, "max_tokens": 12, "n": 3, "seed": 5, "logprobs": True}
        more = {"top_logprobs": 2, "extra_body": {"ignore_eos": True}}
        whole = await ai.chat.completions.create(**asked, **more)  # type: ignore[call-overload]
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert whole.usage.completion_tokens == 36
        texts = {0: "", 1: "", 2: ""}
        entries: dict[int, list[str]] = {0: [], 1: [], 2: []}
        async for chunk in await ai.chat.completions.create(**asked, **more, stream=True):  # type: ignore[call-overload]
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.logprobs is not None:
                    entries[choice.index] += [entry.token for entry in choice.logprobs.content]
        for choice in whole.choices:
            assert texts[choice.index] == choice.message.content
            assert entries[choice.index] == [entry.token for entry in choice.logprobs.content]
            assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        stop = whole.choices[0].message.content[4]
        stopped = await ai.chat.completions.create(**asked, **more, stop=stop)  # type: ignore[call-overload]
        first = stopped.choices[0]
        assert first.finish_reason == "stop"
        assert first.message.content == whole.choices[0].message.content.split(stop)[0]

    run(tiny_folder(), test)


def test_text_logprobs_and_echo() -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        asked = {"model": model, "prompt": "The quick brown fox", "max_tokens": 3, "logprobs": 2}
        answer = await ai.completions.create(**asked, echo=True)  # type: ignore[call-overload]
        told = answer.choices[0].logprobs
        assert answer.choices[0].text.startswith("The quick brown fox")
        assert len(told.tokens) == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert told.token_logprobs[0] is None and all(value <= 0 for value in told.token_logprobs[1:])

    run(tiny_folder(), test)


class City(pydantic.BaseModel):
    """What the client asks for and parses by itself."""

    name: Literal["Paris", "Rome", "Bern"]
    size: int = pydantic.Field(ge=1, le=9)
    capital: bool


def test_json_mode_and_json_schema() -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        parsed = await ai.chat.completions.parse(model=model, messages=HELLO, response_format=City, seed=1)  # type: ignore
        assert isinstance(parsed.choices[0].message.parsed, City)
        async with ai.chat.completions.stream(model=model, messages=HELLO, response_format=City, seed=2) as stream:  # type: ignore
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, City)
        several = await ai.chat.completions.create(
            model=model, messages=HELLO, response_format={"type": "json_object"}, n=4, max_tokens=200, seed=3
        )  # type: ignore[call-overload]
        for choice in several.choices:
            assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)

    run(tiny_folder(), test)


def test_a_key() -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        with pytest.raises(openai.AuthenticationError) as caught:
            await ai.models.list()
        assert caught.value.code == "invalid_api_key"
        right = ai.with_options(api_key="sesame")
        assert [item.id async for item in right.models.list()] == [model]

    run(tiny_folder(), test, api_key="sesame")


def test_the_real_model_knows_the_capital_of_france(smollm2: Path) -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        whole = await ai.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=24)  # type: ignore[arg-type]
        assert "Paris" in (whole.choices[0].message.content or "")
        stream = await ai.chat.completions.create(
            model=model, messages=HELLO, temperature=0, max_tokens=24, stream=True
        )  # type: ignore[arg-type]
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(deltas) == whole.choices[0].message.content

        schema = {
            "type": "object",
            "properties": {"capital": {"type": "string", "maxLength": 20}},
            "required": ["capital"],
            "additionalProperties": False,
        }
        answer = await ai.chat.completions.create(
            model=model,
            messages=HELLO,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}},
        )  # type: ignore[call-overload]
        assert json.loads(answer.choices[0].message.content)["capital"] == "Paris"

    run(smollm2, test, threads=2, dtype="auto", kv_blocks=64)
