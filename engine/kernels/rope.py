"""Everything between the QKV product and attention: bias, q/k norm, rotation, and the write to the paged KV cache.

    qkv         [T, (H + 2 K) D]  rows of q heads, k heads, v heads     positions [T] int32
    cos, sin    [context, D / 2]  fp32                                  slots [T] int32; below 0: not written
    q_out       [T, H, D]         rotated queries
    k/v cache   [slots, K, D]     slot = page * page size + offset; the type may be fp8 (a cast, no scale)
    bias        [(H + 2 K) D] (Qwen2)                                   q_norm, k_norm [D] (Qwen3)

Half-split rotation (RoFormer, arXiv 2104.09864, in the order of Hugging Face's weights): pair i is (i, i + D/2).
Tiling: a token a program, all its q and k heads at once as two tiles [heads padded to a power of two, D / 2], so that
cos and sin are read once a token and both halves of a pair are in the same thread.  Moves T (H + 2 K) D elements in
and out; bound by memory, and by launches at small T: hence one kernel for all five steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch, power_of_two


@triton.jit(do_not_specialize=["eps"])
def _rope_and_cache(
    qkv, q_out, k_cache, v_cache, cos, sin, positions, slots, bias, q_norm, k_norm,
    qkv_stride, q_stride, kv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    pair = tl.arange(0, HALF)
    within = head[:, None] * HEAD + pair[None, :]
    alive = (head < HEADS + KV_HEADS)[:, None]
    row = qkv + token * qkv_stride
    a = tl.load(row + within, mask=alive, other=0.0).to(tl.float32)
    b = tl.load(row + within + HALF, mask=alive, other=0.0).to(tl.float32)
    if HAS_BIAS:
        a += tl.load(bias + within, mask=alive, other=0.0).to(tl.float32)
        b += tl.load(bias + within + HALF, mask=alive, other=0.0).to(tl.float32)
    query = (head < HEADS)[:, None]
    if HAS_NORM:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD
        scale = tl.rsqrt(mean + eps)[:, None]
        q_low, q_high = tl.load(q_norm + pair).to(tl.float32), tl.load(q_norm + HALF + pair).to(tl.float32)
        k_low, k_high = tl.load(k_norm + pair).to(tl.float32), tl.load(k_norm + HALF + pair).to(tl.float32)
        a = a * scale * tl.where(query, q_low[None, :], k_low[None, :])
        b = b * scale * tl.where(query, q_high[None, :], k_high[None, :])
    c = tl.load(cos + position * HALF + pair)[None, :]
    s = tl.load(sin + position * HALF + pair)[None, :]
    low = a * c - b * s
    high = b * c + a * s
    q_at = q_out + token * q_stride + within
    tl.store(q_at, low.to(q_out.dtype.element_ty), mask=query & alive)
    tl.store(q_at + HALF, high.to(q_out.dtype.element_ty), mask=query & alive)
    if slot >= 0:
        key = (head >= HEADS)[:, None] & alive
        k_at = k_cache + slot * kv_stride + within - HEADS * HEAD
        tl.store(k_at, low.to(k_cache.dtype.element_ty), mask=key)
        tl.store(k_at + HALF, high.to(k_cache.dtype.element_ty), mask=key)
        v_head = tl.arange(0, BLOCK_KV)
        v_within = v_head[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
        v_alive = (v_head < KV_HEADS)[:, None]
        v_from = (HEADS + KV_HEADS) * HEAD
        value = tl.load(row + v_from + v_within, mask=v_alive, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + v_from + v_within, mask=v_alive, other=0.0).to(tl.float32)
        tl.store(v_cache + slot * kv_stride + v_within, value.to(v_cache.dtype.element_ty), mask=v_alive)


def rope_and_cache(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Fill ``q_out`` and the slots of the caches.  norms: weights of the q and the k norm."""
    tokens, heads, head = q_out.shape
    kv_heads = k_cache.shape[1]
    block_h, block_kv = power_of_two(heads + kv_heads), power_of_two(kv_heads)
    q_norm, k_norm = norms if norms is not None else (cos, cos)  # not read without HAS_NORM
    launch(
        _rope_and_cache,
        (tokens,),
        qkv,
        q_out,
        k_cache,
        v_cache,
        cos,
        sin,
        positions,
        slots,
        cos if bias is None else bias,
        q_norm,
        k_norm,
        qkv.stride(0),
        q_out.stride(0),
        k_cache.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD=head,
        BLOCK_H=block_h,
        BLOCK_KV=block_kv,
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        warps=min(8, max(1, block_h * head // 1024)),
    )


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, D]; cos, sin: [T, D / 2] of the rows' positions.  In the type of x."""
    a, b = x.chunk(2, dim=-1)
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)
