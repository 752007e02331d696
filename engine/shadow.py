"""Shadow mode: a share of the finished requests runs again, alone and cold, when the engine has nothing else to do.

An answer that differs from itself alone was changed by its company: by batch-mates, by chunking, by a cached page.
The C forward gives a row the same bits alone and in any batch, so there every divergence is a fault.  The torch
forward does not; there ``margin``, how much likelier the other token was (in logits), tells noise from damage.

What must hold: a shadow is no request: it is in no queue, no count, no step of the log.  It holds pages only while the
engine is idle, uses and fills no prefix cache, and gives way between two steps; one that was disturbed starts again.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from engine.phase_clock import PhaseClock
from engine.request import Output, Request, SamplingParams
from engine.sampling import Shaper
from engine.scheduler import Slice

if TYPE_CHECKING:
    from engine.core import Engine

log = logging.getLogger("tailspan.engine")

WAITING: Final = 64  # answers that wait for their shadow; the oldest is forgotten
KEPT: Final = 256  # divergences that are kept


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer left the one that the same request gives alone.

    at: position in the answer (0-based).  step: the engine step that sampled it.  margin: logit of ``alone`` minus
    logit of ``served``, in the run alone; None: a row that was not finite.
    """

    request_id: str
    at: int
    step: int
    served: int
    alone: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class _Job:
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    answer: list[int]
    steps: list[int]


class Shadow:
    """``choose`` on the submitting thread; the rest on the engine thread."""

    def __init__(self, engine: Engine, share: float, seed: int = 0) -> None:
        self.share = share
        self.compared = 0
        self.diverged = 0
        self.forgotten = 0
        self.divergences: deque[Divergence] = deque(maxlen=KEPT)
        self._engine, self._draw = engine, random.Random(seed)
        self._jobs: deque[_Job] = deque()
        self._job: _Job | None = None
        self._request: Request | None = None

    def choose(self, request: Request) -> None:
        """Draw whether this request will be run again; then the steps of its tokens are kept."""
        if self._draw.random() < self.share:
            request.token_steps = []

    def remember(self, request: Request) -> None:
        """A request has ended well."""
        if request.token_steps is None or not request.generated:
            return
        if len(self._jobs) >= WAITING:
            self._jobs.popleft()
            self.forgotten += 1
        job = _Job(
            request.id, request.prompt_ids, request.params, request.seed, request.output_ids, request.token_steps
        )
        self._jobs.append(job)

    def step(self) -> bool:
        """One forward of one shadow; False: there is nothing to compare."""
        if self._job is None:
            if not self._jobs:
                return False
            self._begin(self._jobs.popleft())
        try:
            self._advance()
        except Exception:  # the engine goes on without this comparison
            log.exception("the shadow of request %s failed", self._job.request_id if self._job else "?")
            self._forget()
        return True

    def yield_pages(self) -> None:
        """Others want to run: give the pages back and begin again later."""
        if self._job is not None:
            self._jobs.appendleft(self._job)
            self._finish()

    def _begin(self, job: _Job) -> None:
        self._job = job
        params = replace(job.params, logprobs=None, prompt_logprobs=None)
        request = self._request = Request(f"{job.request_id}-alone", job.prompt_ids, params, PhaseClock(0), _unheard)
        request.tokens, request.seed, request.shaper = list(job.prompt_ids), job.seed, Shaper.of(params)

    def _advance(self) -> None:
        engine, request = self._engine, self._request
        if request is None:
            raise RuntimeError("no shadow has begun")
        left = len(request.tokens) - request.computed
        n = min(left, engine.scheduler.limits.budget)
        taken = engine.pool.take(engine.pool.pages(request.computed + n) - len(request.blocks))
        if taken is None:  # the pool has become too small for it
            self._forget()
            return
        request.blocks.extend(taken)
        logits = engine.runner.forward(
            [Slice(request, request.computed, n, n == left, n == 1 and request.generated > 0)]
        )
        request.computed += n
        if n == left:
            tokens, finite = engine.draw(logits, [request])
            self._compare(request, tokens[0] if finite[0] else None, logits[0])

    def _compare(self, request: Request, token: int | None, row: Any) -> None:
        job, at = self._job, request.generated
        if job is None:
            raise RuntimeError("no shadow has begun")
        served = job.answer[at]
        if token != served:
            margin = None if token is None else float(row[token] - row[served])
            found = Divergence(job.request_id, at, job.steps[at], served, -1 if token is None else token, margin)
            self.divergences.append(found)
            self.diverged += 1
            log.error("an answer differs from itself alone: %s", asdict(found))
        elif at + 1 < len(job.answer):
            request.tokens.append(served)
            if request.shaper is not None:
                request.shaper.advance(served)
            return
        self.compared += 1
        self._finish()

    def _forget(self) -> None:
        self.forgotten += 1
        self._finish()

    def _finish(self) -> None:
        if self._request is not None:
            self._engine.pool.release(self._request.blocks)
        self._job = self._request = None


def _unheard(_output: Output) -> None:
    """Nobody listens to a shadow."""
