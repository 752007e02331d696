"""One server process: bind, load, warm up, be ready; on a signal drain, then stop.

What must hold: the port is bound before the model is loaded (a taken port is found at once, /health/live answers
while it loads); ready only when the engine is warm; after the first SIGTERM or SIGINT no new request is taken, and
those in flight may finish within a limit; a second one ends them now.  A drained server exits with 0.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from engine.config import EngineConfig
from engine.server.app import build_app
from engine.server.generate import StampedRequest
from engine.server.metrics import Metrics
from engine.server.service import SERVICE, Limits, Service, State
from engine.structured import Grammars
from models.errors import UserError
from telemetry import names

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from engine.core import Engine
    from engine.server.tracing import RequestTracer
    from telemetry.spans import SpanProvider

log = logging.getLogger("tailspan.server")

LAG_PERIOD_S: Final = 0.05
FOLD_EVERY: Final = 40  # lag periods; the step log keeps far more steps than 2 s can hold
ABORT_GRACE_S: Final = 2.0  # for the last bytes after everything in flight was aborted


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``tailspan serve`` was asked.  otlp_endpoint None: no spans.  replica None: host:port."""

    config: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    replica: str | None = None
    otlp_endpoint: str | None = None
    limits: Limits = field(default_factory=Limits)
    ready_file: Path | None = None
    api_key: str | None = field(default=None, repr=False)  # what clients must send; None: anyone may ask
    enable_faults: bool = False


class Server:
    """Opens, loads, drains and closes, in this order; for ``serve`` and for tests."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.url = ""
        self._socket: socket.socket | None = None
        self._service: Service | None = None
        self._runner: _Runner | None = None
        self._provider: SpanProvider | None = None
        self._tracer: RequestTracer | None = None
        self._engine: Engine | None = None
        self._metrics: Metrics | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def service(self) -> Service:
        """What the handlers share; the server must be open."""
        if self._service is None:
            raise RuntimeError("the server is not open")
        return self._service

    async def open(self) -> None:
        """Bind and answer: live, not ready.  Raises UserError when the port cannot be had."""
        options = self.options
        if options.enable_faults and not loopback(options.host):
            raise UserError(
                f"{options.host} can be reached from other machines, where faults must not be",
                where="--enable-faults",
                remedy="listen on 127.0.0.1, ::1 or localhost",
            )
        self._socket = bind(options.host, options.port)
        port = self._socket.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"http://{host}:{port}"
        replica = options.replica or f"{host}:{port}"
        self._tracer = self._make_tracer(options, replica, port) if options.otlp_endpoint else None
        self._service = Service(asyncio.get_running_loop(), replica, options.limits, self._tracer)
        if options.api_key is not None:
            self._service.lock(options.api_key)
        self._runner = _Runner(
            build_app(self._service, faults=options.enable_faults),
            handler_cancellation=True,  # a lost connection cancels its handler, which aborts in the engine
            access_log=None,
            shutdown_timeout=ABORT_GRACE_S,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket, backlog=1024).start()

    def _make_tracer(self, options: ServeOptions, replica: str, port: int) -> RequestTracer:
        from engine.server.tracing import RequestTracer
        from telemetry.spans import tracer_provider

        attributes = {"service.instance.id": replica, names.ATTR_SEMCONV: names.SEMCONV_VERSION}
        self._provider = tracer_provider(names.ENGINE_SERVICE, options.otlp_endpoint or "", 1.0, attributes)
        fixed: dict[str, AttributeValue] = {
            names.ATTR_PROVIDER: "tailspan",
            names.ATTR_SERVER_ADDRESS: options.host,
            names.ATTR_SERVER_PORT: port,
            names.ATTR_REPLICA: replica,
        }
        return RequestTracer(self._provider.get_tracer("tailspan"), fixed)

    async def load(self) -> None:
        """Load the model, warm the engine up, start it; then ready.  Raises UserError."""
        engine = await _on_thread(partial(load_engine, self.options.config), "load")
        grammars = Grammars(engine.model.tokenizer, engine.model.shape)
        if engine.has_logits:  # what computes nothing refuses grammars
            await _on_thread(grammars.prepare, "grammars")
        if engine.simulated is not None and self._tracer is not None:
            self._tracer.label({names.ATTR_SIMULATED: engine.simulated})
        provider, books = self._provider, self.service.books
        dropped = lambda: provider.dropped if provider else 0  # noqa: E731
        metrics = Metrics(engine, self.service.replica, package_version(), dropped, books)
        faults = None
        if self.options.enable_faults:
            from engine.faults import Faults

            faults = Faults(engine)
        engine.start()
        self._engine, self._metrics = engine, metrics
        self.service.attach(engine, metrics, grammars, faults)
        self._watch = asyncio.get_running_loop().create_task(_watch_loop(metrics))
        if self.options.ready_file is not None:
            write_ready_file(self.options.ready_file, self.url)

    def describe(self) -> str:
        """One line: what is served, how, where."""
        engine = self.service.engine
        dtype = str(getattr(engine.runner, "dtype", "")).removeprefix("torch.")
        threads = getattr(engine.runner, "threads", 0)
        kv = engine.pool.total * engine.pool.size
        what = f"{dtype}, {threads} threads, context {engine.max_context}, KV for {kv} tokens"
        if engine.simulated is not None:
            what = f"SIMULATED: {engine.simulated}; context {engine.max_context}, KV for {kv} tokens"
        return f"serving {engine.model.name} ({what}) at {self.url}"

    async def drain(self, hurry: asyncio.Event) -> None:
        """Take nothing new; wait until all in flight are over, the limit is reached or ``hurry`` is set."""
        service = self.service
        service.state = State.DRAINING
        waits = [asyncio.ensure_future(service.idle.wait()), asyncio.ensure_future(hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=service.limits.drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._engine is not None and service.live:
            log.warning("%d requests are still in flight: aborting them", len(service.live))
            for exchange in tuple(service.live):
                exchange.stop_engine()

    async def close(self) -> None:
        """Stop everything; what is still in flight is aborted.  Idempotent."""
        if self._service is not None:
            self._service.state = State.DRAINING
            if self._service.faults is not None:
                self._service.faults.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._engine is not None:
            await _on_thread(self._engine.stop, "stop")
        if self._service is not None:
            self._service.hop.close()
            self._service.threads.shutdown(wait=False, cancel_futures=True)
            if self._service.live:
                log.error("%d requests were never closed", len(self._service.live))
        if self._metrics is not None:
            self._metrics.close()
        if self._provider is not None:
            await _on_thread(self._provider.close, "spans")
        if self._socket is not None:
            self._socket.close()


def serve(options: ServeOptions, say: Callable[[str], None]) -> int:
    """Run a server until a signal ends it; ``say`` prints a line.  Returns the exit code.  Raises UserError."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(options, say))


async def _serve(options: ServeOptions, say: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = Server(options)
    try:
        await server.open()
        loading, stopped = asyncio.ensure_future(server.load()), asyncio.ensure_future(stop.wait())
        await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # raises what went wrong
            say(server.describe())
            await stopped
            say("stopping: no new requests, those in flight may finish")
            await server.drain(hurry)
        else:
            loading.cancel()  # its thread is a daemon: nothing waits for it
        stopped.cancel()
    finally:
        await server.close()
        if options.ready_file is not None and options.ready_file.is_file():
            options.ready_file.unlink()
    return names.EXIT_INTERRUPTED if hurry.is_set() else names.EXIT_OK


def load_engine(config: EngineConfig) -> Engine:
    """Model and engine, warm, not started.  Seconds of work; imports torch."""
    from engine.backends import build, open_model

    return build(config, open_model(config))  # a model that cannot be had is found before torch is imported


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.  Raises UserError with the remedy."""
    where = f"{host}:{port}"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen: {reason}", where=where, remedy="name another --host or --port; --port 0 takes any free one"
        ) from error


def loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def write_ready_file(path: Path, url: str) -> None:
    """{"url", "pid"}, whole or not at all.  Raises UserError when it cannot be written."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write the ready file: {error.strerror}",
            where=str(path),
            remedy="name a path in a folder that exists",
        ) from error


def package_version() -> str:
    """Version of the installed package, ``source`` when it runs from a checkout."""
    try:
        return version("tailspan")
    except PackageNotFoundError:
        return "source"


class _Runner(web.AppRunner):
    """An AppRunner whose requests are stamped when their head was read."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        loop, limit = asyncio.get_running_loop(), self.app[SERVICE].limits.body

        def make(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> StampedRequest:
            return StampedRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)

        server.request_factory = make
        return server


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not built for this platform: the standard loop does the same, slower
        return None
    return uvloop.new_event_loop


async def _watch_loop(metrics: Metrics) -> None:
    """Measure how late the event loop runs, and count engine steps before the log's ring turns."""
    loop, turn = asyncio.get_running_loop(), 0
    while True:
        due = loop.time() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        metrics.loop_lag(loop.time() - due)
        turn += 1
        if turn % FOLD_EVERY == 0:
            metrics.fold_steps()


async def _on_thread(call: Callable[[], Any], name: str) -> Any:
    """Run ``call`` on a daemon thread of its own: unlike a pool's, it does not hold up the exit of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
