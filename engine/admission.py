"""Who may join the queue: limits on its length, its tokens, and on the time to the first token that it implies.

A refusal is decided in ``submit``, on the caller's thread, from a few sums: microseconds.  It carries Retry-After:
the time after which the backlog should be down to half of the limit that it broke, so that clients that come back
find room and not the next full queue.

The time comes from a step-time model, fitted while the engine runs by recursive least squares:

    seconds(step) = w0 + w1 tokens + w2 sequences + w3 context tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.request import LENGTH, STOP, QueueFull, Request, TokensFull, TooSlow

FORGET: Final = 0.998  # weight of a step against the next one: half of a fit is what came in the last 350 steps
WARM_STEPS: Final = 20  # before that the model predicts nothing and nothing is refused by it
TYPICAL: Final = (128.0, 8.0, 2048.0)  # tokens, sequences, context: their scale, so that the fit is well posed
SPREAD_MAX: Final = 1e6
AVERAGE: Final = 0.05  # share of the newest value in the running means
CLIP: Final = 4.0  # a step slower than this many predictions counts as this many: it was disturbed
RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """requests, tokens: most that may wait.  ttft_s: longest predicted time to the first token.  None: no limit."""

    requests: int
    tokens: int | None = None
    ttft_s: float | None = None


class StepModel:
    """Seconds of a step from its tokens, sequences and context tokens (attended to, summed over sequences).

    Recursive least squares with forgetting (e.g. Haykin, Adaptive Filter Theory, ch. 10).  ``error`` is the running
    mean of |predicted - measured| / measured, each prediction made before its step was seen.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.error = 0.0
        self._weights = [0.0] * 4
        self._spread = [[1e3 if row == column else 0.0 for column in range(4)] for row in range(4)]

    def predict(self, tokens: float, sequences: float, context: float) -> float:
        """Seconds; 0 before the model is warm."""
        if self.steps < WARM_STEPS:
            return 0.0
        return max(0.0, _dot(self._weights, _features(tokens, sequences, context)))

    def learn(self, tokens: int, sequences: int, context: int, seconds: float) -> None:
        """Take one step in.  Plain floats: at four weights numpy's calls cost five times the arithmetic."""
        x = _features(tokens, sequences, context)
        guess = _dot(self._weights, x)
        if self.steps >= WARM_STEPS:
            self.error += AVERAGE * (abs(max(guess, 0.0) - seconds) / max(seconds, 1e-9) - self.error)
            seconds = min(seconds, CLIP * max(guess, 1e-6))
        along = [_dot(row, x) for row in self._spread]
        scale = 1.0 / (FORGET + _dot(along, x))
        step = (seconds - guess) * scale
        self._weights = [weight + step * one for weight, one in zip(self._weights, along, strict=True)]
        # steps that are all alike teach nothing about the other directions: what is unknown there stays bounded
        grow = 1.0 / FORGET if sum(self._spread[k][k] for k in range(4)) < SPREAD_MAX else 1.0
        a, b, c, d = along
        for row, one in zip(self._spread, along, strict=True):
            cut = one * scale
            row[:] = (
                (row[0] - cut * a) * grow,
                (row[1] - cut * b) * grow,
                (row[2] - cut * c) * grow,
                (row[3] - cut * d) * grow,
            )
        self.steps += 1


@dataclass(slots=True)
class Backlog:
    """What is ahead of a new request.  tokens: of prompts that wait; unread: of prompts that run, not yet computed."""

    waiting: int = 0
    tokens: int = 0
    running: int = 0
    unread: int = 0
    context: int = 0  # tokens that the running ones attend to


class Admission:
    """Decides; owns the step-time model and the mean length of an answer.

    ``decide`` on any thread, ``step`` and ``over`` on the engine thread; a torn read costs a guess, not a law.
    """

    def __init__(self, limits: Limits, max_batch: int, token_budget: int) -> None:
        self.limits = limits
        self.model = StepModel()
        self._max_batch, self._budget = max_batch, token_budget
        self._answer = 0.0  # running mean of tokens in an answer
        self._answers = 0

    def decide(self, request: Request, backlog: Backlog) -> None:
        """Raises QueueFull, TokensFull or TooSlow; else notes on the request what was predicted for it."""
        limits, tokens = self.limits, len(request.prompt_ids)
        if backlog.waiting >= limits.requests:
            raise QueueFull(limits.requests, self._retry(backlog, 0.5 * limits.requests / max(1, backlog.waiting)))
        # a prompt above the limit alone still gets in where nobody waits: it would come back for ever
        if limits.tokens is not None and backlog.waiting and backlog.tokens + tokens > limits.tokens:
            keep = 0.5 * limits.tokens / max(1, backlog.tokens)
            raise TokensFull(backlog.tokens, tokens, limits.tokens, self._retry(backlog, keep))
        self._predict(request, tokens, backlog)

    def _predict(self, request: Request, tokens: int, backlog: Backlog) -> None:
        """Note what is predicted for it; raises TooSlow where that is above the limit."""
        limits, ttft = self.limits, self.ttft_s(tokens, backlog)
        if limits.ttft_s is not None and ttft > limits.ttft_s:
            raise TooSlow(ttft, limits.ttft_s, _bounded(ttft - 0.5 * limits.ttft_s))
        request.predicted_ttft_ns = round(ttft * 1e9) if self.model.steps >= WARM_STEPS else None
        request.predicted_ns = round(1e9 * self.duration_s(tokens, request.params.max_tokens, backlog))

    def ttft_s(self, prompt_tokens: int, backlog: Backlog) -> float:
        """Seconds until the first token of a prompt that comes now; 0 while nothing is known.

        Two things must come first, at once, so the longer counts: the prompts ahead are computed, in steps of the
        budget that decodes leave; and a place in the batch is free.  Places are freed at the rate at which a full
        batch finishes mean answers.
        """
        step = self._step_s(backlog)
        room = max(1, self._budget - min(backlog.running, self._max_batch))
        prompts = math.ceil((backlog.unread + backlog.tokens) / room) * step
        places = max(0, backlog.running + backlog.waiting + 1 - self._max_batch) * self._place_s(backlog)
        return max(prompts, places) + math.ceil(prompt_tokens / room) * step

    def duration_s(self, prompt_tokens: int, max_tokens: int, backlog: Backlog) -> float:
        """Seconds from the first step to the last token of a request that starts among those that run now."""
        sequences = min(backlog.running + 1, self._max_batch)
        answer = min(max_tokens, self._answer) if self._answers else max_tokens
        decode = self.model.predict(sequences, sequences, backlog.context + prompt_tokens)
        return math.ceil(prompt_tokens / max(1, self._budget - sequences)) * self._step_s(backlog) + answer * decode

    def drain_s(self, backlog: Backlog) -> float:
        """Seconds until everything that waits has got its first token."""
        return self.ttft_s(0, backlog)

    def _step_s(self, backlog: Backlog) -> float:
        """A step of a whole budget."""
        sequences = min(backlog.running + 1, self._max_batch)
        return self.model.predict(self._budget, sequences, backlog.context + self._budget)

    def _place_s(self, backlog: Backlog) -> float:
        """Mean time between two ends in a full batch."""
        decode = self.model.predict(self._max_batch, self._max_batch, backlog.context)
        return self._answer * decode / self._max_batch

    def _retry(self, backlog: Backlog, keep: float) -> float:
        """Seconds until only the share ``keep`` of the backlog is left."""
        return _bounded((1.0 - keep) * self.drain_s(backlog))

    def step(self, tokens: int, sequences: int, context: int, seconds: float) -> None:
        """A step was done."""
        self.model.learn(tokens, sequences, context, seconds)

    def over(self, request: Request, reason: str) -> None:
        """A request has ended."""
        if reason in (STOP, LENGTH):
            self._answers += 1
            self._answer += max(AVERAGE, 1.0 / self._answers) * (request.generated - self._answer)


def _bounded(seconds: float) -> float:
    return min(max(seconds, RETRY_MIN_S), RETRY_MAX_S)


_Vector = Sequence[float]


def _features(tokens: float, sequences: float, context: float) -> _Vector:
    return 1.0, tokens / TYPICAL[0], sequences / TYPICAL[1], context / TYPICAL[2]


def _dot(a: _Vector, b: _Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
