"""Which tokens the next step computes.  One token budget a step: decodes first, then chunks of prefill.

``schedule`` picks, ``preempt`` takes pages away from the one of greatest rank (``engine.policy``), ``finish`` gives
everything back.  Termination: a request is admitted only when the whole of it so far fits beside a watermark and
beside what the admitted ones were promised, the one of least rank is never preempted for another, and none is
accepted that is larger than the pool; so the one of least rank always gets on.

A long prompt does not stall the others: while somebody stands behind it, it takes at most half of what is left of
the budget, so the first of those behind starts in the next step.  It does not starve either: nobody of greater rank
is admitted past it, and once admitted it gets at least half of every step's prefill budget, so it ends in at most
twice the steps it would take alone.  What the ones behind cannot use goes back to it in the same step.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from engine.blocks import ROOT, BlockPool
from engine.config import EngineConfig
from engine.policy import POLICIES, WaitingList, order
from engine.request import Request


@dataclass(slots=True)
class Slice:
    """Tokens ``start .. start + n`` of a request, computed in one step.

    sample: the last of them is the newest, so a token follows.  decode: it is one token alone, and not the first one
    of its answer, as opposed to (a chunk of) prefill or recompute.
    """

    request: Request
    start: int
    n: int
    sample: bool
    decode: bool = False

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
    """One step: slices of one token first, then chunks.

    steady: requests that decode one token without a slice of their own, ahead of all slices (``engine.cohort``, in
    virtual time alone).
    """

    slices: list[Slice] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted_cached: list[int] = field(default_factory=list)  # tokens of each that the prefix cache had
    steady: int = 0

    @property
    def size(self) -> int:
        """Requests in this step."""
        return len(self.slices) + self.steady

    @property
    def cached_tokens(self) -> int:
        """Tokens that the prefix cache spared those who were admitted."""
        return sum(self.admitted_cached)

    @property
    def tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(piece.n for piece in self.slices) + self.steady


class Scheduler:
    """Owns the queue, the batch and the pool.  ``running`` is in order of rank: the last loses its pages first."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.config, self.pool = config, pool
        self.waiting = WaitingList(POLICIES[config.policy])
        self.running: list[Request] = []
        self.shortages = 0  # times that pages were wanted and not there
        self._arrivals = 0
        self._turned_away: Request | None = None  # counted among the shortages already
        self._now_ns = 0

    def add(self, request: Request, now_ns: int) -> None:
        """Put a new request into the queue."""
        self._arrivals += 1
        request.number, request.state = self._arrivals, "waiting"
        self.waiting.add(request, now_ns)

    @property
    def has_work(self) -> bool:
        """Anything to compute or to admit?"""
        return bool(self.running or self.waiting)

    def schedule(self, now_ns: int) -> Plan:
        """The next step.  Pages for every token in it are already in the requests' hands."""
        plan = Plan()
        self._now_ns = now_ns
        budget = self.config.token_budget
        budget -= self._decodes(plan)
        budget -= self._chunks(plan, budget)
        if not plan.preempted:  # what was just taken away must not go to the next in the queue
            budget -= self._admit(plan, budget)
            self._top_up(plan, budget)
        return plan

    def _decodes(self, plan: Plan) -> int:
        size = self.pool.size
        for request in list(self.running):
            computed = request.computed
            if len(request.tokens) - computed != 1 or request.state != "running":
                continue
            if computed < len(request.blocks) * size or self._grow(request, 1, plan):  # most have room in their page
                plan.slices.append(Slice(request, computed, 1, True, computed >= len(request.prompt_ids)))
        self._drop_preempted(plan)
        return len(plan.slices)

    def _chunks(self, plan: Plan, budget: int) -> int:
        """Chunks of the prompts that run, least rank first; half of what is left while somebody stands behind."""
        spent = 0
        prefills = [request for request in self._changing() if len(request.tokens) - request.computed > 1]
        for at, request in enumerate(prefills):
            room = budget - spent
            if request.state != "running" or room <= 0:
                continue
            left = len(request.tokens) - request.computed
            n = min(left, _share(room, behind=at + 1 < len(prefills) or self._may_admit))
            if self._grow(request, n, plan):
                plan.slices.append(Slice(request, request.computed, n, n == left))
                spent += n
        self._drop_preempted(plan)
        return spent

    def _changing(self) -> list[Request]:
        """Those of the batch that may need more than the one page that a decode grows into; all, to be sure."""
        return self.running

    @property
    def _may_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.config.max_batch

    @staticmethod
    def _drop_preempted(plan: Plan) -> None:
        """Leave out what lost its pages to an older request after it was picked."""
        if plan.preempted:
            plan.slices = [piece for piece in plan.slices if piece.request.state == "running"]

    def _admit(self, plan: Plan, budget: int) -> int:
        """Start requests from the head of the queue, never past it; returns the tokens spent."""
        spent = 0
        promised = sum(max(0, self.pool.pages(len(one.tokens)) - len(one.blocks)) for one in self._changing())
        while spent < budget and self._may_admit:
            request = self.waiting.head(self._now_ns)
            if request.leader is not None and request.leader.leading:
                break
            pages, chain = ([], ROOT) if request.wants_prompt else self.pool.match(request.tokens)
            need = self.pool.pages(len(request.tokens)) - len(pages)
            reserve = int(self.pool.total * self.config.watermark) if self.running else 0
            if need + promised + reserve > self.pool.available:
                self.pool.release(pages)
                self.shortages += request is not self._turned_away
                self._turned_away = request
                break
            self.waiting.remove(request)
            request.blocks, request.chain, request.registered = pages, chain, len(pages)
            request.computed = len(pages) * self.pool.size
            request.state = "running"
            insort(self.running, request, key=order)
            plan.admitted.append(request)
            plan.admitted_cached.append(request.computed)
            left = len(request.tokens) - request.computed
            n = min(left, _share(budget - spent, behind=self._may_admit))
            taken = self.pool.take(self.pool.pages(request.computed + n) - len(pages))
            if taken is None:
                raise RuntimeError("the pool promised pages that it does not have")
            request.blocks.extend(taken)
            promised += need - len(taken)
            decode = left == 1 and request.generated > 0  # a cached prefix spared all but its newest token
            plan.slices.append(Slice(request, request.computed, n, n == left, decode))
            spent += n
        return spent

    def _top_up(self, plan: Plan, budget: int) -> None:
        """What nobody else could use goes to the chunks of this step, least rank first, if pages are there."""
        for piece in plan.slices:
            if budget <= 0:
                return
            request = piece.request
            n = min(len(request.tokens) - piece.start - piece.n, budget)
            need = self.pool.pages(piece.start + piece.n + n) - len(request.blocks)
            if n <= 0 or need > self.pool.available:
                continue
            request.blocks.extend(self.pool.take(need) or ())
            piece.n += n
            piece.sample = piece.start + piece.n == len(request.tokens)
            budget -= n

    def _grow(self, request: Request, n: int, plan: Plan) -> bool:
        """Pages for ``n`` more tokens, at the cost of those of greater rank if need be; False: it lost its own."""
        need = self.pool.pages(request.computed + n) - len(request.blocks)
        while need > self.pool.available:
            self.shortages += 1
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
        """Take its pages; it goes back into the queue, at its rank, and computes its tokens again."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.lost = max(request.lost, request.computed)
        request.blocks, request.chain, request.registered, request.computed = [], ROOT, 0, 0
        request.state = "waiting"
        self.waiting.add(request, self._now_ns)
        plan.preempted.append(request)

    def commit(self, piece: Slice) -> None:
        """The tokens of a slice are computed.

        Pages that became full enter the prefix index only with a finite sample behind them: until then nobody has
        looked at what they hold.
        """
        request, size = piece.request, self.pool.size
        request.computed += piece.n
        if not self.pool.prefix_cache:
            return
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
        if self.running != sorted(self.running, key=order):
            wrong.append("the batch is not in order of rank")
        if self.waiting.tokens != sum(len(request.tokens) for request in self.waiting):
            wrong.append("the tokens of the waiting requests are miscounted")
        if len(self.running) > self.config.max_batch:
            wrong.append(f"{len(self.running)} requests in a batch of {self.config.max_batch}")
        return wrong


def _share(room: int, *, behind: bool) -> int:
    """Tokens of what is left of a step's budget that one prompt may take."""
    return -(-room // 2) if behind else room
