"""Windows into the engine: the step log as Arrow, the laws that must hold, the answers that differ when alone."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Final

from aiohttp import web

from engine.server.generate import json_headers
from engine.server.openai_api import ApiError, bad
from engine.server.responses import dumps
from engine.server.service import SERVICE
from engine.step_profile import Profiler
from engine.steplog import to_arrow

CHECK_S: Final = 2.0  # a longer step is not waited for
PROFILE_S: Final = 30.0  # steps that do not come in this time are not waited for
PROFILE_STEPS: Final = 1000
ARROW_STREAM = "application/vnd.apache.arrow.stream"


async def steps(request: web.Request) -> web.Response:
    """GET /debug/steps?after=N&newest=M: steps after N (default: all that are kept), at most the M newest of them.

    An Arrow stream of schema STEPS.
    """
    try:
        import pyarrow as pa  # only where steps are asked for: a server runs without it
    except ImportError as error:
        message = "The step log is sent as Arrow, and pyarrow is not installed beside this server."
        raise ApiError(501, message, kind="server_error", code="not_installed") from error

    service = request.app[SERVICE]
    text = request.query.get("after", "-1")
    try:
        after = int(text)
    except ValueError as error:
        raise bad(f"'after' is {text[:80]!r}; it must be a step number.", "after") from error
    most = request.query.get("newest", "")
    if most and not (most.isdecimal() and 0 < int(most) < 1 << 31):
        raise bad(f"'newest' is {most[:80]!r}; it must be a number of steps.", "newest")
    records = service.engine.steps.since(after)
    if most:
        records = records[-int(most) :]
    table = to_arrow(records, service.replica, simulated=service.simulated is not None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return web.Response(body=sink.getvalue().to_pybytes(), content_type=ARROW_STREAM, headers=json_headers(service))


async def invariants(request: web.Request) -> web.Response:
    """GET /debug/invariants: check the laws between two steps; what is broken, and the counts that they are about.

    exact: false when the engine did not come to it in time (a long step, a hang); then it is what the last check found.
    """
    service = request.app[SERVICE]
    engine = service.engine
    exact = True
    try:
        found = await asyncio.wait_for(asyncio.wrap_future(engine.call(engine.check)), CHECK_S)
    except TimeoutError:
        exact, found = False, engine.laws.last
    stats, books, laws = engine.stats(), service.books.read(), engine.laws
    violations = [*found, *books.violations()]
    body = {
        "ok": not violations,
        "exact": exact,
        "violations": violations,
        "checks": {"made": laws.checks, "violations": laws.violations, "every": laws.every, "first": laws.first},
        "requests": {"received": books.received, "live": books.live, "outcomes": dict(books.outcomes)},
        "engine": {item.name: getattr(stats, item.name) for item in dataclasses.fields(stats)},
    }
    return web.Response(body=dumps(body), content_type="application/json", headers=json_headers(service))


async def divergences(request: web.Request) -> web.Response:
    """GET /debug/divergences: what shadow mode compared and found, newest last."""
    service = request.app[SERVICE]
    shadow = service.engine.shadow
    body = {
        "share": shadow.share if shadow else 0.0,
        "compared": shadow.compared if shadow else 0,
        "diverged": shadow.diverged if shadow else 0,
        "forgotten": shadow.forgotten if shadow else 0,
        "divergences": [dataclasses.asdict(found) for found in tuple(shadow.divergences)] if shadow else [],
    }
    return web.Response(body=dumps(body), content_type="application/json", headers=json_headers(service))


async def profile(request: web.Request) -> web.Response:
    """GET /debug/profile?steps=N: time by kernel of the next N steps (default 10), each with its number in the log.

    complete: false when fewer steps came within half a minute.  Profiled steps run without CUDA graphs.
    """
    service = request.app[SERVICE]
    engine = service.engine
    text = request.query.get("steps", "10")
    if not text.isdecimal() or not 1 <= int(text) <= PROFILE_STEPS:
        raise bad(f"'steps' is {text[:80]!r}; it must be a number from 1 to {PROFILE_STEPS}.", "steps")
    wanted = int(text)
    if isinstance(engine.runner, Profiler):
        raise bad("another profile is being taken; wait for its end.", "steps")
    profiler = await asyncio.wrap_future(engine.call(lambda: Profiler(engine, wanted)))
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(profiler.done)), PROFILE_S)
    except TimeoutError:
        await asyncio.wrap_future(engine.call(profiler.leave))
    found = profiler.done.result()
    body = {
        "complete": len(found) == wanted,
        "runner": profiler.name,
        "steps": [dataclasses.asdict(one) for one in found],
    }
    return web.Response(body=dumps(body), content_type="application/json", headers=json_headers(service))
