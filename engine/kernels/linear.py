"""Which kernel makes a product: by the kind of the weights, the number of rows, and whether rows must be invariant."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.gemm_quant import gemm_quant
from engine.kernels.gemm_small_m import gemm_small_m
from engine.kernels.launch import timed
from engine.kernels.quantised import Quantised

Matrix = torch.Tensor | Quantised
SMALL_M = 64  # above it the vendor's library, where rows need not be invariant


def linear(x: torch.Tensor, w: Matrix, *, invariant: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x w^T, [M, N], in ``dtype`` (default: that of x)."""
    if isinstance(w, Quantised):
        return gemm_quant(x, w, invariant=invariant, dtype=dtype)
    if invariant or x.shape[0] <= SMALL_M:
        return gemm_small_m(x, w, invariant=invariant, dtype=dtype)
    return timed("vendor_gemm", lambda: F.linear(x, w)).to(dtype or x.dtype)


def matrix_bytes(w: Matrix) -> int:
    """Bytes that it takes."""
    return w.bytes if isinstance(w, Quantised) else w.nbytes
