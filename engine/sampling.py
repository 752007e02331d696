"""From logits to tokens, row by row independent of its batch-mates.

In this order: logit bias, bans (end-of-text below min_tokens), penalties, grammar mask, temperature, min-p, top-k,
top-p.  Randomness is a counter: the noise of a candidate is a function of (seed, position, token id) alone, so a seed
gives the same tokens whatever else is in the batch.  A sample is argmax(logits / T + Gumbel noise), which draws from
softmax(logits / T) (the Gumbel-max trick; Maddison et al., arXiv 1411.0030).  A plain greedy row costs its argmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.logprobs import describe
from engine.request import GREEDY_BELOW, Request, SamplingParams
from engine.structured import GrammarError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFFFFFFFFFFFFFF
_ONE_BITS = int(np.array(1.0).view(np.int64))
_BAND_SHIFT = 46  # 6 bits of mantissa: neighbours within a band differ by less than 1/64
_BANDS = 4096  # reaches down to 2^-64


def plain(request: Request, before: int) -> bool:
    """Does the token behind ``before`` others follow from logits, temperature and seed alone?"""
    params = request.params
    return (
        request.shaper is None
        and params.logprobs is None
        and before - len(request.prompt_ids) >= params.min_tokens
        and (params.temperature < GREEDY_BELOW or (params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0))
    )


def sample(logits: torch.Tensor, requests: Sequence[Request], eos: frozenset[int]) -> tuple[list[int], list[bool]]:
    """The next token of every row.

    logits: [rows, vocabulary] float32, row i belongs to requests[i].  Returns token ids, and for each row whether
    its logits were finite; where they were not, the token means nothing and the request must fail.  Where a request
    fails for another reason, its ``failure`` says so.  Logprobs that were asked for are put on the request.
    """
    with np.errstate(over="ignore", divide="ignore"):  # a token that cannot come has weight 0
        finite = torch.isfinite(logits.sum(dim=-1)).tolist()
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for row, request in enumerate(requests):
            if finite[row]:
                params = request.params
                banned = eos.union(params.stop_token_ids) if request.generated < params.min_tokens else frozenset()
                if banned or params.temperature >= GREEDY_BELOW or request.shaper is not None:
                    try:
                        tokens[row] = _sample_row(logits[row], request, banned)
                    except GrammarError as error:
                        request.failure, finite[row] = f"the grammar of the answer: {error}", False
                        continue
                if params.logprobs is not None:
                    request.newest = describe(logits[row], tokens[row], params.logprobs)
    return tokens, finite


def _sample_row(logits: torch.Tensor, request: Request, banned: frozenset[int]) -> int:
    params = request.params
    if request.shaper is not None:
        logits = request.shaper(logits, request, banned)
    elif banned:
        logits = logits.clone()
        logits[list(banned)] = float("-inf")
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / params.temperature
    ids, weights = _candidates(scaled, params)
    return int(ids[_drawn(weights, request.seed, len(request.tokens), ids)])


def _candidates(scaled: torch.Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and weights (float64, the highest is 1) that survive min-p, then top-k, then top-p of what they left.

    min-p keeps what has at least that share of the likeliest token's probability; top-p keeps the smallest set of at
    least that probability.
    """
    if params.top_k > 0:
        best = torch.topk(scaled, min(params.top_k, len(scaled)))
        ids, weights = best.indices.numpy(), torch.exp(best.values).numpy().astype(np.float64)
    else:
        ids, weights = np.arange(len(scaled), dtype=np.int64), torch.exp(scaled).numpy().astype(np.float64)
    if params.min_p > 0:
        alive = weights >= params.min_p
        ids, weights = ids[alive], weights[alive]
    if params.top_p < 1:
        kept = nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the smallest set of weights that has at least the share top_p of their sum.

    A warm distribution has a nucleus of thousands, so nothing is sorted but the narrow band in which the cut lies: a
    histogram of the weights' exponents and first mantissa bits, which order as they do, finds it.
    """
    bands = (_ONE_BITS - weights.view(np.int64)) >> _BAND_SHIFT  # 0 holds the weight 1, the next one less, ...
    np.minimum(bands, _BANDS - 1, out=bands)
    mass = np.cumsum(np.bincount(bands, weights=weights, minlength=_BANDS))
    wanted = top_p * mass[-1]
    border = min(int(np.searchsorted(mass, wanted)), _BANDS - 1)
    within = np.flatnonzero(bands == border)
    within = within[np.argsort(-weights[within], kind="stable")]
    before = mass[border - 1] if border else 0.0
    cut = int(np.searchsorted(before + np.cumsum(weights[within]), wanted)) + 1
    return np.concatenate((np.flatnonzero(bands < border), within[:cut]))


def _drawn(weights: np.ndarray, seed: int, position: int, ids: np.ndarray) -> int:
    """The index drawn: argmax(log weight + Gumbel noise), which is argmin(-log(uniform) / weight).

    Since -log(u) >= 1 - u, the few whose (1 - u) / weight is small enough are the only ones that need a logarithm.
    """
    u = uniform(seed, position, ids)
    bound = (1.0 - u) / weights
    first = int(np.argmin(bound))
    near = np.flatnonzero(bound <= -np.log(u[first]) / weights[first])
    return int(near[int(np.argmin(-np.log(u[near]) / weights[near]))])


class Shaper:
    """What one request wants done to its logits before a token is drawn, and what that needs to remember.

    Penalties: repetition divides positive and multiplies negative logits of tokens in prompt or output (Keskar et
    al., arXiv 1909.05858); frequency and presence take off count * f and p for tokens of the output (OpenAI's
    formula).
    """

    __slots__ = ("_bias", "_counted", "_counts", "_ids", "_seen", "grammar")

    def __init__(self, params: SamplingParams) -> None:
        self._ids = [token for token, _ in params.logit_bias]
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self._counts = self._seen = np.empty(0)
        self._counted = 0
        self.grammar = params.grammar.start() if params.grammar is not None else None

    @classmethod
    def of(cls, params: SamplingParams) -> Shaper | None:
        """None when nothing was asked: then a row costs nothing."""
        asked = params.logit_bias or params.penalised or params.grammar is not None
        return cls(params) if asked else None

    def __call__(self, logits: torch.Tensor, request: Request, banned: frozenset[int]) -> torch.Tensor:
        """A changed copy of a row.  Raises GrammarError."""
        params, logits = request.params, logits.clone()
        if self._ids:
            logits[self._ids] += self._bias
        if banned:
            logits[list(banned)] = float("-inf")
        if params.penalised:
            self._count(request, len(logits))
            if params.repetition_penalty != 1:
                seen = torch.from_numpy(np.flatnonzero(self._seen))
                old = logits[seen]
                logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
            made = np.flatnonzero(self._counts)
            off = params.frequency_penalty * self._counts[made] + params.presence_penalty
            logits[torch.from_numpy(made)] -= torch.from_numpy(off.astype(np.float32))
        if self.grammar is not None:
            forbidden = torch.from_numpy(self.grammar.forbidden())
            if self.grammar.complete and params.stop_token_ids:  # where the answer may end, they may end it
                forbidden[list(params.stop_token_ids)] = False
            logits[forbidden] = float("-inf")
        return logits

    def _count(self, request: Request, vocab: int) -> None:
        if not len(self._counts):
            self._counts, self._seen = np.zeros(vocab, np.int32), np.zeros(vocab, np.bool_)
            self._seen[request.prompt_ids] = True
            self._counted = len(request.prompt_ids)
        for token in request.tokens[self._counted :]:
            self._counts[token] += 1
            self._seen[token] = True
        self._counted = len(request.tokens)

    def advance(self, token: int) -> bool:
        """A token was taken; True when the answer is complete by its grammar.  Raises GrammarError."""
        return self.grammar is not None and self.grammar.advance(token)


def uniform(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Numbers in (0, 1), float64, one per token id: a function of its three arguments and nothing else."""
    base = mix64(np.uint64(seed & _MASK) + _GOLDEN * np.uint64(position + 1))
    bits = mix64(base + _GOLDEN * (ids.astype(np.uint64) + np.uint64(1)))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def mix64(x: np.uint64 | np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al., 2014), elementwise: every input bit reaches every output bit."""
    z = np.asarray(x, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
