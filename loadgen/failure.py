"""Why an answer is no answer: HTTP status and error bodies to the reason codes of telemetry.names.

Owns the mapping alone.  Must always hold: every status but 2xx has a reason; what the server calls our mistake
(4xx) is never counted against the server, save a prompt beyond its context and a refusal for want of room.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from telemetry.names import BAD_REQUEST, CONTEXT_OVERFLOW, KV_OOM, REJECTED, SERVER_ERROR, STREAM_CUT

DETAIL_CHARS: Final = 500

_MEMORY: Final = re.compile(
    r"out of memory|kv[ _-]?(?:cache|pool|oom|blocks)|(?:no|not enough) (?:available |free )?blocks|never fits?",
    re.IGNORECASE,
)
_CONTEXT: Final = re.compile(
    r"context[ _]length|maximum context|max_model_len|context window|too many tokens", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Failure:
    """reason: a code of telemetry.names; detail: what the server said, cut to DETAIL_CHARS."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error object of the OpenAI API, or the text that came in its place."""

    message: str
    kind: str = ""  # "type"
    code: str = ""

    @property
    def detail(self) -> str:
        labels = " ".join(part for part in (self.kind, self.code) if part)
        return (f"{labels}: {self.message}" if labels else self.message)[:DETAIL_CHARS]

    @property
    def about_memory(self) -> bool:
        return bool(_MEMORY.search(self.message) or _MEMORY.search(self.code) or _MEMORY.search(self.kind))

    @property
    def about_context(self) -> bool:
        return self.code == "context_length_exceeded" or bool(_CONTEXT.search(self.message))


def server_error(found: Any) -> ServerError | None:
    """The error a JSON value reports ({"error": ...}, or vLLM's older {"object": "error"}); None: it reports none."""
    if not isinstance(found, dict):
        return None
    error = found.get("error")
    if error is None:
        error = found if found.get("object") == "error" else None
    if error is None:
        return None
    if not isinstance(error, dict):
        return ServerError(str(error))

    def text(key: str) -> str:
        value = error.get(key)
        return "" if value is None else str(value)

    return ServerError(text("message") or json.dumps(error)[:DETAIL_CHARS], text("type"), text("code"))


def of_status(status: int, error: ServerError) -> Failure:
    """The failure that a status other than 2xx, with its body, stands for."""
    detail = f"HTTP {status} {error.detail}".strip()[:DETAIL_CHARS]
    if status in (429, 503):
        return Failure(REJECTED, detail)
    if 400 <= status < 500:
        if error.about_context:
            return Failure(CONTEXT_OVERFLOW, detail)
        if error.code == KV_OOM or error.kind == KV_OOM:
            return Failure(KV_OOM, detail)
        return Failure(SERVER_ERROR if status == 408 else BAD_REQUEST, detail)
    if status >= 500:
        return Failure(KV_OOM if error.about_memory else SERVER_ERROR, detail)
    return Failure(BAD_REQUEST, detail)  # a redirect: the target we were given is not the API


def in_stream(error: ServerError) -> Failure:
    """The failure of an error object inside a stream that began with 200."""
    if error.about_memory:
        return Failure(KV_OOM, error.detail)
    if error.about_context:
        return Failure(CONTEXT_OVERFLOW, error.detail)
    return Failure(STREAM_CUT, f"error in the stream: {error.detail}"[:DETAIL_CHARS])


def retry_after_s(value: bytes) -> float | None:
    """Seconds a Retry-After header asks to wait (a number, or an HTTP date); None if it says nothing sensible."""
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except ValueError:
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = (moment - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds < 1e9 else None
