"""Products of few rows, in 16 and 32 bits and with weights of 8 and 4 bits, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.gemm_quant import embed_q8, gemm_quant
from engine.kernels.gemm_small_m import gemm_reference, gemm_small_m
from engine.kernels.quantised import Quantised, pack_q4, pack_q8, unpack

PACK = {"q8_0": pack_q8, "q4_1": pack_q4}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tolerance(dtype: torch.dtype, k: int) -> float:
    """Absolute, for x and w / sqrt(K) of unit variance: the result is about 1 and is rounded once to ``dtype``; the sum
    itself is fp32 (the interpreter cuts bf16 off, it does not round)."""
    return {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 576, 96), (3, 1536, 40), (17, 100, 33), (65, 128, 64)])
@pytest.mark.parametrize("invariant", [True, False])
def test_gemm(dtype: torch.dtype, m: int, k: int, n: int, invariant: bool) -> None:
    x, w = randn(m, k).to(dtype), (randn(n, k, seed=1) / k**0.5).to(dtype)
    got = gemm_small_m(x, w, invariant=invariant)
    want = gemm_reference(x.double(), w.double())
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= tolerance(dtype, k) * want.abs().clamp(min=1.0)).all()


def test_gemm_makes_fp32_logits_of_16_bit_rows() -> None:
    x, w = randn(2, 576).half(), (randn(70, 576, seed=1) / 24).half()
    got = gemm_small_m(x, w, dtype=torch.float32)
    assert got.dtype == torch.float32
    assert (got.double() - gemm_reference(x.double(), w.double())).abs().max() < 1e-5


@pytest.mark.usefixtures("ordered_products")
def test_gemm_rows_have_the_same_bits_alone_and_among_others() -> None:
    x, w = randn(70, 576), randn(40, 576, seed=1)
    packed = pack_q4(w), pack_q8(w)
    together = gemm_small_m(x, w), *(gemm_quant(x, one) for one in packed)
    for row in (0, 5, 64, 69):
        alone = x[row : row + 1]
        for got, many in zip(
            (gemm_small_m(alone, w), *(gemm_quant(alone, one) for one in packed)), together, strict=True
        ):
            assert torch.equal(got[0], many[row])


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 576, 96), (18, 96, 70), (2, 100, 33)])  # K no whole number of groups
def test_gemm_quant_computes_with_the_unpacked_weights(kind: str, dtype: torch.dtype, m: int, k: int, n: int) -> None:
    x, packed = randn(m, k).to(dtype), PACK[kind](randn(n, k, seed=1) / k**0.5)
    want = gemm_reference(x.double(), unpack(packed).double())
    for invariant in (True, False):
        got = gemm_quant(x, packed, invariant=invariant)
        assert ((got.double() - want).abs() <= tolerance(dtype, k) * want.abs().clamp(min=1.0)).all()


def grid(kind: str, n: int, k: int) -> torch.Tensor:
    """Weights that a file in this format can hold, each group with both of its ends."""
    random = torch.Generator().manual_seed(3)
    step = (torch.rand(n, k // 32, 1, generator=random) * 0.02).half().float()
    if kind == "q8_0":
        q = torch.randint(-127, 128, (n, k // 32, 32), generator=random).float()
        q[..., 0] = 127
        return (q * step).view(n, k)
    q = torch.randint(0, 16, (n, k // 32, 32), generator=random).float()
    q[..., 0], q[..., 31] = 0, 15
    base = (torch.rand(n, k // 32, 1, generator=random) - 1).half().float() * 0.1
    return (q * step + base.half().float()).view(n, k)


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_weights_from_a_file_of_that_format_come_out_as_they_went_in(kind: str) -> None:
    weight = grid(kind, 24, 192)
    packed = PACK[kind](weight)
    assert packed.exact
    assert torch.equal(unpack(packed), weight)
    assert packed.bytes == {"q8_0": 24 * 192 + 24 * 6 * 2, "q4_1": 24 * 96 + 2 * 24 * 6 * 2}[kind]


@pytest.mark.parametrize(("kind", "worst"), [("q8_0", 1 / 254), ("q4_1", 1 / 30)])
def test_other_weights_lose_at_most_half_a_step(kind: str, worst: float) -> None:
    weight = randn(9, 320)
    packed = PACK[kind](weight)
    assert not packed.exact
    groups = weight.view(9, -1, 32)
    span = groups.abs().amax(-1) if kind == "q8_0" else groups.amax(-1) - groups.amin(-1)
    off = (unpack(packed).view(9, -1, 32) - groups).abs().amax(-1)
    assert (off <= span * worst * 1.02 + 1e-3).all()  # 1.02 and 1e-3: the rounding of scale and base to halves


def test_a_group_of_zeros_and_a_weight_that_is_not_finite() -> None:
    weight = torch.zeros(2, 64)
    for pack in PACK.values():
        assert torch.equal(unpack(pack(weight)), weight)
    weight[1, 3] = float("nan")
    for pack in PACK.values():
        packed = pack(weight)
        assert not packed.exact
        assert not torch.isfinite(unpack(packed)[1]).all()


def test_rows_of_a_quantised_matrix() -> None:
    packed = pack_q8(randn(40, 64))
    assert torch.equal(unpack(packed.rows(8, 24)), unpack(packed)[8:24])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 576])
def test_embed_gathers_rows(dtype: torch.dtype, width: int) -> None:
    packed: Quantised = pack_q8(randn(50, width))
    ids = torch.tensor([0, 49, 7, 7], dtype=torch.int32)
    want = unpack(packed)[ids.long()].double()
    got = embed_q8(ids, packed, dtype)
    assert got.dtype == dtype
    relative = {torch.float32: 1e-7, torch.float16: 2**-11, torch.bfloat16: 2**-7}[dtype]  # one cast
    assert ((got.double() - want).abs() <= relative * want.abs() + 1e-7).all()


@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(1, 70), k=st.integers(1, 200), n=st.integers(1, 80), kind=st.sampled_from(["fp32", "q8_0", "q4_1"])
)
def test_gemm_of_any_shape(m: int, k: int, n: int, kind: str) -> None:
    x, w = randn(m, k, seed=m), randn(n, k, seed=n) / k**0.5
    if kind == "fp32":
        got, want = gemm_small_m(x, w, invariant=False), gemm_reference(x.double(), w.double())
    else:
        packed = PACK[kind](w)
        got, want = gemm_quant(x, packed, invariant=False), gemm_reference(x.double(), unpack(packed).double())
    assert (got.double() - want).abs().max() < 3e-5
