"""What is answered: OpenAI's JSON bodies and stream frames, as bytes ready to be written.

What must hold: the text of a stream's frames joined is the text of the answer that is not streamed; a finish reason
is never null at the end; usage counts the tokens that the engine took and made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from telemetry.names import PHASES_EVENT, PHASES_KEY

DONE: Final = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object (tokens)."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Voice:
    """What every body and frame of one answer repeats."""

    chat: bool
    id: str
    created: int  # unix seconds
    model: str
    fingerprint: str

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def whole(self, text: str, finish_reason: str, used: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**self._head("chat.completion" if self.chat else "text_completion"), "choices": [choice], "usage": used}


class Frames:
    """Frames of one stream.  What does not change is built once: a token costs one small string."""

    __slots__ = ("_after", "_before", "_end", "_head", "_voice")

    def __init__(self, voice: Voice, *, include_usage: bool) -> None:
        self._voice = voice
        self._head = dumps(voice._head("chat.completion.chunk" if voice.chat else "text_completion"))[:-1]
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        inner = b'"delta":{"content":' if voice.chat else b'"text":'
        self._before = b"data: " + self._head + b',"choices":[{"index":0,' + inner
        self._after = (b"}" if voice.chat else b"") + b',"logprobs":null,"finish_reason":null}]' + self._end

    def _choice(self, inner: bytes, finish_reason: str | None) -> bytes:
        tail = b',"logprobs":null,"finish_reason":' + dumps(finish_reason) + b"}]"
        return b"data: " + self._head + b',"choices":[{"index":0,' + inner + tail + self._end

    def role(self) -> bytes:
        """A chat stream's first frame; it carries no text."""
        return self._choice(b'"delta":{"role":"assistant","content":""}', None)

    def text(self, delta: str) -> bytes:
        """One delta."""
        return self._before + dumps(delta) + self._after

    def finish(self, finish_reason: str) -> bytes:
        """The frame that says why it ended; it carries no text."""
        return self._choice(b'"delta":{}' if self._voice.chat else b'"text":""', finish_reason)

    def usage(self, used: dict[str, Any]) -> bytes:
        """The frame without choices that carries the usage."""
        return b"data: " + self._head + b',"choices":[],"usage":' + dumps(used) + b"}\n\n"


def error_frame(body: dict[str, Any]) -> bytes:
    """An error after the stream has begun."""
    return b"data: " + dumps(body) + b"\n\n"


def phases_frame(account: dict[str, Any]) -> bytes:
    """The phase account as its own event; clients that do not know the event see an object without choices."""
    return b"event: " + PHASES_EVENT.encode() + b"\ndata: " + dumps({PHASES_KEY: account}) + b"\n\n"
