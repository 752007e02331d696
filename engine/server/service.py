"""What the handlers share: the engine once it is up, the state of the server, the exchanges in flight.

What must hold: requests are taken only while ``state`` is READY; from DRAINING on there is no way back.  Everything
here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from aiohttp import web

from engine.server.api_key import ApiKey
from engine.server.exchange import Books, Exchange, Reporter
from engine.server.openai_api import ApiError
from engine.server.responses import Voice
from engine.server.stream import Hop
from engine.structured import Grammars
from telemetry import names

if TYPE_CHECKING:
    from engine.core import Engine
    from engine.faults import Faults
    from engine.server.metrics import Metrics
    from engine.server.tracing import RequestTracer

BODY_LIMIT: Final = 4 * 1024 * 1024
STREAM_LIMIT: Final = 1024 * 1024
LOAD_RETRY_S: Final = 5  # Retry-After while the model loads; a restart takes about that long


class State(StrEnum):
    """Life of a server; it only moves forward."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Limits:
    """body: bytes of a request; drain_s: how long requests in flight may go on after a stop.

    stream: bytes of a streamed answer that may wait for its reader; above it the stream is dropped.
    """

    body: int = BODY_LIMIT
    drain_s: float = 10.0
    stream: int = STREAM_LIMIT


class Service:
    """One server around one engine."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, replica: str, limits: Limits, tracer: RequestTracer | None
    ) -> None:
        self.replica, self.limits = replica, limits
        self.state = State.LOADING
        self.hop = Hop(loop)
        self.books = Books()
        self.live: set[Exchange] = set()
        self.idle = asyncio.Event()  # no exchange is live
        self.idle.set()
        self.started_unix = int(time.time())
        self.threads = ThreadPoolExecutor(2, "server")  # long prompts, scrapes: what would hold up the loop
        self._tracer = tracer
        self._key: ApiKey | None = None
        self._engine: Engine | None = None
        self._grammars: Grammars | None = None
        self.metrics: Metrics | None = None
        self.faults: Faults | None = None

    def attach(self, engine: Engine, metrics: Metrics, grammars: Grammars, faults: Faults | None = None) -> None:
        """The engine is warm and started: take requests (unless a stop came first)."""
        self._engine, self.metrics, self._grammars, self.faults = engine, metrics, grammars, faults
        if self.state is State.LOADING:
            self.state = State.READY

    def lock(self, key: str) -> None:
        """Serve only those who bring this key."""
        self._key = ApiKey(key)

    def check_key(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError 401 for a request without the key, where there is one."""
        if self._key is not None:
            self._key.check(headers)

    @property
    def engine(self) -> Engine:
        """The engine.  Raises ApiError 503 while there is none."""
        if self._engine is None:
            raise unavailable(self.state)
        return self._engine

    @property
    def simulated(self) -> str | None:
        """What is simulated; None while nothing is loaded, or when steps are computed."""
        return self._engine.simulated if self._engine is not None else None

    @property
    def grammars(self) -> Grammars:
        """Grammars of its model.  Raises ApiError 503 while there is none."""
        if self._grammars is None:
            raise unavailable(self.state)
        return self._grammars

    def ready_engine(self) -> Engine:
        """The engine, for a new request.  Raises ApiError 503, and counts it, when no more are taken."""
        if self.state is not State.READY:
            self.books.turned_away(names.REJECT_DRAINING if self.state is State.DRAINING else names.REJECT_LOADING)
            raise unavailable(self.state, self._emptied_s())
        return self.engine

    def _emptied_s(self) -> float:
        """Seconds that a drain still takes at most, as predicted from the backlog."""
        if self._engine is None or self.state is not State.DRAINING:
            return 0.0
        return min(self._engine.backlog_s(), self.limits.drain_s)

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: which weights, tokenizer and template answer, or that nothing was computed."""
        shas, kind = self.engine.model.shas, "fp_" if self.engine.simulated is None else "simulated_"
        return kind + "".join(shas.get(part, "")[:4] for part in ("model", "tokenizer", "template"))

    def open(self, head_ns: int, headers: Mapping[str, str], *, chat: bool) -> Exchange:
        """Begin an exchange: it has a span and a place in the books from here on."""
        request_id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        span = self._tracer.open(head_ns, headers, chat=chat) if self._tracer is not None else None
        reporter = Reporter(self.books, self._tracer, self.metrics, self._engine)
        exchange = Exchange(request_id, head_ns, reporter, span, self._closed)
        self.live.add(exchange)
        self.idle.clear()
        return exchange

    def _closed(self, exchange: Exchange) -> None:
        self.live.discard(exchange)
        if not self.live:
            self.idle.set()

    def voice(self, exchange: Exchange, *, chat: bool) -> Voice:
        """What every frame of its answer repeats."""
        return Voice(chat, exchange.id, int(time.time()), self.engine.model.name, self.fingerprint)


def unavailable(state: State, emptied_s: float = 0.0) -> ApiError:
    """The 503 of a server that loads or drains; emptied_s: until the drain is over and a new one may load."""
    if state is State.DRAINING:
        after = LOAD_RETRY_S + math.ceil(emptied_s)
        return ApiError(
            503, "The server is shutting down.", kind="server_error", code="shutting_down", retry_after=after
        )
    return ApiError(503, "The model is still loading.", kind="server_error", code="not_ready", retry_after=LOAD_RETRY_S)


SERVICE: Final = web.AppKey("service", Service)
