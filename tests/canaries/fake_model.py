"""A server with a model that can be spoilt: deterministic answers with probabilities, and one knob per fault.

It speaks what canaries ask of a server: chat completions with logprobs, options, n, and prompt_logprobs.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from telemetry.question_sets import SETS
from tests.loadgen.stub import DONE, Request, Step, chunk, event, plain, sse_head

ANSWERS = {question.prompt: question for name in SETS for question in SETS[name]()}
WORDS = [f" w{number}" for number in range(60)]


@dataclass
class FakeModel:
    """noise: nats of jitter in every logit.  What is wrong is drawn by prompt, so that it stays wrong."""

    noise: float = 0.0
    extra_prompt_tokens: int = 0  # another template
    wrong_share: float = 0.0  # of prompts whose answer is another one
    wrong_on_hit: bool = False  # the second time a prompt comes
    wrong_under_load: float = 0.0  # share of prompts whose answer is another one beside others
    lost_questions: float = 0.0  # share of questions answered wrong
    salted: bool = True  # takes a cache_salt
    ends_at: int | None = None  # the answer to a prompt without a number ends there by itself
    never_ends: bool = False
    cap: int = 10_000  # max_tokens that the server silently keeps to
    greedy_always: bool = False  # ignores temperature
    logprobs: bool = True
    prompt_logprobs: bool = True
    narrow: bool = False  # no choice is clear
    other_tokenizer: bool = False
    options: frozenset[str] = frozenset({"seed", "n", "stop"})
    seen: set[str] = field(default_factory=set)
    in_flight: int = 0
    served: int = 0
    count: Callable[[str], int] = lambda prompt: len(prompt.split())  # prompt tokens

    def play(self, request: Request) -> Iterator[Step]:
        """The script of a Stub."""
        if request.path == "/v1/models":
            yield plain("200 OK", {"data": [{"id": "fake", "max_model_len": 4096}]})
            return
        body = request.json
        self.in_flight += 1
        try:
            yield 0.002  # long enough for others to come
            loaded = self.in_flight > 1
            status, value = self._completion(body) if request.path == "/v1/completions" else self._chat(body, loaded)
            if body.get("stream") and status == "200 OK":
                yield from streamed(value)
            else:
                yield plain(status, value)
        finally:
            self.in_flight -= 1

    def _chat(self, body: dict[str, Any], loaded: bool) -> tuple[str, Any]:
        if "cache_salt" in body and not self.salted:
            return "400 Bad Request", {"error": {"message": "no cache_salt", "param": "cache_salt"}}
        for option in ("seed", "n", "stop"):
            if option in body and option not in self.options:
                return "400 Bad Request", {"error": {"message": f"no {option}", "param": option}}
        prompt = body["messages"][-1]["content"]
        self.served += 1
        hot = body.get("temperature", 1.0) > 0 and not self.greedy_always
        key = f"{body.get('seed', self.served)}" if hot else ""
        limit = min(body["max_tokens"], self.cap)
        if prompt in ANSWERS:
            text = ANSWERS[prompt].good_answer if self._draw("lost", prompt) >= self.lost_questions else "no idea"
            return "200 OK", self._value([text], [], prompt, len(text.split()), "stop")
        spoilt = self._draw("wrong", prompt) < self.wrong_share
        key_of_cache = f"{body.get('cache_salt')}|{prompt}"
        hit = key_of_cache in self.seen
        spoilt |= self.wrong_on_hit and hit
        spoilt |= loaded and self._draw("load", prompt) < self.wrong_under_load
        self.seen.add(key_of_cache)
        choices = [
            self._tokens(prompt, limit, f"{key}{number}" if hot else "", spoilt) for number in range(body.get("n", 1))
        ]
        texts = ["".join(token["token"] for token in tokens) for tokens in choices]
        if stop := body.get("stop"):
            texts = [text.split(stop[0])[0] for text in texts]
        asked = body.get("logprobs") and self.logprobs
        finish = "length"
        if self.ends_at is not None and not self.never_ends and limit > self.ends_at:
            choices, finish = [one[: self.ends_at] for one in choices], "stop"
            texts = ["".join(token["token"] for token in tokens) for tokens in choices]
        return "200 OK", self._value(texts, choices[0] if asked else [], prompt, len(choices[0]), finish, hit)

    def _value(
        self, texts: list[str], tokens: list[Any], prompt: str, count: int, finish: str, hit: bool = False
    ) -> dict[str, Any]:
        logprobs = {"content": tokens} if tokens else None
        choices = [
            {
                "index": n,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish,
                "logprobs": logprobs,
            }
            for n, text in enumerate(texts)
        ]
        size = self.count(prompt) + self.extra_prompt_tokens
        cached = {"cached_tokens": size // 2 if hit else 0}
        usage = {"prompt_tokens": size, "completion_tokens": count, "prompt_tokens_details": cached}
        return {"choices": choices, "usage": usage}

    def _tokens(self, prompt: str, limit: int, key: str, spoilt: bool) -> list[dict[str, Any]]:
        """Greedy tokens of a fixed table of logits; a spoilt answer goes another way from the third token on."""
        found = []
        for step in range(limit):
            rng = random.Random(f"{prompt}|{step}|{key}|{spoilt and step >= 2}")
            logits = {word: rng.gauss(0, 2) for word in WORDS}
            first = max(logits, key=logits.__getitem__)
            logits[first] += 0.0 if self.narrow else 6.0
            if self.noise:
                jitter = random.Random(f"{prompt}|{step}|{self.served if self.noise < 0.01 else 'fixed'}")
                logits = {word: value + jitter.gauss(0, self.noise) for word, value in logits.items()}
            total = math.log(sum(math.exp(value) for value in logits.values()))
            top = sorted(logits, key=lambda word: -logits[word])[:20]
            entries = [{"token": w, "logprob": logits[w] - total, "bytes": list(w.encode())} for w in top]
            found.append({**entries[0], "top_logprobs": entries})
        return found

    def _completion(self, body: dict[str, Any]) -> tuple[str, Any]:
        if not self.prompt_logprobs:
            return "400 Bad Request", {"error": {"message": "no prompt_logprobs", "param": "prompt_logprobs"}}
        words = body["prompt"].split()[: -1 if self.other_tokenizer else None]
        entries: list[Any] = [None]
        for place, word in enumerate(words[1:]):
            rng = random.Random(f"{word}|{place}|{self.wrong_share >= 1}")
            logits = {str(number): rng.gauss(0, 3) for number in range(30)}
            jitter = random.Random(f"{word}|{place}|noise")
            logits = {token: value + jitter.gauss(0, self.noise) for token, value in logits.items()}
            total = math.log(sum(math.exp(value) for value in logits.values()))
            ranked = sorted(logits, key=lambda token: -logits[token])
            actual = str(int(hashlib.sha256(word.encode()).hexdigest(), 16) % 30)
            kept = [actual, *(token for token in ranked[:20] if token != actual)]
            entries.append(
                {token: {"logprob": logits[token] - total, "rank": ranked.index(token) + 1} for token in kept}
            )
        return "200 OK", {"choices": [{"text": "", "prompt_logprobs": entries}]}

    def _draw(self, what: str, prompt: str) -> float:
        return random.Random(f"{what}|{prompt}").random()


def streamed(value: dict[str, Any]) -> Iterator[Step]:
    """A whole answer as the chunks of a stream, a token each where they are known."""
    choice = value["choices"][0]
    words = re.findall(r" ?[^ ]+", choice["message"]["content"])
    content = (choice["logprobs"] or {}).get("content") or [{"token": word} for word in words]
    yield sse_head(chunked=True)
    for token in content:
        told = {"content": [token]} if "logprob" in token else None
        part = {"index": 0, "delta": {"content": token["token"]}, "finish_reason": None, "logprobs": told}
        yield chunk(event({"id": "c", "model": "stub", "choices": [part]}))
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield chunk(event({"id": "c", "model": "stub", "choices": [last], "usage": value["usage"]}) + DONE)
    yield chunk(b"")
