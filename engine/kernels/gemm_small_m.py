"""Products of few rows with a weight matrix: decode's matrix products, which read every weight once.

    x [M, K]   w [N, K], as Hugging Face keeps it (fp16/bf16/fp32)   out [M, N] in any of them; logits fp32

Tiling: BLOCK_M x BLOCK_N of the output a program, K walked BLOCK_K at a time.  BLOCK_N and BLOCK_K are constants of
the weight's shape: narrow tiles where N is small, so that there is a program for each processor; BLOCK_K 128 where K
allows it, so that each row of a load is 256 bytes.  There is no split along K.

A row's bits: with ``invariant`` one tile height, 64, serves every M, so a row is made by the same instructions in the
same order alone and in any batch.  The faster choice takes 16 or 32 rows for small M and leaves M > 64 to the vendor's
library (``engine.linear``): other instructions, so other last bits.

Moves N K elements of weight, all that counts at small M, and 2 M N K FLOPs: M FLOP a byte in 16-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch, product_type

INVARIANT_BLOCK_M = 64


@triton.jit(do_not_specialize=["M"])
def _gemm_small_m(
    x, w, out, M, N, K, x_stride, w_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    row_alive, column_alive = (row < M)[:, None], (column < N)[:, None]
    x_at = x + row[:, None] * x_stride + k[None, :]
    w_at = w + column[:, None] * w_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at + at, mask=row_alive, other=0.0)
            b = tl.load(w_at + at, mask=column_alive, other=0.0)
        else:
            inside = (at + k < K)[None, :]
            a = tl.load(x_at + at, mask=row_alive & inside, other=0.0)
            b = tl.load(w_at + at, mask=column_alive & inside, other=0.0)
        acc = tl.dot(a.to(PRODUCT), tl.trans(b.to(PRODUCT)), acc)
    at_out = out + row[:, None] * out_stride + column[None, :]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=row_alive & (column < N)[None, :])


def block_m(rows: int, *, invariant: bool) -> int:
    """Height of a tile."""
    if invariant:
        return INVARIANT_BLOCK_M
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def gemm_small_m(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    invariant: bool = True,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x w^T, [M, N], in ``dtype`` (default: that of x) or into ``out``."""
    (m, k), n = x.shape, w.shape[0]
    out = x.new_empty(m, n, dtype=dtype or x.dtype) if out is None else out
    height = block_m(m, invariant=invariant)
    width = 32 if n < 8192 else 64
    depth = 128 if k % 128 == 0 else 64
    launch(
        _gemm_small_m,
        (triton.cdiv(n, width), triton.cdiv(m, height)),
        x,
        w,
        out,
        m,
        n,
        k,
        x.stride(0),
        w.stride(0),
        out.stride(0),
        BLOCK_M=height,
        BLOCK_N=width,
        BLOCK_K=depth,
        EVEN_K=k % depth == 0,
        PRODUCT=product_type(x.dtype),
        # what keeps every one of these tiles off the stack on sm_80, sm_90 and sm_100 (docs/kernels.json)
        warps=8 if height == 32 and width == 64 else 4,
        stages=4 if depth == 128 else 3,
    )
    return out


def gemm_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """In the type of the arguments."""
    return x @ w.T
