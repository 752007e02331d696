"""One answer of an OpenAI-compatible server, read as it comes: bytes and stamps in, facts out.

Owns what counts as what.  A token is text the user can see or read as reasoning (content, reasoning, refusal, a tool
call, a completion's text, in chat or Responses events): never the role-only chunk or an empty delta.  `first_chunk`
is the first event of any kind, `first_content` the first token that is not reasoning.  `last_token` is the last chunk
with a token; usage, the phase account and [DONE] do not move it.  An answer is complete only with a finish reason and
an orderly end ([DONE], or the end of the HTTP message); everything else has a reason and keeps its partial text.
Stamps are CLOCK_MONOTONIC ns, one per read, for every event in those bytes.
Malformed input never raises: it becomes a reason.
"""

from __future__ import annotations

import json
from typing import Any, Final

from loadgen import responses_api
from loadgen.failure import Failure, ServerError, in_stream, of_status, retry_after_s, server_error
from loadgen.sse import Event, LineTooLongError, SseReader
from loadgen.usual import Shape, Usual, scan
from telemetry.adapters import llama_cpp, tgi
from telemetry.adapters.adapter import DURATION, Account
from telemetry.names import (
    PHASES,
    PHASES_EVENT,
    PHASES_KEY,
    REPLICA_HEADER,
    REQUEST_ID_HEADER,
    SERVER_ERROR,
    STREAM_CUT,
)

_REPLICA: Final = REPLICA_HEADER.encode()
_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
_ERROR_BODY: Final = 64 << 10  # bytes of an error body that are kept


class Answer:
    """The facts of one answer; `failure` None after `end` means that it is complete.

    Text comes in the order of arrival and holds all tokens, reasoning and tool calls included (`pieces`, one string
    per token chunk; `stamps`, its moment; `usage_marks`, the completion tokens reported with it, -1 where none were).
    """

    __slots__ = (
        "_between",
        "_body",
        "_body_size",
        "_marks",
        "_reader",
        "_usual",
        "account",
        "cached_tokens",
        "completion_tokens",
        "done_marker",
        "end_ns",
        "failure",
        "fingerprint",
        "finish_reason",
        "first_chunk_ns",
        "first_content_ns",
        "headers_ns",
        "line_limit",
        "logprobs",
        "model",
        "pieces",
        "prompt_tokens",
        "reasoning_tokens",
        "replica",
        "request_id",
        "response_id",
        "retry_after_s",
        "stamps",
        "status",
        "streamed",
    )

    def __init__(self, line_limit: int = 1 << 20, shape: Shape | None = None) -> None:
        """shape: what answers of the same server share; None: this one learns for itself."""
        self.line_limit = line_limit
        self.status: int | None = None
        self.headers_ns: int | None = None
        self.first_chunk_ns: int | None = None
        self.first_content_ns: int | None = None
        self.end_ns: int | None = None
        self.stamps: list[int] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.done_marker = False
        self.streamed = False
        self.failure: Failure | None = None
        self.retry_after_s: float | None = None
        self.model: str | None = None
        self.fingerprint: str | None = None
        self.replica: str | None = None
        self.request_id: str | None = None
        self.response_id: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None  # counted, whether shown or not
        self.logprobs: list[Any] = []  # entries of chat tokens, as they came
        self.account: dict[str, Any] | None = None  # the server's phases, as it sent them
        self._marks: list[int] = []  # of the first pieces; those beyond have none
        self._between = False  # learned, and the next read begins an event
        self._usual = Usual(self.stamps, self.pieces, line_limit, shape)
        self._reader: SseReader | None = None
        self._body: list[bytes] = []  # of an answer that is not a stream
        self._body_size = 0

    @property
    def first_token_ns(self) -> int | None:
        return self.stamps[0] if self.stamps else None

    @property
    def last_token_ns(self) -> int | None:
        return self.stamps[-1] if self.stamps else None

    @property
    def usage_marks(self) -> list[int]:
        """Of each piece; empty where no usage came with any."""
        if self._marks:
            self._marks.extend([-1] * (len(self.pieces) - len(self._marks)))
        return self._marks

    @usage_marks.setter
    def usage_marks(self, marks: list[int]) -> None:
        self._marks = marks

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    # --- what comes in ---
    def head(self, status: int, headers: dict[bytes, bytes], now_ns: int) -> None:
        """The status and the headers (names in lower case) are there."""
        self.status = status
        self.headers_ns = now_ns
        if (value := headers.get(_REPLICA)) is not None:
            self.replica = value.decode("latin-1")
        if (value := headers.get(_REQUEST_ID)) is not None:
            self.request_id = value.decode("latin-1")
        if (value := headers.get(b"retry-after")) is not None:
            self.retry_after_s = retry_after_s(value)
        if b"x-inference-time" in headers:
            self._take_phases(tgi.of_headers(headers))
        if 200 <= status < 300 and headers.get(b"content-type", b"").lower().startswith(b"text/event-stream"):
            self._reader = SseReader(self.line_limit)
            self.streamed = True

    def feed(self, data: bytes, now_ns: int) -> None:
        """The next bytes of the body."""
        reader = self._reader
        if reader is not None:
            if self._between and self._usual.take_event(data, now_ns):
                return
            try:
                events = reader.feed(data)
            except LineTooLongError as error:
                self._between = False
                self._fail(STREAM_CUT, f"unreadable stream: {error}")
                return
            for event in events:
                self._event(event, now_ns)
            self._between = (
                self._usual.known
                and self.first_content_ns is not None  # which a usual event leaves alone
                and not self.done_marker
                and reader.between_events
            )
        elif self.status is not None and 200 <= self.status < 300:
            self._body.append(data)  # the connection limits its size
        elif self._body_size < _ERROR_BODY:
            self._body.append(data)
            self._body_size += len(data)

    def usual(self) -> Usual | None:
        """What takes a whole chunk with a usual event, where the next read may be one."""
        return self._usual if self._between else None

    def end(self, now_ns: int, broken: str | None = None) -> None:
        """Nothing more comes.  broken: how the connection failed; None: the HTTP message ended as it should."""
        if self.end_ns is None:
            self.end_ns = now_ns
        if self.status is not None and not 200 <= self.status < 300:
            self._end_refused()
        elif self._reader is not None:
            self._end_stream(now_ns, broken)
        elif broken is not None:
            self._fail(STREAM_CUT, broken)
        else:
            self._end_plain(now_ns)
        self._reader = None
        self._body.clear()

    def give_up(self, reason: str, detail: str, now_ns: int) -> None:
        """We stopped reading: a timeout, or the end of the run.  An error that the stream told before stays."""
        if self.end_ns is None:
            self.end_ns = now_ns
        if self.status is not None and not 200 <= self.status < 300:
            self._end_refused()
        self._fail(reason, detail)
        self._reader = None
        self._body.clear()

    def _fail(self, reason: str, detail: str) -> None:
        if self.failure is None:
            self.failure = Failure(reason, detail)

    # --- streams ---
    def _event(self, event: Event, now_ns: int) -> None:
        if self.done_marker:
            return
        if self.first_chunk_ns is None:
            self.first_chunk_ns = now_ns
        data = event.data
        text = self._usual.text_of(data)
        if text and event.type == "message":
            self._token(text, -1, now_ns, content=True)
            return
        if data == "[DONE]":
            self.done_marker = True
            self.end_ns = now_ns
            return
        if event.type == "message":
            if (reason := self._usual.end_of(data)) is not None:
                if self.finish_reason is None:
                    self.finish_reason = reason
                return
            if (usage := self._usual.usage_of(data)) is not None:
                self._take_usage(usage)
                return
        try:
            found = _json(data)
        except (ValueError, RecursionError):
            self._fail(STREAM_CUT, f"an event that is not JSON: {data[:120]!r}")
            return
        if not isinstance(found, dict):
            self._fail(STREAM_CUT, f"an event that is not an object: {data[:120]!r}")
            return
        if event.type == PHASES_EVENT:
            self._take_account(found)
            return
        if "type" in found and responses_api.is_event(found):
            self._response_event(responses_api.meaning(found), now_ns)
            return
        if "error" in found or found.get("object") == "error":
            error = server_error(found)
            if error is not None:
                if self.failure is None:
                    self.failure = in_stream(error)
                return
        first = self.model is None
        tokens = len(self.pieces)
        finished = self.finish_reason
        self._chunk(found, now_ns)
        if finished is None and self.finish_reason is not None and event.type == "message":
            self._usual.learn_end(data, found, self.finish_reason)
        if first and self._usual.foresee(data, found):
            return
        if len(self.pieces) == tokens + 1 and self.finish_reason is None and not found.get("usage"):
            self._usual.learn(data, found)

    def _response_event(self, said: responses_api.Meaning, now_ns: int) -> None:
        if said.about is not None and not self.model:
            self._identify(said.about)
        if said.error is not None:
            error = server_error({"error": said.error})
            if self.failure is None and error is not None:
                self.failure = in_stream(error)
            return
        mark = self._take_usage(said.usage) if said.usage else -1
        if said.spoken or said.thought:
            self._token(said.thought + said.spoken, mark, now_ns, content=bool(said.spoken))
        if said.finish is not None and self.finish_reason is None:
            self.finish_reason = said.finish

    def _chunk(self, found: dict[str, Any], now_ns: int) -> None:
        if self.model is None:
            self._identify(found)
        usage = found.get("usage")
        mark = self._take_usage(usage) if usage else -1
        if "timings" in found:
            self._take_phases(llama_cpp.of_body(found))
        choices = found.get("choices")
        if not isinstance(choices, list):
            return
        for choice in choices:
            if not isinstance(choice, dict) or choice.get("index"):
                continue  # we ask for one choice
            told = choice.get("logprobs")
            if isinstance(told, dict) and isinstance(told.get("content"), list):
                self.logprobs.extend(told["content"])
            delta = choice.get("delta")
            if isinstance(delta, dict):
                self._delta(delta, mark, now_ns)
            else:
                text = choice.get("text")
                if text and isinstance(text, str):
                    self._token(text, mark, now_ns, content=True)
            reason = choice.get("finish_reason")
            if reason is not None and self.finish_reason is None:
                self.finish_reason = str(reason)

    def _delta(self, delta: dict[str, Any], mark: int, now_ns: int) -> None:
        content = delta.get("content")
        if content and isinstance(content, str) and (len(delta) == 1 or (len(delta) == 2 and "role" in delta)):
            self._token(content, mark, now_ns, content=True)  # the common case
            return
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        spoken = _text_of(content) + _text_of(delta.get("refusal")) + _tool_text(delta.get("tool_calls"))
        thought = _text_of(reasoning)
        if thought or spoken:
            self._token(thought + spoken, mark, now_ns, content=bool(spoken))

    def _token(self, text: str, mark: int, now_ns: int, content: bool) -> None:
        self.stamps.append(now_ns)
        self.pieces.append(text)
        if mark >= 0:
            self._marks.extend([-1] * (len(self.pieces) - len(self._marks) - 1))
            self._marks.append(mark)
        if content and self.first_content_ns is None:
            self.first_content_ns = now_ns

    def _end_stream(self, now_ns: int, broken: str | None) -> None:
        assert self._reader is not None
        last = self._reader.pending
        if broken is None and last is not None and not self.done_marker and _whole(last.data):
            self._event(last, now_ns)  # a server that leaves out the last blank line said it all the same
        if self.finish_reason is None:
            how = "the stream ended with [DONE]" if self.done_marker else broken or "the stream ended in order"
            self._fail(STREAM_CUT, f"no finish reason: {how}")
        elif broken is not None and not self.done_marker:
            self._fail(STREAM_CUT, f"after the finish reason, before [DONE]: {broken}")

    # --- answers that are not streams ---
    def _end_refused(self) -> None:
        assert self.status is not None
        body = b"".join(self._body)[:_ERROR_BODY].decode("utf-8", "replace")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        error = server_error(found)
        if error is None and isinstance(found, dict) and isinstance(found.get("detail"), str):
            error = ServerError(found["detail"])  # FastAPI's own
        if isinstance(found, dict):
            self._take_account(found)
        self.failure = of_status(self.status, error or ServerError(" ".join(body.split())))

    def _end_plain(self, now_ns: int) -> None:
        try:
            found = json.loads(b"".join(self._body))
        except (ValueError, RecursionError) as fault:
            self._fail(SERVER_ERROR, f"the answer is neither a stream nor JSON: {fault}")
            return
        if not isinstance(found, dict):
            self._fail(SERVER_ERROR, "the answer is JSON, but not an object")
            return
        self._take_account(found)
        error = server_error(found)
        if error is not None:
            self.failure = in_stream(error)
            return
        self.first_chunk_ns = now_ns
        if found.get("object") == "response":
            said = responses_api.of_response(found)
            if text := responses_api.texts(found):
                self._token(text, -1, now_ns, content=True)
            self._response_event(said, now_ns)
            if self.finish_reason is None:
                self._fail(STREAM_CUT, "no finish reason in the answer")
            return
        for choice in found.get("choices") or ():
            if isinstance(choice, dict) and isinstance(choice.get("message"), dict):
                choice["delta"] = choice.pop("message")  # the same fields, all at once
        self._chunk(found, now_ns)
        if self.finish_reason is None:
            self._fail(STREAM_CUT, "no finish reason in the answer")

    # --- what the server says of itself ---
    def _identify(self, found: dict[str, Any]) -> None:
        model = found.get("model")
        self.model = model if isinstance(model, str) else ""
        fingerprint = found.get("system_fingerprint")
        self.fingerprint = fingerprint if isinstance(fingerprint, str) else None
        if isinstance(found.get("id"), str):
            self.response_id = found["id"]

    def _take_usage(self, usage: Any) -> int:
        """Keep the totals (the last report holds); returns the completion tokens so far, -1 if not told."""
        if not isinstance(usage, dict):
            return -1
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        details = usage.get("completion_tokens_details")
        if isinstance(details, dict):
            self.reasoning_tokens = _count(details.get("reasoning_tokens"), self.reasoning_tokens)
        completion = _count(usage.get("completion_tokens"), None)
        if completion is None:
            return -1
        self.completion_tokens = completion
        return completion

    def _take_phases(self, told: Account | None) -> None:
        """The account of a server that is not ours (seconds), in the form of our engine's (ns)."""
        if told is not None and self.account is None:
            account: dict[str, Any] = {"phases": {name: round(told[name] * 1e9) for name in told if name != DURATION}}
            if DURATION in told:
                account["phases"] = {name: account["phases"].get(name, 0) for name in PHASES}
                account["duration_ns"] = sum(account["phases"].values())
            self.account = account

    def _take_account(self, found: dict[str, Any]) -> None:
        account = found.get(PHASES_KEY)
        if isinstance(account, dict):
            self.account = account


def _json(text: str) -> Any:
    """As json.loads, in half the time where no blanks stand around the value."""
    try:
        found, end = scan(text, 0)
    except StopIteration:
        return json.loads(text)
    return found if end == len(text) else json.loads(text)


def _count(value: Any, otherwise: int | None) -> int | None:
    """A token count a server may report: a whole number that fits the row; else `otherwise`."""
    return value if type(value) is int and 0 <= value < 1 << 31 else otherwise


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # content parts
        return "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


def _tool_text(calls: Any) -> str:
    if not isinstance(calls, list):
        return ""
    found: list[str] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found.extend(part for key in ("name", "arguments") if isinstance(part := function.get(key), str))
    return "".join(found)


def _whole(data: str) -> bool:
    """Is this event's data complete, as far as can be told?"""
    if data == "[DONE]":
        return True
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
