"""``/debug/faults``: which faults are in force, put one in force, take it out.  There only with ``--enable-faults``."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from aiohttp import web

from engine.faults import KINDS, make
from engine.server.generate import json_headers
from engine.server.openai_api import bad, parse_json
from engine.server.responses import dumps
from engine.server.service import SERVICE, Service
from models.errors import UserError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from engine.faults import Faults

APPLY_S: Final = 60.0  # packing other weights takes seconds


async def show(request: web.Request) -> web.Response:
    """GET: the faults in force, and all that there are."""
    service = request.app[SERVICE]
    return _state(service, _faults(service))


async def put(request: web.Request) -> web.Response:
    """PUT {"name", "share", "size", "seed", "every_s"}: in force when this is answered."""
    service = request.app[SERVICE]
    faults = _faults(service)
    try:
        await _applied(faults.set(make(parse_json(await request.read()))))
    except UserError as error:
        raise bad(str(error), error.where) from error
    return _state(service, faults)


async def delete(request: web.Request) -> web.Response:
    """DELETE ?name=: out of force when this is answered; without a name all of them."""
    service = request.app[SERVICE]
    faults, name = _faults(service), request.query.get("name")
    if name is not None and name not in KINDS:
        raise bad(f"No fault is called '{name[:80]}'.", "name")
    # a frozen scheduler first: the others wait for the engine thread
    for one in sorted(faults.active, key=lambda one: one != "frozen_scheduler") if name is None else [name]:
        await _applied(faults.clear(one))
    return _state(service, faults)


async def _applied(done: Future[None]) -> None:
    await asyncio.wait_for(asyncio.wrap_future(done), APPLY_S)


def _faults(service: Service) -> Faults:
    if service.faults is None:
        service.ready_engine()
        raise RuntimeError("the route exists, so the faults must")
    return service.faults


def _state(service: Service, faults: Faults) -> web.Response:
    body = {
        "active": [asdict(fault) for fault in faults.active.values()],
        "known": {
            name: {"what": kind.what, "share_of": kind.of or None, "size": kind.size, "unit": kind.unit}
            for name, kind in KINDS.items()
        },
    }
    return web.Response(body=dumps(body), content_type="application/json", headers=json_headers(service))
