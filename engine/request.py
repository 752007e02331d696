"""A request inside the engine: what was asked, how far it is, and the refusals that come before it starts.

``tokens`` is prompt + output.  Invariant: 0 <= cached <= computed <= len(tokens); KV exists for ``computed`` tokens,
in the pages of ``blocks``, in order.  A request is in exactly one of the states waiting, running, finished.
While steps are under way (``engine.flight``), ``computed`` counts theirs and ``pending`` the tokens that they sample:
computed <= len(tokens) + pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from engine.detokenizer import TextStream
from engine.logprobs import LogprobStream, TokenLogprob
from engine.phase_clock import PhaseClock
from engine.structured import Grammar
from telemetry import names

if TYPE_CHECKING:
    from engine.sampling import Shaper

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
GREEDY_BELOW = 1e-5  # a temperature that float32 cannot divide by; vLLM draws the same line


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens.  temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 do not cut; seed None: random.

    logit_bias: (token, added to its logit).  logprobs, prompt_logprobs: how many likeliest tokens to tell beside each
    token (0: itself alone); None: tell nothing.  Under a grammar, stop strings do not cut, and stop_token_ids end the
    answer only where it is complete.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Does any penalty act?"""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class Output:
    """One increment of an answer.  text: a delta, "" while bytes or a possible stop string are held back.

    t_ns: when the step that sampled it ended.  finish_reason: None while the answer goes on, else stop, length,
    abort or error (then ``error`` says what).  logprobs: of the tokens whose text is sent up to here, where asked for.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None
    t_ns: int
    logprobs: tuple[TokenLogprob, ...] = ()
    code: str | None = None  # of an error: a label of ``names``, where one says more than "engine_error"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One prompt on its way through the engine.  ``emit`` runs on the engine thread and must not block.

    leader: the first of several requests with this prompt; this one waits until the leader's pages can be found.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    clock: PhaseClock
    emit: Callable[[Output], None]
    seed: int = 0  # the seed in force: params.seed, or one drawn by the engine
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # the steps under way included
    pending: int = 0  # tokens that steps under way sample
    chain: int = 0  # prefix-cache chain id of the last full page that was registered or hit
    registered: int = 0  # full pages of this request that are registered or hit
    lost: int = 0  # tokens to compute again after a preemption
    text: TextStream | None = None
    leader: Request | None = None
    shaper: Shaper | None = None  # what is done to its logits; None: nothing
    told: LogprobStream | None = None  # None: it did not ask for logprobs
    newest: TokenLogprob | None = None  # of the token sampled last
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's second token and on
    failure: str | None = None  # why it cannot go on, when that is not its logits
    state: str = "new"  # new, waiting, running, finished
    chunk_end_ns: int = 0  # end of the step with its last prefill chunk, and the stall total then
    chunk_stall: int = 0
    token_ns: int = 0  # when its newest token was sampled
    priority: int = 0  # lower is sooner
    deadline_ns: int | None = None  # when the whole answer is wanted, on the clock of ``clock``
    arrived_ns: int = 0
    number: int = 0  # position in order of arrival
    rank: int = 0  # of ``engine.policy``
    predicted_ns: int = 0  # how long it would take from its first step on, when it came
    predicted_ttft_ns: int | None = None  # to its first token, when it came
    token_steps: list[int] | None = None  # the step of each token, where somebody wants to know
    root: int = 0  # where its prefix-cache chain begins: ``engine.blocks.root_of`` its salt
    key: int = 0  # of its tokens where they are simulated; 0: not known yet
    streamed: bool = True  # False: only its end is emitted, nobody wants its tokens as they come

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def wants_prompt(self) -> bool:
        """Logprobs of its prompt are asked for and not all known: every row is computed, none found in the cache."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    @property
    def leading(self) -> bool:
        """It runs and computes its prompt: those with the same prompt do better to wait."""
        return self.state == "running" and self.generated == 0


def derived_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one of several choices: the first has the seed itself, so it is the answer that n = 1 gives.

    The others' are spread by the finaliser of splitmix64 (Steele et al., 2014); None (drawn at random) stays None.
    """
    if seed is None or choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


class Refusal(Exception):
    """The engine will not take the request; nothing of it is kept.  reason: a label of ``names.REJECT_REASONS``."""

    reason: ClassVar[str]


class RequestTooLong(Refusal):
    """Prompt and at least one token of output exceed the context."""

    reason = names.CONTEXT_OVERFLOW

    def __init__(self, prompt_tokens: int, max_tokens: int, max_context: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_context} tokens. However, you requested {prompt_tokens} "
            f"tokens in the prompt and {max_tokens} tokens of output. Please reduce the length of either."
        )
        self.prompt_tokens, self.max_tokens, self.max_context = prompt_tokens, max_tokens, max_context


class NeverFits(Refusal):
    """The request needs more KV pages than the whole pool has."""

    reason = names.KV_OOM

    def __init__(self, tokens: int, pool_tokens: int) -> None:
        super().__init__(f"the request needs KV for {tokens} tokens, but the whole pool holds {pool_tokens}")
        self.tokens, self.pool_tokens = tokens, pool_tokens


class Overload(Refusal):
    """The backlog is too long now.  retry_after_s: when it should be down to half of what is allowed."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Overload):
    """As many requests wait as are allowed to."""

    reason = names.REJECT_QUEUE

    def __init__(self, limit: int, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{limit} requests are waiting, which is the limit", retry_after_s)
        self.limit = limit


class TokensFull(Overload):
    """As many prompt tokens wait as are allowed to."""

    reason = names.REJECT_TOKENS

    def __init__(self, waiting: int, tokens: int, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{waiting} tokens are waiting, and the {tokens} of this prompt would exceed the limit of {limit}",
            retry_after_s,
        )
        self.limit = limit


class TooSlow(Overload):
    """The first token would come too late."""

    reason = names.REJECT_TTFT

    def __init__(self, predicted_s: float, limit_s: float, retry_after_s: float) -> None:
        super().__init__(
            f"the first token is expected after {predicted_s:.1f} s, which is above the limit of {limit_s:g} s",
            retry_after_s,
        )
        self.predicted_s, self.limit_s = predicted_s, limit_s
