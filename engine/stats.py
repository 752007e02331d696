"""What an engine counts since its start, and its state now: the figures behind metrics and ``/debug/invariants``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the state now.  Tokens, pages, requests."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_used: int = 0
    kv_free: int = 0
    kv_total: int = 0
    received: int = 0
    live: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    rejected: Counter[str] = field(default_factory=Counter)  # by reason of the refusal
    alloc_failures: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    nonfinite_rows: int = 0
    steps: int = 0
    step_tokens: int = 0
    void_tokens: int = 0  # computed ahead for requests that turned out to be over
    request_tokens: int = 0
    stall_ns: int = 0
