"""A request inside the engine: what was asked, how far it is, and the refusals that come before it starts.

``tokens`` is prompt + output.  Invariant: 0 <= cached <= computed <= len(tokens); KV exists for ``computed`` tokens,
in the pages of ``blocks``, in order.  A request is in exactly one of the states waiting, running, finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.detokenizer import TextStream
from engine.phase_clock import PhaseClock

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens.  temperature 0 is greedy; top_k 0 and top_p 1 do not cut; seed None: drawn at random."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One increment of an answer.  text: a delta, "" while bytes or a possible stop string are held back.

    t_ns: when the step that sampled it ended.  finish_reason: None while the answer goes on, else stop, length,
    abort or error (then ``error`` says what).
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None
    t_ns: int


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way through the engine.  ``emit`` runs on the engine thread and must not block."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    clock: PhaseClock
    emit: Callable[[Output], None]
    seed: int = 0  # the seed in force: params.seed, or one drawn by the engine
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    chain: int = 0  # prefix-cache chain id of the last full page that was registered or hit
    registered: int = 0  # full pages of this request that are registered or hit
    lost: int = 0  # tokens to compute again after a preemption
    text: TextStream | None = None
    state: str = "new"  # new, waiting, running, finished
    chunk_end_ns: int = 0  # end of the step with its last prefill chunk, and the stall total then
    chunk_stall: int = 0
    token_ns: int = 0  # when its newest token was sampled

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - len(self.prompt_ids)


class Refusal(Exception):
    """The engine will not take the request; nothing of it is kept."""


class RequestTooLong(Refusal):
    """Prompt and at least one token of output exceed the context."""

    def __init__(self, prompt_tokens: int, max_tokens: int, max_context: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_context} tokens. However, you requested {prompt_tokens} "
            f"tokens in the prompt and {max_tokens} tokens of output. Please reduce the length of either."
        )
        self.prompt_tokens, self.max_tokens, self.max_context = prompt_tokens, max_tokens, max_context


class NeverFits(Refusal):
    """The request needs more KV pages than the whole pool has."""

    def __init__(self, tokens: int, pool_tokens: int) -> None:
        super().__init__(f"the request needs KV for {tokens} tokens, but the whole pool holds {pool_tokens}")
        self.tokens, self.pool_tokens = tokens, pool_tokens


class QueueFull(Refusal):
    """As many requests wait as are allowed to."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are waiting, which is the limit")
        self.limit = limit
