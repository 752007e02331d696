"""A model of a continuous-batching server, small and fast: what the twin is for an engine that is at hand.

One step computes a token of every decoding request and chunks of prompts within the token budget; a prompt takes at
most half of what is left while others stand behind it, as in ``engine.scheduler``.  A request is admitted when a place
in the batch is free and its prompt fits the KV pool; when the pool runs out the one that was admitted last loses its
pages and starts again.  Stretches of decoding alone are one jump, so that the cost is per request, not per token.

Must always hold: the same load and server give the same times; every request of the load is answered, save those that
could never fit the pool.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from telemetry.explain.server_model import Load, Replayed, ServerModel


def replay(load: Load, server: ServerModel) -> Replayed:
    """Seconds to the first and to the last token of each request."""
    return _Course(load, server).run()


class _Course:
    """One replay under way."""

    def __init__(self, load: Load, server: ServerModel) -> None:
        self.server = server
        self.at = load.at_s.tolist()
        self.prompt: list[int] = load.prompt.tolist()
        self.output: list[int] = np.maximum(load.output, 1).tolist()
        self.cached: list[int] = np.minimum(load.cached, load.prompt - 1).clip(min=0).tolist()
        self.pool = math.inf if server.kv_blocks is None else float(server.kv_blocks * server.block_size)
        n = len(load)
        self.first, self.last = [math.nan] * n, [math.nan] * n
        self.now = self.at[0] if n else 0.0
        self.step = 0
        self.next = 0  # the next to arrive
        self.waiting: deque[int] = deque()
        self.reading: list[list[int]] = []  # [request, tokens left], in order of admission
        self.ends: list[tuple[int, int]] = []  # (step of the last token, request) of those that decode
        self.begun: dict[int, int] = {}  # step of the first token of those that decode
        self.held = 0.0  # tokens of context of those that decode, at the current step
        self.shared = 0  # of them, tokens in pages that the prefix cache had
        self.order: list[int] = []  # admitted, oldest first
        self.made = [0] * n  # tokens of the answer that a preempted request had
        self.pauses = sorted(server.stalls)
        self.paused = 0

    def run(self) -> Replayed:
        """To the end."""
        n = len(self.at)
        while True:
            while self.next < n and self.at[self.next] <= self.now:
                self.waiting.append(self.next)
                self.next += 1
            if not self.waiting and not self.reading and not self.ends:
                if self.next >= n:
                    break
                self.now = self.at[self.next]
                continue
            if self.paused < len(self.pauses) and self.pauses[self.paused][0] <= self.now:
                self.now += self.pauses[self.paused][1]
                self.paused += 1
                continue
            if not self.reading and self.ends and not self._admissible():
                self._decode_stretch()
            elif not self._mixed_step():
                self.waiting.popleft()  # alone in the server and still too large: it could never run
        at = np.array(self.at)
        return Replayed(np.array(self.first) - at, np.array(self.last) - at)

    def _admissible(self) -> bool:
        if not self.waiting or len(self.order) >= self.server.max_batch:
            return False
        return not self.order or self._held() + self._size(self.waiting[0]) <= self.pool

    def _size(self, request: int) -> float:
        """Tokens of its own pages once its prompt is read; those from the cache are shared."""
        block = self.server.block_size
        own = self.prompt[request] + self.made[request] + 1 - self.cached[request]
        return float(-(-own // block) * block)

    def _held(self) -> float:
        block = self.server.block_size
        reading = sum(self._size(request) for request, _ in self.reading)
        return self.held - self.shared + block / 2 * len(self.ends) + reading

    def _seconds(self, prompt: float, context: float, attended: float) -> float:
        c = self.server.coefficients
        decodes = len(self.ends)
        tokens = prompt + decodes
        return (
            c[0] + c[1] * min(tokens, 8) + c[2] * min(tokens, 32) + c[3] * prompt + c[4] * decodes + c[5] * context
            + c[6] * attended + self.server.gap_s
        )  # fmt: skip

    def _decode_stretch(self) -> None:
        """Steps of decodes alone, up to what changes the batch next."""
        decodes = len(self.ends)
        steps = max(1, self.ends[0][0] - self.step)
        grows = (self.server.coefficients[5] + self.server.coefficients[6]) * decodes  # seconds a step, per step
        one = self._seconds(0, self.held + decodes, self.held + decodes)
        until = math.inf
        if self.next < len(self.at) and len(self.order) < self.server.max_batch and not self.waiting:
            until = self.at[self.next]
        if self.paused < len(self.pauses):
            until = min(until, self.pauses[self.paused][0])
        if until < math.inf:
            left = until - self.now
            # k steps take k * one + grows * k (k - 1) / 2
            slope = one - grows / 2
            k = left / one if grows < 1e-15 else (math.sqrt(slope * slope + 2 * grows * left) - slope) / grows
            steps = min(steps, max(1, math.ceil(k - 1e-9)))
        room = self.pool - self._held()
        if room < decodes * steps:
            if room < decodes:
                self._preempt()
                return
            steps = max(1, int(room // decodes))
        self.now += steps * one + grows * steps * (steps - 1) / 2
        self.step += steps
        self.held += decodes * steps
        self._finish()

    def _mixed_step(self) -> bool:
        """One step with prompts in it; False: nothing could run."""
        server = self.server
        budget = server.token_budget - len(self.ends)
        spent = 0
        attended = context = self.held + len(self.ends)
        chunks: list[tuple[list[int], int]] = []
        for place, entry in enumerate(self.reading):
            room = budget - spent
            if room <= 0:
                break
            behind = place + 1 < len(self.reading) or bool(self.waiting)
            n = min(entry[1], -(-room // 2) if behind else room)
            chunks.append((entry, n))
            spent += n
        while spent < budget and self.waiting and len(self.order) < server.max_batch:
            request = self.waiting[0]
            if self.order and self._held() + self._size(request) > self.pool:
                break
            if not self.order and self._size(request) > self.pool:
                return False
            self.waiting.popleft()
            self.order.append(request)
            entry = [request, max(1, self.prompt[request] + self.made[request] - self.cached[request])]
            self.reading.append(entry)
            room = budget - spent
            n = min(entry[1], -(-room // 2) if self.waiting else room)
            chunks.append((entry, n))
            spent += n
        for place, (entry, n) in enumerate(chunks):  # what nobody else could use
            more = min(entry[1] - n, budget - spent)
            if more > 0:
                chunks[place] = (entry, n + more)
                spent += more
        for entry, n in chunks:
            done = self.prompt[entry[0]] + self.made[entry[0]] - entry[1]
            context += done + n
            attended += n * done + n * (n + 1) / 2
        if not chunks and not self.ends:
            return False
        self.now += self._seconds(spent, context, attended)
        self.step += 1
        self.held += len(self.ends)
        for entry, n in chunks:
            entry[1] -= n
        self._start([entry[0] for entry, _ in chunks if entry[1] <= 0])
        self._finish()
        if self._held() > self.pool and len(self.order) > 1:
            self._preempt()
        return True

    def _start(self, requests: Sequence[int]) -> None:
        """Their prompts are read: the first token is there."""
        if not requests:
            return
        self.reading = [entry for entry in self.reading if entry[1] > 0]
        for request in requests:
            if math.isnan(self.first[request]):
                self.first[request] = self.now
            left = self.output[request] - self.made[request] - 1
            heapq.heappush(self.ends, (self.step + max(0, left), request))
            self.begun[request] = self.step
            self.held += self.prompt[request] + self.made[request] + 1
            self.shared += self.cached[request]

    def _finish(self) -> None:
        while self.ends and self.ends[0][0] <= self.step:
            _, request = heapq.heappop(self.ends)
            self.held -= self._context(request)
            self.shared -= self.cached[request]
            self.last[request] = self.now
            self.order.remove(request)
            del self.begun[request]

    def _context(self, request: int) -> int:
        return self.prompt[request] + self.made[request] + 1 + self.step - self.begun[request]

    def _preempt(self) -> None:
        """The one that came last loses its pages and goes to the head of the queue."""
        if len(self.order) <= 1:  # alone, and it has outgrown the pool: let it end, the model has no smaller one
            self.pool = math.inf
            return
        request = self.order.pop()
        if request in self.begun:
            self.held -= self._context(request)
            self.shared -= self.cached[request]
            self.made[request] += 1 + self.step - self.begun.pop(request)
            self.ends = [one for one in self.ends if one[1] != request]
            heapq.heapify(self.ends)
        else:
            self.reading = [entry for entry in self.reading if entry[0] != request]
        self.waiting.appendleft(request)
