"""Attention of prompt chunks over the paged KV cache, causal, many sequences in one launch.

    q, out    [T, H, D]        rows of all chunks, one after the other        k/v cache  [slots, K, D]
    tables    [S, P] int32     pages of each sequence
    q_begin   [S] int32        a chunk's first row in q                        q_len  [S] int32  its rows
    context   [S] int32        tokens of the sequence before the chunk (cached or computed earlier)
    tile_seq, tile_first       [tiles] int32: whose tile it is (-1: padding, does nothing), its first packed row

A chunk's own K and V are in the cache already, so prefix and chunk are read in the same way.

Tiling: the G = H / K query heads that share a KV head are packed into rows, row r = token r // G, head r % G, so that
K and V are read once for all of them and 3 heads a KV head waste nothing.  A program takes BLOCK_M packed rows and
walks over the columns BLOCK_N at a time from the first page on, in that order whatever the chunk: columns that every
row sees without a mask, then those around the diagonal with it.  BLOCK_N = 64 (``block_n``) is four pages of 16.
A row's sums therefore depend on its own position alone: masked columns add exact zeros.  Softmax is online (Milakov &
Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135), in powers of two, fp32.

Moves per chunk of n tokens at context c, each KV head: (c + n) D of K and V for every tile of BLOCK_M / G tokens (from
L2 where the tiles run together); 4 H D (n c + n^2 / 2) FLOPs: bound by compute from a few hundred tokens on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.launch import architecture, launch, product_type

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Where the chunks of one step lie; int32 tensors on the device, see the top of this file."""

    tables: torch.Tensor
    q_begin: torch.Tensor
    q_len: torch.Tensor
    context: torch.Tensor
    tile_seq: torch.Tensor
    tile_first: torch.Tensor


@triton.jit
def _columns(
    q, m, l, acc, k_cache, v_cache, table, kv_stride, kv_head, position, limit, at,
    HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of columns into the running softmax of every row."""
    column = at + tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD)
    there = column < limit
    if MASKED:
        page = tl.load(table + column // PAGE, mask=there, other=0)
    else:
        page = tl.load(table + column // PAGE)
    slot = page.to(tl.int64) * PAGE + column % PAGE
    kv_at = slot[:, None] * kv_stride + kv_head * HEAD + d[None, :]
    if MASKED:  # beyond the limit the pool may hold anything, NaN too, and 0 * NaN is NaN
        key = tl.load(k_cache + kv_at, mask=there[:, None], other=0.0).to(PRODUCT)
        value = tl.load(v_cache + kv_at, mask=there[:, None], other=0.0).to(PRODUCT)
    else:
        key = tl.load(k_cache + kv_at).to(PRODUCT)
        value = tl.load(v_cache + kv_at).to(PRODUCT)
    score = tl.dot(q, tl.trans(key))
    if MASKED:
        seen = (column[None, :] <= position[:, None]) & there[None, :]
        score = tl.where(seen, score, float("-inf"))
    top = tl.maximum(m, tl.max(score, axis=1))
    base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet: no inf - inf
    weight = tl.exp2(score - base[:, None])
    keep = tl.exp2(m - base)
    l = l * keep + tl.sum(weight, axis=1)
    acc = acc * keep[:, None] + tl.dot(weight.to(PRODUCT), value)
    return top, l, acc


@triton.jit(do_not_specialize=["scale"])
def _paged_prefill(
    q, out, k_cache, v_cache, tables, q_begin, q_len, context, tile_seq, tile_first,
    q_stride, out_stride, kv_stride, table_stride, scale,
    GROUP: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tile_seq + tile)
    if sequence < 0:
        return
    first = tl.load(tile_first + tile)
    begin = tl.load(q_begin + sequence)
    length = tl.load(q_len + sequence)
    before = tl.load(context + sequence)
    row = first + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, HEAD)
    alive = (token < length)[:, None]
    at = (begin + token).to(tl.int64)[:, None]
    within = head[:, None] * HEAD + d[None, :]
    # scaled in fp32 before it is rounded: 1 / sqrt(D) and the base change cost nothing then
    x = tl.load(q + at * q_stride + within, mask=alive, other=0.0).to(tl.float32) * scale
    x = x.to(PRODUCT)
    position = before + token
    limit = tl.minimum(before + (first + BLOCK_M - 1) // GROUP, before + length - 1) + 1
    whole = (before + first // GROUP + 1) // BLOCK_N * BLOCK_N  # up to here every row sees every column
    table = tables + sequence * table_stride
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    for column in range(0, whole, BLOCK_N):
        m, l, acc = _columns(
            x, m, l, acc, k_cache, v_cache, table, kv_stride, kv_head, position, limit, column,
            HEAD, PAGE, BLOCK_N, PRODUCT, False,
        )  # fmt: skip
    for column in range(whole, limit, BLOCK_N):
        m, l, acc = _columns(
            x, m, l, acc, k_cache, v_cache, table, kv_stride, kv_head, position, limit, column,
            HEAD, PAGE, BLOCK_N, PRODUCT, True,
        )  # fmt: skip
    result = acc / l[:, None]
    tl.store(out + at * out_stride + within, result.to(out.dtype.element_ty), mask=alive)


def block_n(head: int) -> int:
    """Columns at a time: 64, but 32 for wide heads before sm_90, where the registers would not do."""
    return 32 if head > 64 and architecture() < 90 else 64


def prefill_block_m(rows: int, *, invariant: bool) -> int:
    """Packed rows a program: 128, always where rows must be invariant; else 64 for short chunks: more programs."""
    return 128 if invariant or rows > 1024 else 64


def prefill_tiles(lengths: list[int], group: int, block_m: int) -> tuple[list[int], list[int]]:
    """tile_seq and tile_first for chunks of so many tokens."""
    tiles = [(s, first) for s, n in enumerate(lengths) for first in range(0, n * group, block_m)]
    return [s for s, _ in tiles], [first for _, first in tiles]


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PrefillBatch,
    *,
    page: int,
    scale: float,
    block_m: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of all chunks attended, [T, H, D], into ``out`` or a new tensor."""
    out = torch.empty_like(q) if out is None else out
    heads, head = q.shape[1:]
    kv_heads = k_cache.shape[1]
    launch(
        _paged_prefill,
        (batch.tile_seq.numel(), kv_heads),
        q,
        out,
        k_cache,
        v_cache,
        batch.tables,
        batch.q_begin,
        batch.q_len,
        batch.context,
        batch.tile_seq,
        batch.tile_first,
        q.stride(0),
        out.stride(0),
        k_cache.stride(0),
        batch.tables.stride(0),
        scale * LOG2E,
        GROUP=heads // kv_heads,
        HEAD=head,
        PAGE=page,
        BLOCK_M=block_m,
        BLOCK_N=block_n(head),
        PRODUCT=product_type(q.dtype),
        warps=4 if block_m == 64 else 8,
        stages=2,
    )
    return out


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """One sequence.  q: [n, H, D] at positions first ..; k, v: [first + n, K, D].  In the type of q."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    score = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = torch.arange(k.shape[0])[None, :] <= first + torch.arange(q.shape[0])[:, None]
    weight = score.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weight, v)
