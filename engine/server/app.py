"""The routes of the server, and the shape of its errors: JSON in OpenAI's form, whatever went wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from engine.server import debug
from engine.server.answer import json_headers
from engine.server.api_key import OPEN
from engine.server.generate import (
    chat_completions,
    check_model,
    completions,
    internal_error,
    prompt_ids,
    too_large,
)
from engine.server.openai_api import ApiError, bad, parse_detokenize, parse_json, parse_tokenize
from engine.server.openapi import describe
from engine.server.responses import dumps
from engine.server.service import SERVICE, Service, State, unavailable
from telemetry import names

log = logging.getLogger("tailspan.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SELF_CHECKED: Final = (chat_completions, completions)  # they check the key inside the exchange: a 401 has its span too


def build_app(service: Service, *, faults: bool = False) -> web.Application:
    """The application; whoever runs it must let aiohttp cancel the handler of a lost connection."""
    app = web.Application(client_max_size=service.limits.body, middlewares=[_errors])
    app[SERVICE] = service
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{model}", one_model)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/health", ready)
    app.router.add_get("/health/live", live)
    app.router.add_get("/health/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/debug/steps", debug.steps)
    app.router.add_get("/debug/invariants", debug.invariants)
    app.router.add_get("/debug/divergences", debug.divergences)
    app.router.add_get("/debug/profile", debug.profile)
    if faults:
        from engine.server import faults as injection

        app.router.add_get("/debug/faults", injection.show)
        app.router.add_put("/debug/faults", injection.put)
        app.router.add_delete("/debug/faults", injection.delete)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves as JSON; one that nobody foresaw is a 500 that says so and a traceback in the log."""
    try:
        if request.path not in OPEN and request.match_info.handler not in SELF_CHECKED:
            request.app[SERVICE].check_key(request.headers)
        return await handler(request)
    except ApiError as error:
        return _error(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}"
        answer = _error(request, ApiError(error.status, message, code="not_found" if error.status == 404 else None))
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error(request, internal_error())


def _error(request: web.Request, error: ApiError) -> web.Response:
    headers = json_headers(request.app[SERVICE], error=error)
    return web.Response(status=error.status, body=dumps(error.body()), content_type="application/json", headers=headers)


def _json(service: Service, body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=dumps(body), content_type="application/json", headers=json_headers(service))


def _label(service: Service) -> dict[str, object]:
    """What a simulated model says beside everything; of a real one nothing."""
    return {names.SIMULATED_KEY: service.simulated} if service.simulated is not None else {}


def _model_card(service: Service) -> dict[str, object]:
    engine = service.engine
    return {
        "id": engine.model.name,
        "object": "model",
        "created": service.started_unix,
        "owned_by": "tailspan",
        "max_model_len": engine.max_context,
        **_label(service),
    }


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    service = request.app[SERVICE]
    return _json(service, {"object": "list", "data": [_model_card(service)]})


async def one_model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}."""
    service = request.app[SERVICE]
    check_model(service, request.match_info["model"])
    return _json(service, _model_card(service))


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: {"prompt"} or {"messages"} -> {"count", "max_model_len", "tokens"} (vLLM's shape)."""
    service = request.app[SERVICE]
    engine = service.engine
    call = parse_tokenize(await _body(request))
    if call.model is not None:
        check_model(service, call.model)
    generate, special = call.add_generation_prompt, call.add_special_tokens
    ids = await prompt_ids(service, call.messages, call.prompt, generate=generate, special=special)
    return _json(service, {"count": len(ids), "max_model_len": engine.max_context, "tokens": ids})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: {"tokens"} -> {"prompt"} (vLLM's shape), special tokens spelled out."""
    service = request.app[SERVICE]
    model = service.engine.model
    call = parse_detokenize(await _body(request))
    if call.model is not None:
        check_model(service, call.model)
    if call.tokens and max(call.tokens) >= model.shape.vocab:
        highest = model.shape.vocab - 1
        raise bad(f"'tokens' holds {max(call.tokens)}, but the vocabulary ends at {highest}.", "tokens")
    return _json(service, {"prompt": model.tokenizer.decode(list(call.tokens), skip_special=False)})


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        return parse_json(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large(request.app[SERVICE]) from error


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: what this server accepts and answers."""
    service = request.app[SERVICE]
    model = service.engine.model
    return _json(service, describe(model.name, model.shape.vocab))


async def live(request: web.Request) -> web.Response:
    """GET /health/live: the process runs and its event loop turns."""
    service = request.app[SERVICE]
    return _json(service, {"status": "live", "state": service.state, **_label(service)})


async def ready(request: web.Request) -> web.Response:
    """GET /health/ready (and /health): 200 while new requests are taken, else 503."""
    service = request.app[SERVICE]
    if service.state is not State.READY:
        raise unavailable(service.state)
    return _json(service, {"status": "ready", "model": service.engine.model.name, **_label(service)})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: Prometheus text, or OpenMetrics with exemplars where the Accept header asks for it."""
    service = request.app[SERVICE]
    if service.metrics is None:
        raise unavailable(service.state)
    service.metrics.fold_steps()
    accept = request.headers.get("Accept", "")
    body, content_type = await asyncio.get_running_loop().run_in_executor(
        service.threads, service.metrics.scrape, accept
    )
    return web.Response(body=body, headers={**json_headers(service), "Content-Type": content_type})
