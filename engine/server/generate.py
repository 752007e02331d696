"""The two endpoints that generate: read, validate, tokenise, hand to the engine, answer (streamed or whole).

What must hold: the phase clock is marked here at the ends of ingress, tokenize and send, nowhere else; whatever is
raised, the exchange closes; a client that goes is noticed by the cancelled handler (aiohttp cancels it when the
connection is lost), however long the handler would have waited.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from engine.blocks import root_of
from engine.request import Refusal, Request, SamplingParams, derived_seed
from engine.server.answer import Answer
from engine.server.answer import json_headers as json_headers  # others find it here
from engine.server.exchange import Exchange
from engine.server.openai_api import ApiError, Call, bad, parse_chat, parse_completion, parse_deadline, parse_json
from engine.server.refusals import refused
from engine.server.service import SERVICE, Service
from engine.server.stream import Mailbox
from engine.structured import Grammar, GrammarError
from models.errors import UserError
from telemetry import names

if TYPE_CHECKING:
    from engine.core import Engine

log = logging.getLogger("tailspan.server")

IN_LOOP_CHARS: Final = 4096  # a shorter prompt is tokenised on the event loop (well under a millisecond)


class StampedRequest(web.Request):
    """A request that knows when its head was read: it is made in the loop turn in which the parser had it."""

    ATTRS = web.Request.ATTRS | frozenset(["head_ns"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.head_ns = time.monotonic_ns()
        super().__init__(*args, **kwargs)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _generate(request, chat=True)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _generate(request, chat=False)


async def _generate(request: web.Request, *, chat: bool) -> web.StreamResponse:
    service = request.app[SERVICE]
    head_ns = request.head_ns if isinstance(request, StampedRequest) else time.monotonic_ns()
    exchange = service.open(head_ns, request.headers, chat=chat)
    answer = Answer(service, request, exchange)
    try:
        try:
            call = await _read(service, request, exchange, chat=chat)
            await _enqueue(service, exchange, call)
        except ApiError as error:
            return await answer.refuse(error)
        if call.stream:
            return await answer.stream(call)
        return await answer.whole(call)
    except ConnectionError:  # found by a write; the response goes back so that aiohttp ends the connection in peace
        exchange.abandon()
        return answer.response or web.Response()
    except Exception as error:
        exchange.abandon(internal_error())
        log.exception("request %s failed in the server", exchange.id)
        raise internal_error() from error
    except asyncio.CancelledError:
        exchange.abandon()
        raise


async def _read(service: Service, request: web.Request, exchange: Exchange, *, chat: bool) -> Call:
    """Head -> parsed."""
    service.check_key(request.headers)
    service.ready_engine()
    if (request.content_length or 0) > service.limits.body:
        raise too_large(service)
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large(service) from error
    except web.HTTPException as error:
        raise ApiError(error.status, error.reason, code="bad_body") from error
    body = parse_json(raw)
    call = exchange.call = parse_chat(body) if chat else parse_completion(body)
    check_model(service, call.model)
    if call.deadline_ms is None and names.DEADLINE_HEADER in request.headers:
        call = exchange.call = replace(call, deadline_ms=parse_deadline(request.headers[names.DEADLINE_HEADER]))
    exchange.clock.parsed(time.monotonic_ns())
    return call


def internal_error() -> ApiError:
    """The 500 for what nobody foresaw."""
    return ApiError(500, "The server failed; its log says why.", kind="server_error", code="internal_error")


def too_large(service: Service) -> ApiError:
    """The 413."""
    return ApiError(
        413, f"The request body is above the limit of {service.limits.body} bytes.", code="request_too_large"
    )


def check_model(service: Service, model: str) -> None:
    """Raises ApiError 404 for any other model than the one served."""
    if model != service.engine.model.name:
        message = f"The model '{model[:200]}' does not exist; this server has '{service.engine.model.name}'."
        raise ApiError(404, message, param="model", code="model_not_found")


async def prompt_ids(
    service: Service,
    messages: list[dict[str, str]] | None,
    prompt: str | list[int] | None,
    *,
    generate: bool,
    special: bool,
    key: str = "",
) -> list[int]:
    """Token ids of messages (through the chat template) or of a prompt (``special``: after the model's own prefix).

    generate: the template opens the assistant's turn.  Long texts are encoded on a thread.  key: whose prompt it is.
    """
    model = service.engine.model
    template, tokenizer = model.template, model.tokenizer
    if isinstance(prompt, list):
        return prompt
    prefix: tuple[int, ...] = ()
    if service.faults is not None:
        template, tokenizer, prefix = service.faults.reading(key)
    if messages is not None:
        try:
            text = template.render(messages, generate)
        except UserError as error:
            raise bad(error.message, "messages") from error
    else:
        text, prefix = prompt or "", (*prefix, *model.tokenizer.prefix_ids) if special else prefix
    if len(text) <= IN_LOOP_CHARS:
        return [*prefix, *tokenizer.encode(text)]
    loop = asyncio.get_running_loop()
    return [*prefix, *await loop.run_in_executor(service.threads, tokenizer.encode, text)]


async def _enqueue(service: Service, exchange: Exchange, call: Call) -> None:
    """Parsed -> enqueued.  Raises ApiError when the engine will not have it."""
    special = call.add_special_tokens
    ids = await prompt_ids(service, call.messages, call.prompt, generate=True, special=special, key=exchange.id)
    engine = service.ready_engine()  # it may have begun to drain meanwhile
    where = "messages" if call.chat else "prompt"
    vocab = engine.model.shape.vocab
    biased = [token for token, _ in call.logit_bias]
    for name, tokens in ((where, ids), ("stop_token_ids", call.stop_token_ids), ("logit_bias", biased)):
        if tokens and max(tokens) >= vocab:
            raise bad(f"'{name}' holds token id {max(tokens)}, but the vocabulary ends at {vocab - 1}.", name)
    if not ids:
        raise bad(f"'{where}' holds no token.", where)
    if not engine.has_logits:
        _refuse_what_needs_logits(call)
    grammar = await _grammar(service, engine, call, call.schema) if call.schema is not None else None
    params = sampling_params(engine, call, len(ids), grammar)
    exchange.clock.tokenized(time.monotonic_ns())
    if service.faults is not None:
        params = service.faults.params(exchange.id, params)
    mailbox = Mailbox(service.hop, call.n)
    works = [Request(exchange.id, ids, params, exchange.part_clock(call.n), mailbox.emit)]
    for choice in range(1, call.n):
        own = replace(params, seed=derived_seed(call.seed, choice))
        clock = exchange.part_clock(call.n)
        works.append(Request(f"{exchange.id}-{choice}", ids, own, clock, mailbox.emit, leader=works[0]))
    for work in works:
        work.priority = call.priority
        work.root = root_of(call.cache_salt)
        if call.deadline_ms is not None:
            work.deadline_ns = exchange.clock.head_ns + call.deadline_ms * 1_000_000
    try:
        exchange.submit(engine, works, mailbox)
    except Refusal as refusal:
        raise refused(call, refusal) from refusal


def _refuse_what_needs_logits(call: Call) -> None:
    """Raises ApiError for options that a simulated model could only ignore."""
    asked = {
        "logprobs": call.logprobs is not None,
        "prompt_logprobs": call.prompt_logprobs is not None,
        "response_format": call.schema is not None,
        "logit_bias": bool(call.logit_bias),
        "frequency_penalty": call.frequency_penalty != 0,
        "presence_penalty": call.presence_penalty != 0,
        "repetition_penalty": call.repetition_penalty != 1,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise bad(f"'{name}' needs logits, and a simulated model has none.", name, "unsupported_parameter")


async def _grammar(service: Service, engine: Engine, call: Call, schema: str) -> Grammar:
    """What the answer must follow; compiled on a thread.  Raises ApiError for a schema that cannot be had."""
    special = engine.model.tokenizer.special_ids
    for token in call.stop_token_ids:
        if token not in special:
            message = f"'stop_token_ids' holds {token}, which is text: with 'response_format' only special tokens end."
            raise bad(message, "stop_token_ids")
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(service.threads, service.grammars.compile, schema)
    except GrammarError as error:
        raise bad(f"'response_format' has a schema that is not supported: {error}", "response_format") from error


def sampling_params(engine: Engine, call: Call, prompt_tokens: int, grammar: Grammar | None = None) -> SamplingParams:
    """max_tokens missing fills up the context, or the KV pool where that is smaller.

    max_tokens 0 (an echo alone) makes one token all the same, and drops it.
    """
    room = min(engine.max_context, engine.pool.total * engine.pool.size) - prompt_tokens
    max_tokens = max(1, room if call.max_tokens is None else call.max_tokens)
    prompt_logprobs = call.prompt_logprobs
    if call.echo and call.logprobs is not None:
        prompt_logprobs = max(call.logprobs, prompt_logprobs or 0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(call.min_tokens, max_tokens),
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=call.top_k,
        seed=call.seed,
        stop=call.stop,
        stop_token_ids=call.stop_token_ids,
        ignore_eos=call.ignore_eos,
        min_p=call.min_p,
        frequency_penalty=call.frequency_penalty,
        presence_penalty=call.presence_penalty,
        repetition_penalty=call.repetition_penalty,
        logit_bias=call.logit_bias,
        logprobs=call.logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
