"""Asking a server a canary: one plain request, its text, and the probabilities behind it.

Owns the wire of canaries (OpenAI's chat and completions, vLLM's ``prompt_logprobs``).  Must always hold: a server that
does not answer, or not in that shape, is a UserError that says what was asked; nothing is guessed from a half answer.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from loadgen.way import DIRECT, Way
from models.errors import UserError
from telemetry.drift import Position

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TOP: Final = 20  # OpenAI's and vLLM's bound on top_logprobs
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer: its text, its log-probability, and the likeliest ones beside it."""

    text: str
    logprob: float
    top: Mapping[str, float]

    @property
    def margin(self) -> float:
        """How far the likeliest token is ahead of the next, in nats; infinite where only one is told."""
        values = sorted(self.top.values(), reverse=True)
        return values[0] - values[1] if len(values) > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: empty where the server gives no logprobs."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused(Exception):
    """The server answered with another status than 200: an option it does not have, or trouble."""

    status: int
    said: str


@dataclass(frozen=True, slots=True)
class Client:
    """One target.  headers: with the secrets in them."""

    target: str
    model: str
    headers: Mapping[str, str]
    timeout_s: float = TIMEOUT_S
    way: Way = DIRECT

    def chat(self, prompt: str, max_tokens: int, *, logprobs: bool = False, **options: Any) -> Answer:
        """Greedy unless options say otherwise.  Raises Refused, UserError."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            **options,
        }
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": TOP}
        return _answer(self._post(CHAT, body))

    def score(self, text: str) -> list[Position]:
        """The probabilities of a text's own tokens, from one prefill, without sampling.  Raises Refused, UserError."""
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TOP}
        found = self._post(COMPLETIONS, body)
        try:
            entries = found["choices"][0]["prompt_logprobs"]
            return [_position(entry) for entry in entries if entry]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise Refused(200, "an answer without prompt_logprobs") from None

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self.target + path,
            data=json.dumps(body).encode(),
            headers={**self.headers, "Content-Type": "application/json"},
        )
        try:
            with self.way.opener.open(request, timeout=self.timeout_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.read(300).decode("utf-8", "replace")) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(
                f"no answer to a canary ({reason})", where=self.target, remedy="is the server there and ready?"
            ) from None
        except ValueError:
            raise UserError("the answer to a canary is not JSON", where=self.target + path) from None


def ask_all(client: Client, asked: Sequence[tuple[str, int]], concurrency: int, *, logprobs: bool) -> list[Answer]:
    """Several prompts (text, max_tokens), so many at a time, answers in their order.  Raises Refused, UserError."""

    def one(prompt: tuple[str, int]) -> Answer:
        return client.chat(prompt[0], prompt[1], logprobs=logprobs)

    if concurrency <= 1:
        return [one(prompt) for prompt in asked]
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, asked))


def _answer(found: Any) -> Answer:
    try:
        choice = found["choices"][0]
        usage = found.get("usage") or {}
        content = (choice.get("logprobs") or {}).get("content") or []
        return Answer(
            text=str(choice["message"].get("content") or ""),
            tokens=tokens_of(content),
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            choices=tuple(str(one["message"].get("content") or "") for one in found["choices"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise Refused(200, "an answer that is no chat completion") from None


def tokens_of(content: Sequence[Mapping[str, Any]]) -> tuple[Token, ...]:
    """OpenAI's entries of logprobs as tokens.  KeyError, TypeError or ValueError where they are none."""
    return tuple(_token(entry) for entry in content)


def _token(entry: Mapping[str, Any]) -> Token:
    """A token by its bytes where they are told, since several tokens may spell half a character alike."""

    def name(one: Mapping[str, Any]) -> str:
        raw = one.get("bytes")
        return bytes(raw).decode("latin-1") if isinstance(raw, list) else str(one["token"])

    top = {name(one): float(one["logprob"]) for one in entry.get("top_logprobs") or []}
    return Token(name(entry), float(entry["logprob"]), top)


def _position(entry: Mapping[str, Mapping[str, Any]]) -> Position:
    """vLLM's form: token id -> {logprob, rank, …}, the token that is really there first."""
    actual = next(iter(entry))
    top = {token: float(value["logprob"]) for token, value in entry.items()}
    return Position(top, top[actual])
