"""Which tokens the next step computes.  One token budget a step: decodes first, then chunks of prefill.

``schedule`` picks, ``preempt`` takes pages away from the youngest, ``finish`` gives everything back.  Termination:
a request is admitted only when the whole of it so far fits beside a watermark, the oldest running request is never
preempted for another one, and none is accepted that is larger than the pool; so the oldest always gets on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.blocks import ROOT, BlockPool
from engine.config import EngineConfig
from engine.request import Request


@dataclass(slots=True)
class Slice:
    """Tokens ``start .. start + n`` of a request, computed in one step.

    sample: the last of them is the newest, so a token follows.  decode: that token is not the first.
    """

    request: Request
    start: int
    n: int
    sample: bool

    @property
    def decode(self) -> bool:
        """One new token after an earlier one, as opposed to (a chunk of) prefill or recompute."""
        return self.n == 1 and self.sample and self.request.generated > 0

    @property
    def all_logits(self) -> bool:
        """Is every row's logits wanted (for logprobs of the prompt), or the sampling one's alone?"""
        return self.request.wants_prompt

    @property
    def rows(self) -> int:
        """Rows of logits that it takes."""
        return self.n if self.all_logits else int(self.sample)


@dataclass(slots=True)
class Plan:
    """One step: slices of one token first, then chunks."""

    slices: list[Slice] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(piece.n for piece in self.slices)


class Scheduler:
    """Owns the queue, the batch and the pool.  ``running`` is in order of arrival: the last is the youngest."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.config, self.pool = config, pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._reserve = int(pool.total * config.watermark)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        request.state = "waiting"
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Anything to compute or to admit?"""
        return bool(self.running or self.waiting)

    def schedule(self) -> Plan:
        """The next step.  Pages for every token in it are already in the requests' hands."""
        plan = Plan()
        budget = self.config.token_budget
        budget -= self._decodes(plan)
        budget -= self._chunks(plan, budget)
        if not plan.preempted:  # what was just taken away must not go to the next in the queue
            self._admit(plan, budget)
        return plan

    def _decodes(self, plan: Plan) -> int:
        for request in list(self.running):
            if (
                request.state == "running"
                and len(request.tokens) - request.computed == 1
                and self._grow(request, 1, plan)
            ):
                plan.slices.append(Slice(request, request.computed, 1, True))
        self._drop_preempted(plan)
        return len(plan.slices)

    def _chunks(self, plan: Plan, budget: int) -> int:
        spent = 0
        for request in list(self.running):
            left = len(request.tokens) - request.computed
            if request.state != "running" or left <= 1 or budget <= spent:
                continue
            n = min(left, budget - spent)
            if self._grow(request, n, plan):
                plan.slices.append(Slice(request, request.computed, n, n == left))
                spent += n
        self._drop_preempted(plan)
        return spent

    @staticmethod
    def _drop_preempted(plan: Plan) -> None:
        """Leave out what lost its pages to an older request after it was picked."""
        plan.slices = [piece for piece in plan.slices if piece.request.state == "running"]

    def _admit(self, plan: Plan, budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) < self.config.max_batch:
            request = self.waiting[0]
            if request.leader is not None and request.leader.leading:
                return
            pages, chain = ([], ROOT) if request.wants_prompt else self.pool.match(request.tokens)
            need = self.pool.pages(len(request.tokens)) - len(pages)
            reserve = self._reserve if self.running else 0
            if need + reserve > self.pool.available:
                self.pool.release(pages)
                return
            self.waiting.popleft()
            request.blocks, request.chain, request.registered = pages, chain, len(pages)
            request.computed = len(pages) * self.pool.size
            request.state = "running"
            self.running.append(request)
            plan.cached_tokens += request.computed
            plan.admitted.append(request)
            n = min(len(request.tokens) - request.computed, budget)
            taken = self.pool.take(self.pool.pages(request.computed + n) - len(pages))
            if taken is None:
                raise RuntimeError("the pool promised pages that it does not have")
            request.blocks.extend(taken)
            plan.slices.append(Slice(request, request.computed, n, request.computed + n == len(request.tokens)))
            budget -= n

    def _grow(self, request: Request, n: int, plan: Plan) -> bool:
        """Pages for ``n`` more tokens, at the cost of the youngest others if need be; False: it lost its own."""
        need = self.pool.pages(request.computed + n) - len(request.blocks)
        while need > self.pool.available:
            victim = self.running[-1]
            self.preempt(victim, plan)
            if victim is request:
                return False
        taken = self.pool.take(need)
        if taken is None:
            raise RuntimeError("the pool promised pages that it does not have")
        request.blocks.extend(taken)
        return True

    def preempt(self, request: Request, plan: Plan) -> None:
        """Take its pages; it goes to the head of the queue and computes its tokens again."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.lost = max(request.lost, request.computed)
        request.blocks, request.chain, request.registered, request.computed = [], ROOT, 0, 0
        request.state = "waiting"
        self.waiting.appendleft(request)
        plan.preempted.append(request)

    def commit(self, piece: Slice) -> None:
        """The tokens of a slice are computed.

        Pages that became full enter the prefix index only with a finite sample behind them: until then nobody has
        looked at what they hold.
        """
        request, size = piece.request, self.pool.size
        request.computed += piece.n
        while piece.sample and (request.registered + 1) * size <= request.computed:
            page = request.registered
            tokens = request.tokens[page * size : (page + 1) * size]
            request.chain = self.pool.register(request.blocks[page], request.chain, tokens)
            request.registered += 1

    def finish(self, request: Request) -> None:
        """Take it out of whatever state it is in and give its pages back, once."""
        if request.state == "running":
            self.running.remove(request)
        elif request.state == "waiting":
            self.waiting.remove(request)
        else:
            raise RuntimeError(f"request {request.id} is {request.state}, it cannot finish again")
        self.pool.release(request.blocks)
        request.blocks = []
        request.state = "finished"

    def violations(self) -> list[str]:
        """Broken laws of queue, batch and pool; [] when all hold."""
        wrong = self.pool.violations([request.blocks for request in self.running])
        for request in self.running:
            if not 0 <= request.computed <= len(request.tokens):
                wrong.append(f"request {request.id}: computed {request.computed} of {len(request.tokens)} tokens")
            if len(request.blocks) < self.pool.pages(request.computed):
                wrong.append(f"request {request.id}: {len(request.blocks)} pages for {request.computed} tokens")
        if any(request.blocks for request in self.waiting):
            wrong.append("a waiting request holds pages")
        if len(self.running) > self.config.max_batch:
            wrong.append(f"{len(self.running)} requests in a batch of {self.config.max_batch}")
        return wrong
