"""Products with weights of 8 or 4 bits (``quantised`` has the layouts); and rows gathered from a q8_0 embedding.

    x [M, K] fp16/bf16/fp32      weights q8_0 or q4_1 of [N, K]      out [M, N]; logits fp32

    q8_0   out = sum over groups  d (x . q)
    q4_1   out = sum over groups  d (x . q) + m sum(x)

The whole numbers q enter the tensor cores as they are, exact in any 16-bit type, and each group's scale is applied to
its fp32 sum: nothing is rounded that the fp32 weights would not round, and it costs 2 FLOPs an output and group.

Tiling: BLOCK_M x 64 of the output a program; K is walked a group of 32 (q8_0) or a pair of groups (q4_1: 32 bytes,
whose low and high nibbles are one group each) at a time, which is what shares a scale.  BLOCK_M as in
``gemm_small_m``, so rows are invariant in the same way.  Moves 1.0625 (q8_0) or 0.625 (q4_1) bytes a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gemm_small_m import block_m
from engine.kernels.launch import launch, power_of_two, product_type
from engine.kernels.quantised import GROUP, Quantised

BLOCK_N = 64


@triton.jit(do_not_specialize=["M"])
def _gemm_q8(
    x, data, scales, out, M, N, K, x_stride, data_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, GROUP)
    row_alive, column_alive = row < M, column < N
    x_at = x + row[:, None] * x_stride + k[None, :]
    data_at = data + column[:, None] * data_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, K, GROUP):
        if EVEN_K:
            a = tl.load(x_at + at, mask=row_alive[:, None], other=0.0)
        else:
            a = tl.load(x_at + at, mask=row_alive[:, None] & (at + k < K)[None, :], other=0.0)
        q = tl.load(data_at + at, mask=column_alive[:, None], other=0)
        d = tl.load(scales + at // GROUP * N + column, mask=column_alive, other=0.0).to(tl.float32)
        acc += tl.dot(a.to(PRODUCT), tl.trans(q.to(PRODUCT))) * d[None, :]
    at_out = out + row[:, None] * out_stride + column[None, :]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=row_alive[:, None] & column_alive[None, :])


@triton.jit(do_not_specialize=["M"])
def _gemm_q4(
    x, data, scales, mins, out, M, N, K, x_stride, data_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, GROUP)
    row_alive, column_alive = row < M, column < N
    x_at = x + row[:, None] * x_stride + k[None, :]
    data_at = data + column[:, None] * data_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, K, 2 * GROUP):
        if EVEN_K:
            a = tl.load(x_at + at, mask=row_alive[:, None], other=0.0)
            b = tl.load(x_at + at + GROUP, mask=row_alive[:, None], other=0.0)
        else:
            a = tl.load(x_at + at, mask=row_alive[:, None] & (at + k < K)[None, :], other=0.0)
            b = tl.load(x_at + at + GROUP, mask=row_alive[:, None] & (at + GROUP + k < K)[None, :], other=0.0)
        byte = tl.load(data_at + at // 2, mask=column_alive[:, None], other=0)
        first = at // GROUP * N + column
        d_low = tl.load(scales + first, mask=column_alive, other=0.0).to(tl.float32)
        d_high = tl.load(scales + first + N, mask=column_alive, other=0.0).to(tl.float32)
        m_low = tl.load(mins + first, mask=column_alive, other=0.0).to(tl.float32)
        m_high = tl.load(mins + first + N, mask=column_alive, other=0.0).to(tl.float32)
        low, high = (byte & 15).to(PRODUCT), (byte >> 4).to(PRODUCT)
        sum_low = tl.sum(a.to(tl.float32), axis=1)
        sum_high = tl.sum(b.to(tl.float32), axis=1)
        acc += tl.dot(a.to(PRODUCT), tl.trans(low)) * d_low[None, :] + sum_low[:, None] * m_low[None, :]
        acc += tl.dot(b.to(PRODUCT), tl.trans(high)) * d_high[None, :] + sum_high[:, None] * m_high[None, :]
    at_out = out + row[:, None] * out_stride + column[None, :]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=row_alive[:, None] & column_alive[None, :])


def gemm_quant(
    x: torch.Tensor,
    w: Quantised,
    *,
    invariant: bool = True,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x w^T, [M, N], in ``dtype`` (default: that of x) or into ``out``."""
    m, k, n = x.shape[0], w.inputs, w.outputs
    out = x.new_empty(m, n, dtype=dtype or x.dtype) if out is None else out
    height = block_m(m, invariant=invariant)
    step = GROUP if w.mins is None else 2 * GROUP
    weights = (w.data, w.scales) if w.mins is None else (w.data, w.scales, w.mins)
    launch(
        _gemm_q8 if w.mins is None else _gemm_q4,
        (triton.cdiv(n, BLOCK_N), triton.cdiv(m, height)),
        x,
        *weights,
        out,
        m,
        n,
        k,
        x.stride(0),
        w.data.stride(0),
        out.stride(0),
        BLOCK_M=height,
        BLOCK_N=BLOCK_N,
        GROUP=GROUP,
        EVEN_K=k % step == 0,
        PRODUCT=product_type(x.dtype),
        warps=4,
        stages=4,
    )
    return out


@triton.jit
def _embed_q8(
    ids, data, scales, out, N, data_stride, out_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token).to(tl.int64)
    k = tl.arange(0, BLOCK)
    alive = k < K
    q = tl.load(data + row * data_stride + k, mask=alive, other=0).to(tl.float32)
    d = tl.load(scales + (k // GROUP).to(tl.int64) * N + row, mask=alive, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + k, (q * d).to(out.dtype.element_ty), mask=alive)


def embed_q8(ids: torch.Tensor, w: Quantised, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a q8_0 embedding.  ids: [T] whole numbers.  [T, K] in ``dtype``.

    A token a program.  Moves 1.0625 K bytes in and K elements out a token; the scales of a row are N apart, one
    transaction each, which a gather of a few rows can bear.
    """
    out = torch.empty(len(ids), w.inputs, dtype=dtype, device=w.data.device) if out is None else out
    block = power_of_two(w.inputs)
    launch(
        _embed_q8,
        (len(ids),),
        ids,
        w.data,
        w.scales,
        out,
        w.outputs,
        w.data.stride(0),
        out.stride(0),
        K=w.inputs,
        GROUP=GROUP,
        BLOCK=block,
        warps=min(8, max(1, block // 256)),
    )
    return out
