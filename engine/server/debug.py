"""Windows into the engine: the step log as Arrow, and the laws that must hold."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
from aiohttp import web

from engine.server.generate import json_headers
from engine.server.openai_api import bad
from engine.server.responses import dumps
from engine.server.service import SERVICE
from engine.steplog import to_arrow

ARROW_STREAM = "application/vnd.apache.arrow.stream"


async def steps(request: web.Request) -> web.Response:
    """GET /debug/steps?after=N: steps after N (default: all that are kept), an Arrow stream of schema STEPS."""
    service = request.app[SERVICE]
    text = request.query.get("after", "-1")
    try:
        after = int(text)
    except ValueError as error:
        raise bad(f"'after' is {text[:80]!r}; it must be a step number.", "after") from error
    table = to_arrow(service.engine.steps.since(after), service.replica)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return web.Response(body=sink.getvalue().to_pybytes(), content_type=ARROW_STREAM, headers=json_headers(service))


async def invariants(request: web.Request) -> web.Response:
    """GET /debug/invariants: broken laws (exact when idle) and the counts that they are about."""
    service = request.app[SERVICE]
    engine = service.engine
    stats = engine.stats()
    violations = engine.integrity() + service.books.violations()
    body = {
        "ok": not violations,
        "violations": violations,
        "requests": {
            "received": service.books.received,
            "live": service.books.live,
            "outcomes": dict(service.books.outcomes),
        },
        "engine": {item.name: getattr(stats, item.name) for item in dataclasses.fields(stats)},
    }
    return web.Response(body=dumps(body), content_type="application/json", headers=json_headers(service))
