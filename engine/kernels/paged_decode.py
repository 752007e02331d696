"""Attention of decodes (one query a sequence) over the paged KV cache, split along the context, and its reduce.

    q, out   [S, H, D]       tables  [S, P] int32      lengths [S] int32: tokens attended to; 0: a padding row, skipped
    cache    [slots, K, D]   parts   [S, H, Z, D] fp32 and lse [S, H, Z] fp32: each split's result and log2 of its sum

Tiling: a program takes one (sequence, KV head, split).  Its G query heads are padded to the 16 rows that mma.sync
takes at least, so each K and V is read once for all of them.  BLOCK_N = 64 columns, four pages of 16, at a time.

**The split length is fixed** (``split_length``), so the order in which a row's sum is made depends on its own length
and on nothing else: alone, in a batch and beside longer rows its bits are the same.  A row of one split is written
directly where no row of the launch has more (``direct``); the reduce of one part is the identity, so that too leaves
the bits alone.  ``occupancy_split`` is the faster choice that gives this up: splits only as many as fill the device.

Moves 2 K D elements per token of context, which is all that counts, and 4 H D FLOPs: G FLOP a byte in 16-bit, bound
by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch, power_of_two, product_type
from engine.kernels.paged_prefill import LOG2E

BLOCK_N = 64


@triton.jit(do_not_specialize=["scale", "split", "splits"])
def _paged_decode(
    q, out, parts, lse, k_cache, v_cache, tables, lengths,
    q_stride, out_stride, kv_stride, table_stride, scale, split, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin = part * split
    if begin >= length:
        return
    end = tl.minimum(begin + split, length)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD)
    head = kv_head * GROUP + row
    alive = (row < GROUP)[:, None]
    within = head[:, None] * HEAD + d[None, :]
    x = tl.load(q + sequence * q_stride + within, mask=alive, other=0.0).to(tl.float32) * scale
    x = x.to(PRODUCT)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    table = tables + sequence * table_stride
    for at in range(begin, end, BLOCK_N):
        column = at + tl.arange(0, BLOCK_N)
        there = column < end
        page = tl.load(table + column // PAGE, mask=there, other=0)
        slot = page.to(tl.int64) * PAGE + column % PAGE
        kv_at = slot[:, None] * kv_stride + kv_head * HEAD + d[None, :]
        # beyond the end the pool may hold anything, NaN too, and 0 * NaN is NaN
        key = tl.load(k_cache + kv_at, mask=there[:, None], other=0.0).to(PRODUCT)
        value = tl.load(v_cache + kv_at, mask=there[:, None], other=0.0).to(PRODUCT)
        score = tl.where(there[None, :], tl.dot(x, tl.trans(key)), float("-inf"))
        top = tl.maximum(m, tl.max(score, axis=1))
        weight = tl.exp2(score - top[:, None])
        keep = tl.exp2(m - top)
        l = l * keep + tl.sum(weight, axis=1)
        acc = acc * keep[:, None] + tl.dot(weight.to(PRODUCT), value)
        m = top
    result = acc / l[:, None]
    if DIRECT:
        tl.store(out + sequence * out_stride + within, result.to(out.dtype.element_ty), mask=alive)
    else:
        place = (sequence * HEADS + head) * splits + part
        tl.store(parts + place[:, None] * HEAD + d[None, :], result, mask=alive)
        tl.store(lse + place, m + tl.log2(l), mask=row < GROUP)


@triton.jit(do_not_specialize=["split", "splits"])
def _decode_reduce(parts, lse, out, lengths, out_stride, split, splits, HEADS: tl.constexpr, HEAD: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + sequence)
    if length <= 0:
        return
    d = tl.arange(0, HEAD)
    first = (sequence * HEADS + head) * splits
    m = tl.load(lse + first)
    acc = tl.load(parts + first * HEAD + d)
    total = 1.0
    for part in range(1, (length + split - 1) // split):  # in order: the sum's bits depend on the length alone
        this = tl.load(lse + first + part)
        top = tl.maximum(m, this)
        keep, add = tl.exp2(m - top), tl.exp2(this - top)
        acc = acc * keep + tl.load(parts + (first + part) * HEAD + d) * add
        total = total * keep + add
        m = top
    tl.store(out + sequence * out_stride + head * HEAD + d, (acc / total).to(out.dtype.element_ty))


def split_length(max_context: int) -> int:
    """Tokens a split, fixed for a model: 256, or 512 where a context can have more than 32 splits of that."""
    return 256 if max_context <= 8192 else 512


def occupancy_split(sequences: int, kv_heads: int, longest: int, processors: int) -> int:
    """The shortest split, a multiple of BLOCK_N, that gives each processor about two programs; not invariant."""
    wanted = max(1, 2 * processors // max(1, sequences * kv_heads))
    return max(4 * BLOCK_N, -(-longest // wanted // BLOCK_N) * BLOCK_N)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page: int,
    scale: float,
    split: int,
    splits: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, H, D] attended.  splits: enough for the longest row, ``ceil(longest / split)`` or more."""
    out = torch.empty_like(q) if out is None else out
    sequences, heads, head = q.shape
    kv_heads = k_cache.shape[1]
    if splits == 1:
        parts = lse = lengths  # not written
    else:
        parts = torch.empty(sequences, heads, splits, head, dtype=torch.float32, device=q.device)
        lse = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    launch(
        _paged_decode,
        (sequences, kv_heads, splits),
        q,
        out,
        parts,
        lse,
        k_cache,
        v_cache,
        tables,
        lengths,
        q.stride(0),
        out.stride(0),
        k_cache.stride(0),
        tables.stride(0),
        scale * LOG2E,
        split,
        splits,
        HEADS=heads,
        GROUP=heads // kv_heads,
        ROWS=max(16, power_of_two(heads // kv_heads)),
        HEAD=head,
        PAGE=page,
        BLOCK_N=BLOCK_N,
        PRODUCT=product_type(q.dtype),
        DIRECT=splits == 1,
        warps=4,
        stages=3,
    )
    if splits > 1:
        launch(
            _decode_reduce,
            (sequences, heads),
            parts,
            lse,
            out,
            lengths,
            out.stride(0),
            split,
            splits,
            HEADS=heads,
            HEAD=head,
            warps=1,
        )
    return out
