"""The official openai client against our server: it must not notice that we are not OpenAI."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
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


def test_the_real_model_knows_the_capital_of_france(smollm2: Path) -> None:
    async def test(ai: openai.AsyncOpenAI, model: str) -> None:
        whole = await ai.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=24)  # type: ignore[arg-type]
        assert "Paris" in (whole.choices[0].message.content or "")
        stream = await ai.chat.completions.create(
            model=model, messages=HELLO, temperature=0, max_tokens=24, stream=True
        )  # type: ignore[arg-type]
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(deltas) == whole.choices[0].message.content

    run(smollm2, test, threads=2, dtype="auto", kv_blocks=64)
