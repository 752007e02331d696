"""RMSNorm of rows, alone or after adding them to the residual stream (Zhang & Sennrich, arXiv 1910.07467).

    x, residual, out  [T, N] fp16/bf16/fp32      weight  [N], any of them

    rms_norm       out = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm   residual += x;  out = rms_norm(residual)      one pass instead of two

Tiling: a row a program, masked to the next power of two (576 -> 1024), since a row of any model here fits into the
registers of a few warps and is then read once.  Moves 2 T N elements alone and 4 T N with the sum (+ N of weight),
about 4 T N FLOPs: bound by memory everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch, power_of_two


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(
    x, residual, weight, out, x_stride, residual_stride, out_stride, eps,
    N: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    alive = column < N
    value = tl.load(x + row * x_stride + column, mask=alive, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + column
        value += tl.load(at, mask=alive, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=alive)
        value = rounded.to(tl.float32)  # what the next layer will read
    mean = tl.sum(value * value, axis=0) / N
    scale = tl.load(weight + column, mask=alive, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=alive)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Normalised rows, into ``out`` or a new tensor like x."""
    out = torch.empty_like(x) if out is None else out
    _start(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add x to ``residual`` in place; the new residual's normalised rows, into ``out`` or a new tensor."""
    out = torch.empty_like(x) if out is None else out
    _start(x, residual, weight, out, eps, add=True)
    return out


def _start(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, add: bool
) -> None:
    rows, n = x.shape
    block = power_of_two(n)
    launch(
        _rms_norm,
        (rows,),
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        eps,
        N=n,
        ADD=add,
        BLOCK=block,
        warps=min(16, max(2, block // 512)),
    )


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In the type of x, which tests give as float64."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
