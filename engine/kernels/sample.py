"""The next token of every row: argmax(logits / T + Gumbel noise), or the plain argmax where T is 0.

    logits [R, V] fp32     temperature [R] fp32     seed, position [R] int64     token [R] int64, finite [R] int32

The noise of a candidate is a function of (seed, position, token id) alone: splitmix64 over a counter, the very one of
``engine.sampling.uniform``, so that this kernel draws the token that the CPU path draws and a row's token does not
depend on its mates.  fp64 for the noise: two logarithms a candidate, R V in all, beside R V 4 bytes read twice.
finite: 1 unless a logit is NaN or infinite; then the token means nothing.

Tiling: a row a program, walked in blocks of 4096 columns, once for the highest logit and once with noise.  Ties go to
the lower token id, as in torch and numpy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch, power_of_two


@triton.jit
def _mix(z):
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _sample(logits, temperature, seed, position, token, finite, stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    at_row = logits + row * stride
    best = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], 0, tl.int64)
    sound = tl.full([], 1, tl.int32)
    for at in range(0, V, BLOCK):
        column = at + tl.arange(0, BLOCK)
        alive = column < V
        value = tl.load(at_row + column, mask=alive, other=float("-inf"))
        sound = tl.minimum(sound, tl.min(((tl.abs(value) < float("inf")) | (column >= V)).to(tl.int32), axis=0))
        top = tl.max(value, axis=0)
        where = tl.min(tl.where(value == top, column, V), axis=0).to(tl.int64)
        chosen = tl.where(top > best, where, chosen)
        best = tl.maximum(best, top)
    if heat > 0.0:
        # golden * (position + 1) and golden * (id + 1) as in engine.sampling.uniform, modulo 2^64
        base = tl.load(seed + row).to(tl.uint64, bitcast=True)
        step = (tl.load(position + row) + 1).to(tl.uint64, bitcast=True)
        base = _mix(base + step * 0x9E3779B97F4A7C15)
        highest = tl.full([], float("-inf"), tl.float64)
        for at in range(0, V, BLOCK):
            column = at + tl.arange(0, BLOCK)
            alive = column < V
            value = tl.load(at_row + column, mask=alive, other=float("-inf"))
            bits = _mix(base + (column + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
            uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
            noise = -tl.log(-tl.log(uniform))
            score = tl.div_rn(value - best, tl.zeros_like(value) + heat).to(tl.float64) + noise
            score = tl.where(alive, score, float("-inf"))
            top = tl.max(score, axis=0)
            where = tl.min(tl.where(score == top, column, V), axis=0).to(tl.int64)
            chosen = tl.where(top > highest, where, chosen)
            highest = tl.maximum(highest, top)
    tl.store(token + row, chosen)
    tl.store(finite + row, sound)


def sample_rows(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """token [R] int64 and finite [R] int32 of every row.  seed: 64 bits as int64; position: tokens before this one."""
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.int32, device=logits.device)
    block = min(4096, power_of_two(vocab))
    launch(
        _sample,
        (rows,),
        logits,
        temperature,
        seed,
        position,
        token,
        finite,
        logits.stride(0),
        vocab,
        BLOCK=block,
        warps=8,
    )
    return token, finite


def sample_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """The same through ``engine.sampling.uniform``, row by row."""
    import numpy as np

    from engine.sampling import uniform

    tokens = []
    for row, heat, key, at in zip(logits, temperature.tolist(), seed.tolist(), position.tolist(), strict=True):
        if heat <= 0:
            tokens.append(int(row.argmax()))
            continue
        scaled = ((row - row.max()) / heat).numpy().astype(np.float64)
        with np.errstate(over="ignore"):
            noise = -np.log(-np.log(uniform(key, at, np.arange(len(scaled)))))
        tokens.append(int(np.argmax(scaled + noise)))
    return torch.tensor(tokens)
