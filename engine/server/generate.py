"""The two endpoints that generate: read, validate, tokenise, hand to the engine, answer (streamed or whole).

What must hold: the phase clock is marked here at the ends of ingress, tokenize and send, nowhere else; whatever is
raised, the exchange closes; a client that goes is noticed by the cancelled handler (aiohttp cancels it when the
connection is lost), however long the handler would have waited.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from engine.request import (
    ERROR,
    LENGTH,
    STOP,
    NeverFits,
    Output,
    QueueFull,
    Refusal,
    Request,
    RequestTooLong,
    SamplingParams,
)
from engine.server.exchange import Exchange
from engine.server.openai_api import ApiError, Call, bad, parse_chat, parse_completion, parse_json
from engine.server.responses import DONE, Frames, dumps, error_frame, phases_frame, usage
from engine.server.service import SERVICE, Service, State, unavailable
from engine.server.stream import Mailbox
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
) -> list[int]:
    """Token ids of messages (through the chat template) or of a prompt (``special``: after the model's own prefix).

    generate: the template opens the assistant's turn.  Long texts are encoded on a thread.
    """
    model = service.engine.model
    if isinstance(prompt, list):
        return prompt
    prefix: tuple[int, ...] = ()
    if messages is not None:
        try:
            text = model.template.render(messages, generate)
        except UserError as error:
            raise bad(error.message, "messages") from error
    else:
        text, prefix = prompt or "", model.tokenizer.prefix_ids if special else ()
    if len(text) <= IN_LOOP_CHARS:
        return [*prefix, *model.tokenizer.encode(text)]
    loop = asyncio.get_running_loop()
    return [*prefix, *await loop.run_in_executor(service.threads, model.tokenizer.encode, text)]


async def _enqueue(service: Service, exchange: Exchange, call: Call) -> None:
    """Parsed -> enqueued.  Raises ApiError when the engine will not have it."""
    ids = await prompt_ids(service, call.messages, call.prompt, generate=True, special=call.add_special_tokens)
    engine = service.ready_engine()  # it may have begun to drain meanwhile
    where = "messages" if call.chat else "prompt"
    vocab = engine.model.shape.vocab
    for name, tokens in ((where, ids), ("stop_token_ids", call.stop_token_ids)):
        if tokens and max(tokens) >= vocab:
            raise bad(f"'{name}' holds token id {max(tokens)}, but the vocabulary ends at {vocab - 1}.", name)
    if not ids:
        raise bad(f"'{where}' holds no token.", where)
    exchange.clock.tokenized(time.monotonic_ns())
    mailbox = Mailbox(service.hop)
    work = Request(exchange.id, ids, sampling_params(engine, call, len(ids)), exchange.clock, mailbox.emit)
    try:
        exchange.submit(engine, work, mailbox)
    except Refusal as refusal:
        raise refused(service, call, refusal) from refusal


def sampling_params(engine: Engine, call: Call, prompt_tokens: int) -> SamplingParams:
    """max_tokens missing fills up the context, or the KV pool where that is smaller."""
    room = min(engine.max_context, engine.pool.total * engine.pool.size) - prompt_tokens
    max_tokens = max(1, room) if call.max_tokens is None else call.max_tokens
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
    )


def refused(service: Service, call: Call, refusal: Refusal) -> ApiError:
    """The engine's refusal as an answer."""
    param = "messages" if call.chat else "prompt"
    if isinstance(refusal, QueueFull):
        if service.metrics is not None:
            service.metrics.rejected("queue_full")
        return ApiError(429, f"{refusal}; try again later.", kind="rate_limit_error", code="queue_full", retry_after=1)
    if isinstance(refusal, RequestTooLong):
        if call.max_tokens is not None and refusal.prompt_tokens < refusal.max_context:
            param = call.max_tokens_param
        return bad(str(refusal), param, "context_length_exceeded")
    if isinstance(refusal, NeverFits):
        return bad(str(refusal), param, names.KV_OOM)
    return bad(str(refusal), param)


def json_headers(service: Service, request_id: str | None = None, error: ApiError | None = None) -> dict[str, str]:
    """Headers of every answer."""
    headers = {names.REPLICA_HEADER: service.replica}
    if request_id is not None:
        headers[names.REQUEST_ID_HEADER] = request_id
    if error is not None and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return headers


class Answer:
    """Writes the answer of one exchange and marks the end of ``send``."""

    def __init__(self, service: Service, request: web.Request, exchange: Exchange) -> None:
        self._service, self._request, self._exchange = service, request, exchange
        self._asked = request.headers.get(names.PHASES_HEADER) == "1"
        self.response: web.StreamResponse | None = None

    async def refuse(self, error: ApiError) -> web.StreamResponse:
        """An error before anything was generated."""
        self._exchange.fail(error)
        return await self._json(error.status, error.body(), json_headers(self._service, self._exchange.id, error))

    async def whole(self, call: Call) -> web.StreamResponse:
        """Everything in one body."""
        exchange, texts = self._exchange, []
        while True:
            outputs = await self._take()
            for output in outputs:
                exchange.note(output)
                texts.append(output.text)
            last = outputs[-1]
            if last.finish_reason is None:
                continue
            error = self._failure(last)
            if error is not None:
                return await self.refuse(error)
            body = self._service.voice(exchange, chat=call.chat).whole(
                "".join(texts), last.finish_reason, self._usage()
            )
            return await self._json(200, body, json_headers(self._service, exchange.id))

    async def _json(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> web.StreamResponse:
        """Write a JSON body.  The account, if asked for, follows the answer proper as the last key of the object."""
        headers = {**headers, "Content-Type": "application/json; charset=utf-8"}
        exchange, data = self._exchange, dumps(body)
        if not self._asked:
            headers["Content-Length"] = str(len(data))
        response = self.response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(self._request)
        await response.write(data[:-1] if self._asked else data)
        await self._request.writer.drain()
        exchange.sent()
        if self._asked:
            await response.write(b',"' + names.PHASES_KEY.encode() + b'":' + dumps(exchange.account()) + b"}")
        await response.write_eof()
        exchange.close()
        return response

    async def stream(self, call: Call) -> web.StreamResponse:
        """Frames as they come; several outputs that wait go out in one write."""
        exchange, service = self._exchange, self._service
        headers = {
            **json_headers(service, exchange.id),
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
        }
        response = self.response = web.StreamResponse(headers=headers)
        await response.prepare(self._request)
        frames = Frames(service.voice(exchange, chat=call.chat), include_usage=call.include_usage)
        if call.chat:
            await response.write(frames.role())
        last: Output | None = None
        while last is None or last.finish_reason is None:
            outputs = await self._take()
            last = outputs[-1]
            for output in outputs:
                exchange.note(output)
            data = b"".join(frames.text(output.text) for output in outputs if output.text)
            if last.finish_reason is not None:
                data += self._ending(call, frames, last)
            if data:
                await response.write(data)
                await self._request.writer.drain()  # waits only when the client's buffer is full
        exchange.sent()
        await response.write((phases_frame(exchange.account()) if self._asked else b"") + DONE)
        await response.write_eof()
        exchange.close()
        return response

    def _ending(self, call: Call, frames: Frames, last: Output) -> bytes:
        error = self._failure(last)
        if error is not None:
            self._exchange.fail(error)
            return error_frame(error.body())
        ending = frames.finish(str(last.finish_reason))
        return ending + frames.usage(self._usage()) if call.include_usage else ending

    async def _take(self) -> list[Output]:
        if self._exchange.mailbox is None:
            raise RuntimeError("an exchange that was not submitted has no outputs")
        return await self._exchange.mailbox.take()

    def _usage(self) -> dict[str, Any]:
        exchange = self._exchange
        prompt = len(exchange.work.prompt_ids) if exchange.work is not None else 0
        return usage(prompt, exchange.completion_tokens, exchange.cached_tokens)

    def _failure(self, last: Output) -> ApiError | None:
        """What the client is told when the engine ended it: None for an answer that is complete."""
        if last.finish_reason in (STOP, LENGTH):
            return None
        if last.finish_reason == ERROR or self._service.state is not State.DRAINING:
            return ApiError(
                500, f"The engine failed: {last.error or last.finish_reason}.", kind="server_error", code="engine_error"
            )
        return unavailable(self._service.state)
