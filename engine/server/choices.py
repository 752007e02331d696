"""One choice of an answer while it is made, and how its logprobs look in OpenAI's and vLLM's shapes.

What must hold: the entries told are those of the tokens whose text was sent, in order, none twice.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any

from engine.logprobs import TokenLogprob
from engine.request import Output, Request
from models.tokenizer import Tokenizer


@dataclass(slots=True)
class Choice:
    """What the engine has said of one choice.  token_ns: when each increment was made."""

    index: int
    work: Request
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completion_tokens: int = 0
    token_ns: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    last: Output | None = None

    def note(self, output: Output) -> None:
        """Take one output over."""
        self.last = output
        if output.token_ids:
            self.completion_tokens += len(output.token_ids)
            self.token_ns.append(output.t_ns)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason


class LogprobShapes:
    """Renders entries.  Bytes that are no whole character: U+FFFD in ``token`` with the true ``bytes`` beside it."""

    __slots__ = ("_tokenizer",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _raw(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) or self._tokenizer.decode([token], skip_special=False).encode()

    def chat(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        """The ``logprobs`` of a chat choice."""
        content = []
        for entry in entries:
            top = [self._one(token, value) for token, value in entry.top]
            content.append({**self._one(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._raw(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def text(self, entries: list[TokenLogprob], offset: int = 0) -> dict[str, Any]:
        """The ``logprobs`` of a text choice; offset: characters in its ``text`` before the answer."""
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._likeliest(entry) for entry in entries],
            "text_offset": [offset + entry.start for entry in entries],
        }

    def echo(self, work: Request, skipped: int) -> dict[str, Any]:
        """The same for its prompt; the first token follows nothing and has none.  skipped: tokens not echoed."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        offset, offsets = 0, []
        for at, token in enumerate(work.prompt_ids):
            offsets.append(offset)
            offset += len(decoder.decode(self._raw(token))) if at >= skipped else 0
        entries = work.prompt_logprobs
        return {
            "tokens": [self._name(token) for token in work.prompt_ids],
            "token_logprobs": [None, *(entry.logprob for entry in entries)],
            "top_logprobs": [None, *(self._likeliest(entry) for entry in entries)],
            "text_offset": offsets,
        }

    def echoed(self, tokens: list[int]) -> str:
        """The text of a prompt, special tokens included."""
        return self._tokenizer.decode(tokens, skip_special=False)

    def prompt(self, work: Request) -> list[dict[str, Any] | None]:
        """vLLM's ``prompt_logprobs``: per token of the prompt its own entry and the likeliest, by token id."""
        found: list[dict[str, Any] | None] = [None]
        for entry in work.prompt_logprobs:
            ranked = {token: (value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
            ranked[entry.token] = (entry.logprob, entry.rank)
            found.append(
                {
                    str(token): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self._raw(token).decode(errors="replace"),
                    }
                    for token, (value, rank) in ranked.items()
                }
            )
        return found

    def _likeliest(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the token itself where it is not among them (OpenAI's rule)."""
        found = {self._name(token): value for token, value in entry.top}
        found.setdefault(self._name(entry.token), entry.logprob)
        return found

    def _name(self, token: int) -> str:
        """Its text, or OpenAI's ``bytes:\\xe2\\x98`` for bytes that are no text: names must not run together."""
        raw = self._raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Logprobs of a text choice, one after the other."""
    return {key: [*first[key], *second[key]] for key in first}
