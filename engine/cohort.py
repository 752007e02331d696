"""The decoding requests of a batch as one thing: what happens to each of them is known ahead, so nothing is done for
each in each step.  In virtual time only, where nobody hears tokens as they come.

    seat       one request: since which step it decodes, and in which step it ends, by its length or a token that was
               drawn ahead.  While it sits, its tokens, ``computed`` and facts stand as they were when it sat down
    residue    every ``size``-th step of a seat needs a new page: seats in step with each other share a ring slot
    catch up   what its steps did to a request, when somebody looks: it ends, loses its pages, or laws are checked

What must hold: a request that has caught up is what it would be had each step been done by ``engine.scheduler`` and
``engine.commit``; pages are taken, and entered into the prefix
index, in the same steps, the latter in the same order.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.blocks import BlockPool
from engine.policy import order
from engine.request import Request

Ints = npt.NDArray[np.int64]
_rank = attrgetter("rank")
UNSEEN: Final = 0  # stands for tokens that nobody can ever see
NO_STEP: Final = 1 << 62


@dataclass(slots=True, eq=False)
class Seat:
    """first: the step after it sat down.  last: the step that gives its last token, which ends it for ``reason``.

    done: the first step that the request has not caught up with; told: tokens in it already beyond that.  ahead: its
    tokens from ``first`` on; None where nobody can see them.
    """

    request: Request
    rank: tuple[int, int]
    first: int
    last: int
    reason: str
    residue: int
    ahead: list[int] | None
    done: int
    told: int = 0


class Cohort:
    """``seats`` in order of rank.  Steps are numbers of the engine's step log."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.seats: list[Seat] = []
        self.context = 0  # tokens with KV before the step to come, over all seats
        self._of: dict[Request, Seat] = {}
        self._ring: list[dict[Seat, None]] = [{} for _ in range(pool.size)]
        self._ends: dict[int, list[Seat]] = {}  # by last step
        self._end_heap: list[int] = []
        self._names: list[str] = []
        self._ids: tuple[str, ...] | None = ()
        self._end_ns: Ints = np.zeros(1024, dtype=np.int64)  # by step: its end, and the requests of all up to it
        self._batches: Ints = np.zeros(1024, dtype=np.int64)
        self._steps = 0

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the seats' requests, in order."""
        if self._ids is None:
            self._ids = tuple(self._names)
        return self._ids

    # --- who sits ---
    def join(self, request: Request, step: int, left: int, reason: str, ahead: list[int] | None) -> None:
        """A request of the step before ``step``, which decodes from ``step`` on and ends with its ``left``-th token."""
        rank, residue = order(request), (step - request.computed) % self.pool.size
        seat = Seat(request, rank, step, step + left - 1, reason, residue, ahead, step)
        at = bisect_left(self.seats, rank, key=_rank)
        self.seats.insert(at, seat)
        self._names.insert(at, request.id)
        self._of[request] = seat
        self._ring[seat.residue][seat] = None
        if seat.last not in self._ends:
            self._ends[seat.last] = []
            heapq.heappush(self._end_heap, seat.last)
        self._ends[seat.last].append(seat)
        self.context += request.computed
        self._ids = None

    def leave(self, request: Request) -> None:
        """It caught up with all steps that were, and is a request like others again; nothing where it does not sit."""
        seat = self._of.pop(request, None)
        if seat is None:
            return
        self.catch_up(seat)
        at = bisect_left(self.seats, seat.rank, key=_rank)
        del self.seats[at], self._names[at]
        del self._ring[seat.residue][seat]
        ending = self._ends.get(seat.last)
        if ending is not None:
            ending.remove(seat)
        self.context -= request.computed
        self._ids = None

    def catch_up(self, seat: Seat) -> None:
        """Do to a request what the steps since ``seat.done`` did."""
        request, since, n = seat.request, seat.done, self._steps - seat.done
        if n <= 0:
            return
        self._tell(seat, self._steps)
        request.computed += n
        facts = request.clock.facts
        facts.steps += n
        facts.batch_sum += int(self._batches[self._steps - 1] - self._batches[since - 1])
        facts.step_last = self._steps - 1
        gap = int(np.diff(self._end_ns[since - 1 : self._steps]).max())
        facts.decode_max_gap_ns = max(facts.decode_max_gap_ns, gap)
        request.token_ns = int(self._end_ns[self._steps - 1])
        if request.token_steps is not None:
            request.token_steps.extend(range(since, self._steps))
        seat.done, seat.told = self._steps, 0

    def _tell(self, seat: Seat, step: int) -> None:
        """Append the tokens of the steps before ``step``."""
        n = step - seat.done - seat.told
        if n > 0:
            at = seat.done + seat.told - seat.first
            seat.request.tokens += [UNSEEN] * n if seat.ahead is None else seat.ahead[at : at + n]
            seat.told += n

    # --- steps ---
    def first_end(self) -> int:
        """The next step that ends a seat; NO_STEP where nobody sits."""
        heap = self._end_heap
        while heap and not self._ends.get(heap[0]):
            self._ends.pop(heapq.heappop(heap), None)
        return heap[0] if heap else NO_STEP

    def needs(self, step: int) -> int:
        """Pages that the seats need for a step."""
        return len(self._ring[step % self.pool.size])

    def take_pages(self, step: int) -> None:
        """A page for each seat that needs one; they must be there."""
        growing = self._ring[step % self.pool.size]
        if growing:
            taken = self.pool.take(len(growing))
            if taken is None:
                raise RuntimeError("the pool promised pages that it does not have")
            for seat, page in zip(growing, taken, strict=True):
                seat.request.blocks.append(page)

    def enter_pages(self, step: int) -> None:
        """Pages that a step filled go into the prefix index."""
        pool, size = self.pool, self.pool.size
        filled = self._ring[(step + 1) % size]
        if not pool.prefix_cache or not filled:
            return
        for seat in sorted(filled, key=_rank):
            request = seat.request
            self._tell(seat, step + 1)
            page = request.registered
            tokens = request.tokens[page * size : (page + 1) * size]
            request.chain = pool.register(request.blocks[page], request.chain, tokens)
            request.registered += 1

    def stepped(self, step: int, ends_ns: Ints | list[int], batch: int) -> None:
        """Steps from ``step`` on are over, at ``ends_ns``, with ``batch`` requests in each."""
        n = len(ends_ns)
        until = step + n
        while until > len(self._end_ns):
            self._end_ns = np.concatenate([self._end_ns, np.zeros_like(self._end_ns)])
            self._batches = np.concatenate([self._batches, np.zeros_like(self._batches)])
        before = int(self._batches[step - 1]) if step else 0
        if n == 1:
            self._end_ns[step], self._batches[step] = ends_ns[0], before + batch
        else:
            self._end_ns[step:until] = ends_ns
            self._batches[step:until] = before + batch * np.arange(1, n + 1)
        self._steps = until
        self.context += n * len(self.seats)

    def ended(self, step: int) -> list[Seat]:
        """Those whose last step this was, in order; they still sit."""
        return sorted(self._ends.get(step, ()), key=_rank)
