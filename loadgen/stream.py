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
from collections.abc import Callable
from json.scanner import make_scanner
from typing import Any, Final

from loadgen import responses_api
from loadgen.failure import Failure, ServerError, in_stream, of_status, retry_after_s, server_error
from loadgen.sse import Event, LineTooLongError, SseReader
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
_scan: Final[Callable[[str, int], tuple[Any, int]]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
_ERROR_BODY: Final = 64 << 10  # bytes of an error body that are kept


def _size_line(size: int) -> bytes:
    """The size line of a whole HTTP chunk of `size` bytes; a bare LF where none is so long."""
    for digits in range(1, 9):
        body = size - digits - 4
        if body > 0 and len(f"{body:x}") == digits:
            return b"%x\r\n" % body
    return b"\n"  # no chunk begins so


_SIZE_LINES: Final = tuple(map(_size_line, range(4096)))  # longer reads go the long way, which costs them less


class Shape:
    """What the usual event of a server looks like from its "choices" on; shared by the answers of one server.

    The members before that differ from stream to stream (id, time) and are the same within one.  So a stream whose
    first event has no more than plain members there knows its usual event before it has seen one.
    """

    __slots__ = ("middle", "suffix")

    def __init__(self) -> None:
        self.middle = ""  # from '"choices":' to the text; empty: not known
        self.suffix = ""


class Answer:
    """The facts of one answer; `failure` None after `end` means that it is complete.

    Text comes in the order of arrival and holds all tokens, reasoning and tool calls included (`pieces`, one string
    per token chunk; `stamps`, its moment; `usage_marks`, the completion tokens reported with it, -1 where none were).
    """

    __slots__ = (
        "_between",
        "_body",
        "_body_size",
        "_chunk_tail",
        "_frame_head",
        "_frame_tail",
        "_marks",
        "_most",
        "_prefix",
        "_reader",
        "_shape",
        "_suffix",
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
        self._prefix = ""  # see _learn; empty: nothing learned
        self._suffix = ""
        self._frame_head = b""  # the same in bytes, from the beginning to the end of an event
        self._frame_tail = b""
        self._chunk_tail = b""  # of the HTTP chunk that holds such an event and nothing else
        self._most = min(line_limit, len(_SIZE_LINES) - 1)
        self._marks: list[int] = []  # of the first pieces; those beyond have none
        self._between = False  # learned, and the next read begins an event
        self._shape = shape
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
            if self._between and data.startswith(self._frame_head) and data.endswith(self._frame_tail):
                # One whole event that says what `_learn` learned: most reads are this, so nothing is called.
                text = data[len(self._frame_head) : -len(self._frame_tail)].decode("utf-8", "replace")
                if (
                    text
                    and text.isprintable()
                    and '"' not in text
                    and "\\" not in text
                    and len(data) <= self.line_limit
                ):
                    self.stamps.append(now_ns)
                    self.pieces.append(text)
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
                self._frame_head != b""
                and self.first_content_ns is not None  # which `take` leaves alone
                and not self.done_marker
                and reader.between_events
            )
        elif self.status is not None and 200 <= self.status < 300:
            self._body.append(data)  # the connection limits its size
        elif self._body_size < _ERROR_BODY:
            self._body.append(data)
            self._body_size += len(data)

    def taker(self) -> Callable[[bytes, int], int] | None:
        """`take`, where the next read may be what it takes."""
        return self.take if self._between else None

    def take(self, data: bytes, now_ns: int) -> int:
        """One read that is one HTTP chunk with one event, which says what `_learn` learned with another text.

        The bytes of body in it, or 0: then it is something else, nothing happened, and it goes the long way.  Most
        reads are this, so nothing is called.  Only for a body in chunks, between two of them.
        """
        size = len(data)
        if size > self._most:
            return 0
        line = _SIZE_LINES[size]
        start = len(line)
        if not (data.startswith(line) and data.startswith(self._frame_head, start) and data.endswith(self._chunk_tail)):
            return 0
        try:
            text = data[start + len(self._frame_head) : -len(self._chunk_tail)].decode()
        except UnicodeDecodeError:
            return 0
        if not text or not text.isprintable() or '"' in text or "\\" in text:
            return 0
        self.stamps.append(now_ns)
        self.pieces.append(text)
        return size - start - 2

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
        if (
            self._prefix
            and data.startswith(self._prefix)
            and data.endswith(self._suffix)
            and event.type == "message"
            and (text := data[len(self._prefix) : -len(self._suffix)]).isprintable()
            and text
            and '"' not in text
            and "\\" not in text
        ):
            self._token(text, -1, now_ns, content=True)
            return
        if data == "[DONE]":
            self.done_marker = True
            self.end_ns = now_ns
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
        self._chunk(found, now_ns)
        if first and self._shape is not None and self._shape.middle and _is_plain(found):
            self._foresee(data, self._shape)
            return
        if (
            len(self.pieces) == tokens + 1
            and self.finish_reason is None
            and not found.get("usage")
            and not (self._prefix and data.startswith(self._prefix) and data.endswith(self._suffix))
        ):
            self._learn(data, found["choices"], self._shape if _is_plain(found) else None)

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

    def _learn(self, data: str, choices: list[Any], shape: Shape | None) -> None:
        """Remember what stands around the text of this chunk.

        An event of the same stream with the same characters before and after a string that needs no unescaping says
        the same with another text: it is not parsed again.  Parsing JSON is most of the cost of an event.
        """
        self._prefix, self._frame_head = "", b""
        if len(choices) != 1 or choices[0].get("logprobs"):
            return
        delta = choices[0].get("delta")
        key = '"text":' if delta is None else '"content":'
        if (delta is not None and len(delta) != 1) or data.count(key) != 1:
            return  # a role beside the content, say: the next chunks will look different
        start = data.index(key) + len(key)
        start += data[start : start + 1] == " "
        if data[start : start + 1] == '"':
            _, end = _scan(data, start)
            self._know(data[: start + 1], data[end - 1 :])
            stem = _stem(data)
            if shape is not None and stem:
                shape.middle, shape.suffix = self._prefix[len(stem) :], self._suffix

    def _foresee(self, data: str, shape: Shape) -> None:
        """Know the usual event from the first one of any kind.

        The event so foreseen is valid JSON and says what it said in the stream that it was learned in: its beginning
        is a beginning of an event of this stream, its end that of the learned one, and both meet behind the same key
        of the outermost object.
        """
        stem = _stem(data)
        if stem:
            self._know(stem + shape.middle, shape.suffix)

    def _know(self, prefix: str, suffix: str) -> None:
        """An event with a plain text between these says that text and nothing else."""
        self._prefix, self._suffix = prefix, suffix
        self._frame_head = b"data: " + prefix.encode()
        self._frame_tail = suffix.encode() + b"\n\n"
        self._chunk_tail = self._frame_tail + b"\r\n"

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


def _stem(data: str) -> str:
    """An event up to its choices; empty where there are other objects or lists before them."""
    at = data.find('"choices":')
    stem = data[: at + 10]
    return stem if at > 0 and stem.count("{") == 1 and "[" not in stem and stem[0] == "{" else ""


def _is_plain(found: dict[str, Any]) -> bool:
    """Does an event say nothing but its choices and who sent it?"""
    return not (found.get("usage") or "error" in found or "timings" in found or "type" in found)


def _json(text: str) -> Any:
    """As json.loads, in half the time where no blanks stand around the value."""
    try:
        found, end = _scan(text, 0)
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
