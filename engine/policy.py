"""In which order requests are served: a policy is one small function that gives a request its rank, in ns.

    least rank    admitted first, grows first, gets the first half of the prefill budget
    greatest rank loses its pages first when the KV pool runs short

Always: a rank depends on the request alone (deadline: and once on whether it is too late), never on what else came.
So the request of least rank among all live ones is passed by nobody and preempted by nobody: it gets on in every
step, and when it ends another one is the least.  Nothing starves as long as a policy's ranks grow with the time of
arrival, which each docstring below argues: then only finitely many later requests can pass a given one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Final

from engine.request import Request

AGE_NS: Final = 10_000_000_000  # one step of priority is worth ten seconds of waiting
PRIORITY_BOUND: Final = 1_000  # beyond it a priority counts as this much, so that ageing always ends
DUE_NS: Final = 60_000_000_000  # the deadline of a request that states none
GRACE_NS: Final = 30_000_000_000  # a request that can not be in time any more is served as if due this much later

Policy = Callable[[Request, int], int]


def fcfs(request: Request, now_ns: int) -> int:
    """First come, first served: equal ranks, and those are ordered by arrival.  Nobody is ever passed."""
    return 0


def priority(request: Request, now_ns: int) -> int:
    """The lower the number the sooner (vLLM's ``priority``), and waiting counts: priority x 10 s + arrival.

    A request of priority p is passed by one of priority q < p only if that came within (p - q) x 10 s after it:
    ageing without a clock, since everybody ages alike.
    """
    bounded = max(-PRIORITY_BOUND, min(PRIORITY_BOUND, request.priority))
    return bounded * AGE_NS + request.arrived_ns


def deadline(request: Request, now_ns: int) -> int:
    """Least slack first.  slack = deadline - predicted finish = deadline - (now + predicted duration).

    ``now`` is the same for all, so the rank is deadline - predicted duration: the last moment at which it could
    start.  Pure least-slack collapses under overload, since the hopeless are always first; one whose slack is gone
    waits 30 s more behind those that can still be in time, and no longer: later arrivals have later deadlines.
    """
    due = request.deadline_ns if request.deadline_ns is not None else request.arrived_ns + DUE_NS
    last_start = due - request.predicted_ns
    return last_start if last_start >= now_ns else last_start + GRACE_NS


POLICIES: Final[dict[str, Policy]] = {"fcfs": fcfs, "priority": priority, "deadline": deadline}


def order(request: Request) -> tuple[int, int]:
    """Sort key: rank, then arrival; no two requests share one."""
    return request.rank, request.number


class WaitingList:
    """Requests that wait, least rank first.  ``tokens``: of all of them, prompt and output so far."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._list: list[Request] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._list)

    def add(self, request: Request, now_ns: int) -> None:
        """Rank it and put it in its place."""
        request.rank = self._policy(request, now_ns)
        insort(self._list, request, key=order)
        self.tokens += len(request.tokens)

    def head(self, now_ns: int) -> Request:
        """Whose turn it is.  One whose rank has grown since is put back first; the list must not be empty."""
        while True:
            request = self._list[0]
            if self._policy(request, now_ns) <= request.rank:
                return request
            self.remove(request)
            self.add(request, now_ns)

    def remove(self, request: Request) -> None:
        """Take one out, wherever it stands."""
        at = bisect_left(self._list, order(request), key=order)
        if at == len(self._list) or self._list[at] is not request:
            raise RuntimeError(f"request {request.id} does not wait")
        del self._list[at]
        self.tokens -= len(request.tokens)
