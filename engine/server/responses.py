"""What is answered: OpenAI's JSON bodies and stream frames, as bytes ready to be written.

What must hold: the text of a stream's frames joined is, choice by choice, the text of the answer that is not
streamed; a finish reason is never null at the end; usage counts the tokens that the engine took and made.
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
    """OpenAI's usage object (tokens); the prompt counts once, however many choices."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Said:
    """One choice, complete.  prompt_logprobs: vLLM's, where asked for."""

    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None


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

    def whole(self, said: list[Said], used: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self._choice(index, one) for index, one in enumerate(said)]
        body = {**self._head("chat.completion" if self.chat else "text_completion"), "choices": choices, "usage": used}
        if self.chat and said[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = said[0].prompt_logprobs
        return body

    def _choice(self, index: int, said: Said) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": said.logprobs, "finish_reason": said.finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": said.text, "refusal": None}
        else:
            choice["text"] = said.text
            if said.prompt_logprobs is not None:
                choice["prompt_logprobs"] = said.prompt_logprobs
        return choice


class Frames:
    """Frames of one stream.  What does not change is built once: a token costs one small string."""

    __slots__ = ("_after", "_before", "_end", "_head", "_inner", "_voice")

    def __init__(self, voice: Voice, *, include_usage: bool, n: int = 1) -> None:
        self._voice = voice
        self._head = dumps(voice._head("chat.completion.chunk" if voice.chat else "text_completion"))[:-1]
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._inner = b'"delta":{"content":' if voice.chat else b'"text":'
        self._before = [self._opening(index) + self._inner for index in range(n)]
        self._after = (b"}" if voice.chat else b"") + b',"logprobs":null,"finish_reason":null}]' + self._end

    def _opening(self, index: int) -> bytes:
        return b"data: " + self._head + b',"choices":[{"index":%d,' % index

    def _choice(self, index: int, inner: bytes, finish_reason: str | None, logprobs: dict[str, Any] | None) -> bytes:
        tail = b',"logprobs":' + dumps(logprobs) + b',"finish_reason":' + dumps(finish_reason) + b"}]"
        return self._opening(index) + inner + tail + self._end

    @property
    def overhead(self) -> int:
        """Bytes of a text frame without its text."""
        return len(self._before[0]) + len(self._after)

    def role(self, index: int = 0) -> bytes:
        """A chat choice's first frame; it carries no text."""
        return self._choice(index, b'"delta":{"role":"assistant","content":""}', None, None)

    def text(self, delta: str, index: int = 0, logprobs: dict[str, Any] | None = None) -> bytes:
        """One delta of a choice."""
        if logprobs is None:
            return self._before[index] + dumps(delta) + self._after
        return self._choice(index, self._inner + dumps(delta) + (b"}" if self._voice.chat else b""), None, logprobs)

    def finish(self, finish_reason: str, index: int = 0) -> bytes:
        """The frame that says why a choice ended; it carries no text."""
        return self._choice(index, b'"delta":{}' if self._voice.chat else b'"text":""', finish_reason, None)

    def usage(self, used: dict[str, Any]) -> bytes:
        """The frame without choices that carries the usage."""
        return b"data: " + self._head + b',"choices":[],"usage":' + dumps(used) + b"}\n\n"


def error_frame(body: dict[str, Any]) -> bytes:
    """An error after the stream has begun."""
    return b"data: " + dumps(body) + b"\n\n"


def phases_frame(account: dict[str, Any]) -> bytes:
    """The phase account as its own event; clients that do not know the event see an object without choices."""
    return b"event: " + PHASES_EVENT.encode() + b"\ndata: " + dumps({PHASES_KEY: account}) + b"\n\n"
