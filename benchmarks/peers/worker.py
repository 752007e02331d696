"""What a peer's process does: read one piece of work a line on stdin, time it, answer one line.

    {"prefill": 512}                                   -> {"seconds": s, "tokens": 512}
    {"batch": 8, "context": 200, "tokens": 32}         -> {"seconds": s, "tokens": 256}, less after 10 s

Standard library only: it runs in the peer's own environment.  Anything a peer prints itself goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Protocol

LONGEST_S = 10.0  # a peer that is slow here must not hold up the others


class Peer(Protocol):
    """An engine in this process."""

    def prefill(self, tokens: int) -> None:
        """Compute a prompt of so many tokens and the logits after it."""

    def start(self, batch: int, context: int) -> None:
        """Hold ``batch`` sequences of ``context`` tokens each."""

    def step(self) -> None:
        """One more token for each of them, greedily."""


def serve(peer: Peer) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        if "prefill" in work:
            start = time.perf_counter()
            peer.prefill(work["prefill"])
            tokens = work["prefill"]
        else:
            peer.start(work["batch"], work["context"])
            peer.step()  # whatever the first step sets up
            start = time.perf_counter()
            steps = 0
            while steps < work["tokens"] and time.perf_counter() - start < LONGEST_S:
                peer.step()
                steps += 1
            tokens = steps * work["batch"]
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), file=answers, flush=True)
