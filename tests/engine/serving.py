"""A real server around a real engine, inside the test's event loop, and a gate that holds the engine between steps."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from engine.config import EngineConfig
from engine.server.lifecycle import ServeOptions, Server
from engine.server.service import Limits

WAIT_S = 30.0
_TEMPORARY = tempfile.TemporaryDirectory(prefix="tailspan-tests-")  # goes with the process


@cache
def tiny_folder() -> Path:
    """A tiny random Llama named ``tiny`` with a context of 2048."""
    from models.tiny import write_tiny

    return write_tiny(Path(_TEMPORARY.name) / "tiny", max_context=2048)


@asynccontextmanager
async def serving(
    *,
    folder: Path | None = None,
    otlp: str | None = None,
    limits: Limits | None = None,
    replica: str | None = "r1",
    api_key: str | None = None,
    faults: bool = False,
    host: str = "127.0.0.1",
    **config: Any,
) -> AsyncIterator[Server]:
    """A ready server on a free port; closed at the end."""
    settings: dict[str, Any] = {"threads": 1, "kv_blocks": 256, "dtype": "fp32", **config}
    options = ServeOptions(
        EngineConfig(model=str(folder or tiny_folder()), **settings),
        host=host,
        port=0,
        replica=replica,
        otlp_endpoint=otlp,
        limits=limits or Limits(),
        api_key=api_key,
        enable_faults=faults,
    )
    server = Server(options)
    try:
        await server.open()
        await server.load()
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose paths are relative to the server."""
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come true; fails loudly when it does not."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)
    assert condition(), what


class Gate:
    """Stands before the real runner: a step is computed only when it is let through."""

    def __init__(self, server: Server) -> None:
        engine = server.service.engine
        self._inner, self._permits = engine.runner, threading.Semaphore(0)
        self.kv_blocks, self.max_context = self._inner.kv_blocks, self._inner.max_context
        self.waiting = 0  # steps that stand at the gate or went through
        self._engine = engine
        engine.runner = self

    def forward(self, slices: Sequence[Any]) -> Any:
        """The runner's method."""
        self.waiting += 1
        if not self._permits.acquire(timeout=WAIT_S):
            raise RuntimeError("the gate was never opened")
        return self._inner.forward(slices)

    async def step(self, n: int = 1) -> None:
        """Let ``n`` steps through, and wait until they are done and the next stands at the gate."""
        for _ in range(n):
            at = self.waiting
            self._permits.release()
            await until(lambda at=at: self.waiting > at, "the next step")  # type: ignore[misc]

    async def arrived(self) -> None:
        """Wait until a first step stands at the gate."""
        await until(lambda: self.waiting > 0, "a step at the gate")

    def open(self) -> None:
        """No gate any more."""
        self._engine.runner = self._inner
        self._permits.release(10)


@dataclass
class Stream:
    """What came over SSE, frame by frame, in order."""

    frames: list[tuple[str, Any]] = field(default_factory=list)  # event name ("" for data alone), JSON or "[DONE]"

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """OpenAI's chunks."""
        return [data for event, data in self.frames if event == "" and data != "[DONE]"]

    @property
    def text(self) -> str:
        """Deltas joined."""
        parts = []
        for chunk in self.chunks:
            for choice in chunk.get("choices", []):
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(parts)

    @property
    def account(self) -> dict[str, Any]:
        """The phase account."""
        return next(data["tailspan"] for event, data in self.frames if event == "tailspan.phases")


async def read_stream(response: aiohttp.ClientResponse) -> Stream:
    """Read to the end."""
    return parse_stream((await response.read()).decode())


def parse_stream(text: str) -> Stream:
    """Frames of a whole SSE body."""
    stream = Stream()
    for block in text.split("\n\n"):
        event, data = "", None
        for line in block.split("\n"):
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
        if data is not None:
            stream.frames.append((event, data if data == "[DONE]" else json.loads(data)))
    return stream
