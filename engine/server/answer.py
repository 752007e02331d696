"""Writes the answer of one exchange, whole or streamed, and marks the end of ``send``.

What must hold: an error before the first byte is a status, one after it an event of the stream; with several choices
each has its frames in order, and the answer ends when the last of them has; when one fails, all do.
"""

from __future__ import annotations

import logging
import math
import socket
import struct
from typing import Any

from aiohttp import web

from engine.logprobs import TokenLogprob
from engine.request import ERROR, LENGTH, STOP, Output
from engine.server.choices import Choice, LogprobShapes, joined
from engine.server.exchange import Exchange
from engine.server.openai_api import ApiError, Call
from engine.server.responses import DONE, Frames, Said, dumps, error_frame, phases_frame, usage
from engine.server.service import Service, State, unavailable
from telemetry import names

log = logging.getLogger("tailspan.server")


def json_headers(service: Service, request_id: str | None = None, error: ApiError | None = None) -> dict[str, str]:
    """Headers of every answer."""
    headers = {names.REPLICA_HEADER: service.replica}
    if service.simulated is not None:
        headers[names.SIMULATED_HEADER] = service.simulated.encode("ascii", "replace").decode()
    if request_id is not None:
        headers[names.REQUEST_ID_HEADER] = request_id
    if error is not None and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error is not None and error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


class Answer:
    """The writer of one exchange's answer."""

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
        exchange = self._exchange
        failed: Output | None = None
        while True:
            outputs, over = await self._take()
            for output in outputs:
                choice = exchange.note(output)
                choice.texts.append(output.text)
                choice.logprobs.extend(output.logprobs)
                failed = failed or self._failed(output)
            if not over:
                continue
            if failed is not None:
                return await self.refuse(self._failure(failed))
            shapes = LogprobShapes(self._service.engine.model.tokenizer)
            said = [self._said(call, choice, shapes) for choice in exchange.choices]
            body = self._service.voice(exchange, chat=call.chat).whole(said, self._usage(call))
            return await self._json(200, body, json_headers(self._service, exchange.id))

    def _said(self, call: Call, choice: Choice, shapes: LogprobShapes) -> Said:
        silent = call.max_tokens == 0  # an echo alone: the one token that was made is not part of it
        text, entries = ("", []) if silent else ("".join(choice.texts), choice.logprobs)
        echoed, before = self.echo(call, choice, shapes) if call.echo else ("", None)
        logprobs: dict[str, Any] | None = None
        if call.logprobs is not None:
            logprobs = shapes.chat(entries) if call.chat else shapes.text(entries, len(echoed))
        if before is not None and logprobs is not None:
            logprobs = joined(before, logprobs)
        prompt = shapes.prompt(choice.work) if call.prompt_logprobs is not None else None
        return Said(echoed + text, str(choice.finish_reason), logprobs, prompt)

    def echo(self, call: Call, choice: Choice, shapes: LogprobShapes) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text, without what the model wants before it, and its logprobs where asked for."""
        prefix = self._service.engine.model.tokenizer.prefix_ids if call.add_special_tokens else ()
        skipped = 0 if isinstance(call.prompt, list) else len(prefix)
        text = shapes.echoed(choice.work.prompt_ids[skipped:])
        return text, shapes.echo(choice.work, skipped) if call.logprobs is not None else None

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
        frames = Frames(service.voice(exchange, chat=call.chat), include_usage=call.include_usage, n=call.n)
        if exchange.mailbox is not None:
            exchange.mailbox.bound(service.limits.stream, frames.overhead, self._nobody_reads)
        breaks = service.faults.stream(exchange.id) if service.faults is not None else None
        deltas = _Deltas(self, call, frames, LogprobShapes(service.engine.model.tokenizer))
        if call.chat:
            await response.write(b"".join(frames.role(index) for index in range(call.n)))
        failed: Output | None = None
        over = False
        while not over:
            outputs, over = await self._take()
            data = b""
            for output in outputs:
                choice = exchange.note(output)
                failed = failed or self._failed(output)
                if breaks is not None:
                    if breaks[0] <= 0 or output.finish_reason is not None:
                        return await self._break(response, data, reset=breaks[1])
                    breaks = breaks[0] - bool(output.text), breaks[1]
                if failed is None:
                    data += deltas.of(choice, output)
            if over:
                data += self._ending(call, frames, failed)
            if data:
                await response.write(data)
                await self._request.writer.drain()  # waits only when the client's buffer is full
        exchange.sent()
        await response.write((phases_frame(exchange.account()) if self._asked else b"") + DONE)
        await response.write_eof()
        exchange.close()
        return response

    def _nobody_reads(self) -> None:
        """More waits for the reader than may: the connection goes, and with it the handler."""
        log.warning("request %s: its stream is dropped, nobody reads it", self._exchange.id)
        self._exchange.drop(names.SLOW_READER)
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _break(self, response: web.StreamResponse, data: bytes, *, reset: bool) -> web.StreamResponse:
        """Fault injection: the stream ends here, by a reset or as if that were all."""
        if data:
            await response.write(data)
            await self._request.writer.drain()
        self._exchange.abandon()
        transport = self._request.transport
        if reset and transport is not None:
            no_lingering = struct.pack("ii", 1, 0)  # closing sends RST
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_lingering)
            transport.abort()
        else:
            await response.write_eof()
        return response

    def _ending(self, call: Call, frames: Frames, failed: Output | None) -> bytes:
        if failed is not None:
            error = self._failure(failed)
            self._exchange.fail(error)
            return error_frame(error.body())
        return frames.usage(self._usage(call)) if call.include_usage else b""

    async def _take(self) -> tuple[list[Output], bool]:
        """Outputs that came, and whether they are the last."""
        mailbox = self._exchange.mailbox
        if mailbox is None:
            raise RuntimeError("an exchange that was not submitted has no outputs")
        return await mailbox.take(), mailbox.over

    def _usage(self, call: Call) -> dict[str, Any]:
        exchange = self._exchange
        made = 0 if call.max_tokens == 0 else exchange.completion_tokens
        return usage(len(exchange.choices[0].work.prompt_ids), made, exchange.cached_tokens)

    def _failed(self, output: Output) -> Output | None:
        """The output, when it says that its choice failed; then the other choices end too."""
        if output.finish_reason in (None, STOP, LENGTH):
            return None
        self._exchange.stop_engine()
        return output

    def _failure(self, last: Output) -> ApiError:
        """What the client is told when the engine ended it."""
        if last.code == names.KV_OOM:
            after = max(1, math.ceil(self._service.engine.backlog_s()))
            message = f"{last.error}; try again later."
            return ApiError(503, message, kind="server_error", code=names.KV_OOM, retry_after=after)
        if last.finish_reason == ERROR or self._service.state is not State.DRAINING:
            message = f"The engine failed: {last.error or last.finish_reason}."
            return ApiError(500, message, kind="server_error", code="engine_error")
        return unavailable(self._service.state)


class _Deltas:
    """From outputs to the frames of a stream."""

    def __init__(self, answer: Answer, call: Call, frames: Frames, shapes: LogprobShapes) -> None:
        self._answer, self._call, self._frames, self._shapes = answer, call, frames, shapes
        self._echoed: dict[int, int] = {}  # choice -> characters of the prompt that were sent before its answer

    def of(self, choice: Choice, output: Output) -> bytes:
        """The frames of one output: the echo before the first, text or logprobs if there are any, the end."""
        data, call = b"", self._call
        if call.echo and choice.index not in self._echoed:
            text, logprobs = self._answer.echo(call, choice, self._shapes)
            self._echoed[choice.index] = len(text)
            data += self._frames.text(text, choice.index, logprobs)
        if call.max_tokens != 0 and (output.text or output.logprobs):
            told = self._told(choice, list(output.logprobs)) if call.logprobs is not None else None
            data += self._frames.text(output.text, choice.index, told)
        if output.finish_reason is not None:
            data += self._frames.finish(output.finish_reason, choice.index)
        return data

    def _told(self, choice: Choice, entries: list[TokenLogprob]) -> dict[str, Any]:
        if self._call.chat:
            return self._shapes.chat(entries)
        return self._shapes.text(entries, self._echoed.get(choice.index, 0))
