"""Norms, rotation with the cache write, and the MLP's gate against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from engine.kernels.rope import rope_and_cache, rope_reference
from engine.kernels.silu_mul import silu_mul, silu_mul_reference
from tests.kernels.paged import TOLERANCE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the type's tolerance, relative where values are above 1."""
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= TOLERANCE[dtype] * want.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1000])  # SmolLM2's 576 and 1000 are no powers of two
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = randn(3, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    close(rms_norm(x, weight, EPS), rms_norm_reference(x.double(), weight.double(), EPS), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_also_keeps_the_sum(dtype: torch.dtype) -> None:
    x, residual, weight = (
        randn(3, 576, dtype=dtype),
        randn(3, 576, dtype=dtype, seed=1),
        randn(576, dtype=dtype, seed=2),
    )
    total = x.double() + residual.double()
    got = add_rms_norm(x, residual, weight, EPS)
    close(residual, total, dtype)
    close(got, rms_norm_reference(residual.double(), weight.double(), EPS), dtype)


def test_rms_norm_of_rows_with_a_stride_and_of_zeros() -> None:
    wide = randn(4, 200, dtype=torch.float32)
    x, weight = wide[:, :96], randn(96, dtype=torch.float32, seed=1)
    x[2] = 0.0
    close(rms_norm(x, weight, EPS, torch.empty(4, 96)), rms_norm_reference(x.double(), weight.double(), EPS), x.dtype)


def tables(head: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(64)[:, None] * (1e4 ** (-torch.arange(head // 2) * 2.0 / head))[None, :]
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head"), [(9, 3, 64), (4, 1, 128), (2, 2, 64)])
def test_rope_rotates_and_writes_only_its_slots(dtype: torch.dtype, heads: int, kv_heads: int, head: int) -> None:
    tokens, slots = 4, torch.tensor([5, -1, 33, 0], dtype=torch.int32)
    positions = torch.tensor([0, 7, 63, 31], dtype=torch.int32)
    qkv = randn(tokens, (heads + 2 * kv_heads) * head, dtype=dtype)
    cos, sin = tables(head, positions)
    q = torch.full((tokens, heads, head), float("nan"), dtype=dtype)
    keys, values = (torch.full((48, kv_heads, head), 7.0, dtype=dtype) for _ in range(2))
    rope_and_cache(qkv, q, keys, values, cos, sin, positions, slots)
    rows = qkv.view(tokens, -1, head).double()
    turned = rope_reference(rows[:, : heads + kv_heads], cos[positions.long()], sin[positions.long()])
    close(q, turned[:, :heads], dtype)  # a padding row's query is rotated too, it does no harm
    kept = slots >= 0
    close(keys[slots[kept].long()], turned[kept, heads:], dtype)
    close(values[slots[kept].long()], rows[kept, heads + kv_heads :], dtype)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[kept].long()] = False
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


def test_rope_writes_an_fp8_cache() -> None:
    heads, kv_heads, head = 6, 2, 64
    qkv = randn(2, (heads + 2 * kv_heads) * head, dtype=torch.float32)
    at = torch.tensor([0, 1], dtype=torch.int32)
    cos, sin = tables(head, at)
    keys, values = (torch.zeros(2, kv_heads, head, dtype=torch.float8_e4m3fn) for _ in range(2))
    q = torch.empty(2, heads, head)
    rope_and_cache(qkv, q, keys, values, cos, sin, at, at)
    rows = qkv.view(2, -1, head)
    turned = rope_reference(rows.double(), cos[:2], sin[:2])[:, heads : heads + kv_heads]
    for got, want in ((keys, turned), (values, rows[:, heads + kv_heads :].double())):
        # the interpreter's cast loses the carry where rounding up reaches the next power of two (1.98 becomes 1, not 2)
        exact = want.float().to(torch.float8_e4m3fn).double()
        carried = (torch.frexp(exact).mantissa.abs() == 0.5) & (exact.abs() > want.abs())
        assert carried.float().mean() < 0.1
        # 3 bits of mantissa: an eighth between two neighbours; 2^-9 between two subnormals
        assert (carried | ((got.double() - want).abs() <= want.abs() / 8 + 2**-9)).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_with_bias_and_head_norms(biased: bool, normed: bool) -> None:
    heads, kv_heads, head, dtype = 6, 2, 64, torch.float32
    width = (heads + 2 * kv_heads) * head
    qkv, bias = randn(3, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    norms = (randn(head, dtype=dtype, seed=2), randn(head, dtype=dtype, seed=3))
    positions = torch.tensor([1, 2, 40], dtype=torch.int32)
    cos, sin = tables(head, positions)
    q, keys, values = torch.empty(3, heads, head), torch.empty(3, kv_heads, head), torch.empty(3, kv_heads, head)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    rope_and_cache(
        qkv, q, keys, values, cos, sin, positions, slots,
        bias=bias if biased else None, norms=norms if normed else None, eps=1e-6,
    )  # fmt: skip
    rows = (qkv.double() + (bias.double() if biased else 0.0)).view(3, -1, head)
    mine, theirs = rows[:, :heads], rows[:, heads : heads + kv_heads]
    if normed:
        mine = rms_norm_reference(mine, norms[0].double(), 1e-6)
        theirs = rms_norm_reference(theirs, norms[1].double(), 1e-6)
    at = positions.long()
    close(q, rope_reference(mine, cos[at], sin[at]), dtype)
    close(keys[slots.long()], rope_reference(theirs, cos[at], sin[at]), dtype)
    close(values[slots.long()], rows[:, heads + kv_heads :], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 1536, 1100])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    x = randn(2, 2 * width, dtype=dtype) * 3
    close(silu_mul(x), silu_mul_reference(x.double()), dtype)


def test_silu_of_extreme_gates_is_finite() -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, -0.0, 1.0, 1.0, 1.0, 1.0]])
    assert silu_mul(x).tolist() == [[0.0, 200.0, 0.0, 0.0]]


@settings(max_examples=12, deadline=None)
@given(width=st.integers(1, 300), rows=st.integers(1, 3), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm_of_any_width_and_size(width: int, rows: int, scale: float) -> None:
    x, weight = randn(rows, width, dtype=torch.float32, seed=width) * scale, randn(width, dtype=torch.float32, seed=1)
    close(rms_norm(x, weight, EPS), rms_norm_reference(x.double(), weight.double(), EPS), torch.float32)


@settings(max_examples=8, deadline=None)
@given(group=st.integers(1, 9), kv_heads=st.integers(1, 4), head=st.sampled_from([64, 128]), slot=st.integers(-1, 30))
def test_rope_of_any_number_of_heads(group: int, kv_heads: int, head: int, slot: int) -> None:
    heads = group * kv_heads
    qkv = randn(1, (heads + 2 * kv_heads) * head, dtype=torch.float32, seed=slot + 1)
    positions, slots = torch.tensor([9], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
    cos, sin = tables(head, positions)
    q, keys, values = torch.empty(1, heads, head), torch.zeros(31, kv_heads, head), torch.zeros(31, kv_heads, head)
    rope_and_cache(qkv, q, keys, values, cos, sin, positions, slots)
    rows = qkv.view(1, -1, head).double()
    turned = rope_reference(rows[:, : heads + kv_heads], cos[9:10], sin[9:10])
    close(q, turned[:, :heads], torch.float32)
    want = torch.zeros(31, kv_heads, head, dtype=torch.double)
    if slot >= 0:
        want[slot] = turned[0, heads:]
    close(keys, want, torch.float32)
