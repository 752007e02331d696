"""From logits to tokens, row by row independent of its batch-mates.

Randomness is a counter: the noise of a candidate is a function of (seed, position, token id) alone, so a seed gives
the same tokens whatever else is in the batch.  A sample is argmax(logits / T + Gumbel noise), which draws from
softmax(logits / T) (the Gumbel-max trick; Maddison et al., arXiv 1411.0030).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.request import Request

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CANDIDATES = 256  # top-p is cut from this many; the whole row is sorted only where they hold less than p


def sample(logits: torch.Tensor, requests: Sequence[Request], eos: frozenset[int]) -> tuple[list[int], list[bool]]:
    """The next token of every row.

    logits: [rows, vocabulary] float32, row i belongs to requests[i].  Returns token ids, and for each row whether
    its logits were finite; where they were not, the token means nothing and the request must fail.
    """
    with np.errstate(over="ignore"):
        finite = torch.isfinite(logits.sum(dim=-1)).tolist()
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for row, request in enumerate(requests):
            if finite[row]:
                params = request.params
                banned = eos.union(params.stop_token_ids) if request.generated < params.min_tokens else frozenset()
                if banned or params.temperature > 0:
                    tokens[row] = _sample_row(logits[row], request, banned)
    return tokens, finite


def _sample_row(logits: torch.Tensor, request: Request, banned: frozenset[int]) -> int:
    params = request.params
    if banned:
        logits = logits.clone()
        logits[list(banned)] = float("-inf")
    if params.temperature <= 0:
        return int(logits.argmax())
    scaled = logits / params.temperature
    if params.top_k <= 0 and params.top_p >= 1:
        ids, values = np.arange(len(scaled), dtype=np.int64), scaled.numpy().astype(np.float64)
    else:
        ids, values = _candidates(scaled, params.top_k, params.top_p)
    noise = gumbel(request.seed, len(request.tokens), ids)
    return int(ids[int(np.argmax(values + noise))])


def _candidates(scaled: torch.Tensor, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and logits that survive top-k, then top-p (the smallest set of at least that probability)."""
    size = len(scaled)
    keep = min(top_k, size) if top_k > 0 else size
    peak = scaled.max()
    total = float(torch.exp(scaled - peak).sum())  # over all, for top-p without top-k
    for n in (min(keep, _CANDIDATES), keep):
        best = torch.topk(scaled, n)
        weights = torch.exp(best.values - peak).numpy().astype(np.float64)
        share = np.cumsum(weights) / (weights.sum() if top_k > 0 and n == keep else total)
        if top_p >= 1 and n == keep:
            return best.indices.numpy(), best.values.numpy().astype(np.float64)
        if top_p < 1 and (share[-1] >= top_p or n == keep) and not (top_k > 0 and n < keep):
            cut = int(np.searchsorted(share, top_p)) + 1
            return best.indices.numpy()[:cut], best.values.numpy()[:cut].astype(np.float64)
    raise AssertionError("unreachable: the last round keeps all candidates")


def gumbel(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Gumbel(0, 1) noise, float64, one per token id: a function of its three arguments and nothing else."""
    base = _mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF) + _GOLDEN * np.uint64(position + 1))
    bits = _mix(base + _GOLDEN * (ids.astype(np.uint64) + np.uint64(1)))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def _mix(x: np.uint64 | np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al., 2014): every input bit reaches every output bit."""
    z = np.asarray(x, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
