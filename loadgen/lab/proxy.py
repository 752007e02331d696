"""A fault proxy: in front of any OpenAI-compatible servers it delays, rejects, cuts, resets, truncates or duplicates.

    client ── proxy ──► server, or several in turn (one of which may be slow)

Only generating requests (POST below /v1) meet a fault; health, models and metrics pass as they are.  Which requests are
met follows from the seed and their number alone.  Must always hold: what it does not touch it passes byte for byte; it
tells nobody: no header, no log line of a request, no metric.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import aiohttp
from aiohttp import web

from loadgen.lab.wire import hits
from models.errors import UserError

LIMIT: Final = 64 << 20  # bytes of a request
_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "content-length", "host"})
_FRAME: Final = b"\n\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """what it does; what its size is, and the size's bounds."""

    what: str
    unit: str
    size: float
    low: float
    high: float


KINDS: Final = {
    "delay": Kind("the answer begins later", "seconds", 0.2, 0.0, 3600.0),
    "slow": Kind("every frame of the answer comes later", "seconds a frame", 0.05, 0.0, 60.0),
    "reject": Kind("429 with Retry-After, the server never sees it", "seconds in Retry-After", 1.0, 0.0, 3600.0),
    "cut": Kind("the connection is closed in mid-stream", "frames of text before", 3, 0, 1e6),
    "reset": Kind("the connection is reset in mid-stream", "frames of text before", 3, 0, 1e6),
    "truncate": Kind("the message ends in order, its tail is missing", "frames of text before", 3, 0, 1e6),
    "duplicate": Kind("one frame of text comes twice", "frames of text before", 3, 0, 1e6),
}


@dataclass(frozen=True, slots=True)
class ProxyFault:
    """One fault in force.  share: of the requests.  replica: only for this upstream (0-based); None: for all."""

    kind: str
    share: float = 1.0
    size: float = 0.0
    seed: int = 0
    replica: int | None = None


def make(
    kind: str, share: float = 1.0, size: float | None = None, seed: int = 0, replica: int | None = None
) -> ProxyFault:
    """A checked fault.  Raises UserError that names the value."""
    known = KINDS.get(kind)
    if known is None:
        raise UserError(f"no fault of the proxy is called {kind!r}", remedy=f"one of {', '.join(KINDS)}")
    size = known.size if size is None else size
    if not known.low <= size <= known.high:
        raise UserError(f"size {size:g} of {kind}", remedy=f"give {known.low:g} to {known.high:g} {known.unit}")
    if not 0 <= share <= 1:
        raise UserError(f"share {share:g} of {kind}", remedy="give 0 to 1")
    return ProxyFault(kind, share, size, seed, replica)


class Proxy:
    """Serves on 127.0.0.1 while entered.  ``faults`` may be replaced at any time; it concerns later requests.

    upstreams: base URLs, asked in turn.  port 0: any free one.
    """

    def __init__(self, upstreams: list[str], faults: tuple[ProxyFault, ...] = (), port: int = 0) -> None:
        self.upstreams, self.faults, self._port = upstreams, faults, port
        self.url = ""
        self._count = 0
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Proxy:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=LIMIT)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, "127.0.0.1", self._port)
            await site.start()
        except OSError as error:
            await self.__aexit__()
            problem = f"cannot listen on port {self._port}: {error.strerror}"
            raise UserError(problem, remedy="name a free port") from None
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        generating = request.method == "POST" and request.path.startswith("/v1/")
        number = self._count
        self._count += generating
        replica = number % len(self.upstreams) if generating else 0
        met = {
            one.kind: one
            for one in self.faults
            if generating and one.replica in (None, replica) and hits(one.seed, one.kind, number, one.share)
        }
        if (fault := met.get("reject")) is not None:
            refusal = {"error": {"message": "Too many requests", "type": "rate_limit_error", "code": 429}}
            return web.json_response(refusal, status=429, headers={"Retry-After": f"{fault.size:g}"})
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        try:
            async with self._session.request(
                request.method, self.upstreams[replica] + request.raw_path, data=body or None, headers=headers
            ) as upstream:
                return await self._pass(request, upstream, met)
        except aiohttp.ClientError:
            self._reset(request)
            return web.Response(status=502)

    async def _pass(
        self, request: web.Request, upstream: aiohttp.ClientResponse, met: dict[str, ProxyFault]
    ) -> web.StreamResponse:
        answer = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        for name, value in upstream.headers.items():
            if name.lower() not in _HOP:
                answer.headers.add(name, value)
        if (fault := met.get("delay")) is not None:
            await asyncio.sleep(fault.size)
        await answer.prepare(request)
        if not upstream.headers.get("content-type", "").startswith("text/event-stream"):
            async for data in upstream.content.iter_any():
                await answer.write(data)
            await answer.write_eof()
            return answer
        text = -1  # the first frame is the role's
        async for frame in _frames(upstream):
            if (fault := met.get("slow")) is not None:
                await asyncio.sleep(fault.size)
            await answer.write(frame)
            text += 1
            if (fault := met.get("duplicate")) is not None and text == round(fault.size):
                await answer.write(frame)
            for kind in ("cut", "reset", "truncate"):
                if (fault := met.get(kind)) is None or text < fault.size:
                    continue
                if kind == "truncate":
                    await answer.write_eof()
                elif kind == "reset":
                    self._reset(request)
                elif request.transport is not None:
                    request.transport.close()
                return answer
        await answer.write_eof()
        return answer

    @staticmethod
    def _reset(request: web.Request) -> None:
        transport = request.transport
        if transport is None:
            return
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


async def _frames(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """SSE frames with their blank line, as they come; what is left at the end is the last."""
    held = b""
    async for data in upstream.content.iter_any():
        held += data
        *whole, held = held.split(_FRAME)
        for frame in whole:
            yield frame + _FRAME
    if held:
        yield held


def parse(text: str, seed: int = 0, replica: int | None = None) -> ProxyFault:
    """A fault from "KIND", "KIND:SHARE" or "KIND:SHARE:SIZE".  Raises UserError."""
    kind, *numbers = text.split(":")
    try:
        values = [float(one) for one in numbers]
    except ValueError:
        values = [0.0] * 3
    if len(values) > 2:
        raise UserError(f"{text!r} is no fault", where="--fault", remedy="write KIND, KIND:SHARE or KIND:SHARE:SIZE")
    share = values[0] if values else 1.0
    return make(kind, share, values[1] if len(values) > 1 else None, seed, replica)
