"""Token rates of an OpenAI-compatible server, over HTTP: one prompt's prefill, and decoding at a fixed batch."""

from __future__ import annotations

import asyncio
import json
import random
import time

import aiohttp


async def prefill_rate(url: str, model: str, tokens: int) -> float:
    """Prompt tokens per second of one fresh prompt: from sending the request to the end of a one-token answer."""
    body = {"model": model, "prompt": _prompt(tokens), "max_tokens": 1, "temperature": 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        start = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            took = time.perf_counter() - start
    if answer["usage"]["prompt_tokens"] != tokens:
        raise RuntimeError(f"{url} counts {answer['usage']['prompt_tokens']} tokens in a prompt of {tokens}")
    return tokens / took


async def decode_rate(url: str, model: str, batch: int, context: int, tokens: int) -> float:
    """Tokens per second of ``batch`` streams while all of them decode.

    Counted from the last stream's first chunk to the first stream's last one; a chunk stands for as many tokens as
    the stream has in the mean, since a server may hold half a character back.
    """
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=900), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        streams = await asyncio.gather(*(_stream(session, url, model, context, tokens) for _ in range(batch)))
    begin, end = max(times[0] for times, _ in streams), min(times[-1] for times, _ in streams)
    if end <= begin:
        raise RuntimeError(f"{batch} streams of {tokens} tokens never decoded together: ask for more tokens")
    counted = sum(sum(begin < t <= end for t in times) * made / len(times) for times, made in streams)
    return counted / (end - begin)


async def _stream(
    session: aiohttp.ClientSession, url: str, model: str, context: int, tokens: int
) -> tuple[list[float], int]:
    body = {
        "model": model,
        "prompt": _prompt(context),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times, made = [], 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for raw in response.content:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            made = (chunk.get("usage") or {}).get("completion_tokens", made)
            if chunk.get("choices") and chunk["choices"][0].get("text"):
                times.append(time.perf_counter())
    return times, made


def _prompt(tokens: int) -> list[int]:
    return [random.randrange(300, 20_000) for _ in range(tokens)]
