"""A scripted server on a real socket: what it reads it writes down, what it answers is bytes and delays to the letter.

A script is called with each request and returns its steps: bytes to send, seconds to wait, or CLOSE, RESET, HANG.

    async with Stub(lambda request: [sse_head(), event(content("Hi")), 0.05, event(finish()), DONE]) as stub:
        ... stub.url ... stub.requests

`StubThread` is the same in a thread, for clients that are processes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any


class End(Enum):
    """How a connection ends before its script does."""

    CLOSE = "close"  # an orderly end of the TCP stream
    RESET = "reset"  # RST
    HANG = "hang"  # neither answer nor close, until the stub stops


CLOSE, RESET, HANG = End.CLOSE, End.RESET, End.HANG
Step = bytes | float | End


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came.  t_ns: CLOCK_MONOTONIC when its last byte was read; header names in lower case."""

    number: int
    connection: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    t_ns: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[[Request], Iterable[Step]]


# --- bytes ---
def sse_head(*headers: str, chunked: bool = False, content_type: str = "text/event-stream") -> bytes:
    """The head of a stream; without `chunked` it ends with the connection."""
    how = "transfer-encoding: chunked" if chunked else "connection: close"
    return "\r\n".join(["HTTP/1.1 200 OK", f"content-type: {content_type}", how, *headers, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """One HTTP chunk; b"" is the last."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any, name: str | None = None) -> bytes:
    """One SSE event with JSON data (a str goes out as it is)."""
    data = value if isinstance(value, str) else json.dumps(value)
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


DONE = event("[DONE]")


def delta(finish: str | None = None, usage: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A chat.completion.chunk."""
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    found: dict[str, Any] = {"id": "c1", "object": "chat.completion.chunk", "model": "stub", "choices": [choice]}
    return found if usage is None else {**found, "usage": usage}


def role() -> dict[str, Any]:
    return delta(role="assistant", content="")


def content(text: str) -> dict[str, Any]:
    return delta(content=text)


def finish(reason: str = "stop") -> dict[str, Any]:
    return delta(finish=reason)


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    """The usage chunk of stream_options.include_usage."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **more}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "stub", "choices": [], "usage": counts}


def answer(*texts: str, prompt: int = 5, wait: float = 0.0) -> list[Step]:
    """A whole good answer, chunked and kept alive: role, the texts `wait` s apart, finish, usage, [DONE]."""
    steps: list[Step] = [sse_head(chunked=True), chunk(event(role()))]
    for text in texts:
        steps += [wait, chunk(event(content(text)))] if wait else [chunk(event(content(text)))]
    last = event(finish()) + event(usage(prompt, len(texts))) + DONE
    return [*steps, chunk(last), chunk(b"")]


def plain(status: str, value: Any, *headers: str) -> bytes:
    """A whole answer with a JSON body."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


# --- the server ---
@dataclass
class Stub:
    """Serves `script` on 127.0.0.1 (or `host`) while entered."""

    script: Script
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    lost: list[int] = field(default_factory=list)  # connections that the client ended
    url: str = ""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Stub:
        self._server = await asyncio.start_server(self._serve, self.host, 0, ssl=self.tls, limit=1 << 24)
        port = self._server.sockets[0].getsockname()[1]
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{'https' if self.tls else 'http'}://{name}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = self.connections
        self.connections += 1
        try:
            while (request := await self._read(reader, number)) is not None:
                self.requests.append(request)
                if not await self._play(self.script(request), reader, writer):
                    break
        except ConnectionError:
            self.lost.append(number)
        except asyncio.CancelledError:
            return  # the stub stops
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = first.split(" ")
        return Request(len(self.requests), connection, method, path, headers, body, time.monotonic_ns())

    async def _play(self, steps: Iterable[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Do the steps; true if the connection may carry another request."""
        closing = False
        for step in steps:
            if isinstance(step, bytes):
                closing = closing or b"connection: close" in step
                writer.write(step)
                await writer.drain()
            elif isinstance(step, End):
                if step is HANG:
                    await asyncio.Event().wait()
                if step is RESET:
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    writer.transport.abort()
                return False
            else:
                await asyncio.sleep(step)
        return not closing


class StubThread:
    """A Stub on an event loop of its own in a thread; `url` and `requests` as there."""

    def __init__(self, script: Script) -> None:
        self._stub = Stub(script)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return self._stub.url

    @property
    def requests(self) -> list[Request]:
        return self._stub.requests

    def __enter__(self) -> StubThread:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the stub did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        async with self._stub:
            self._ready.set()
            await self._stop.wait()


def unused_port() -> int:
    """A port of 127.0.0.1 on which nothing listens (it was free a moment ago)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
