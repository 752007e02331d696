"""The gate of the MLP: out = silu(gate) * up, from one product that made both.

    gate_up  [T, 2 F], gate in the first half      out  [T, F]      fp16/bf16/fp32

Tiling: (row, 1024 columns) a program, elementwise.  Moves 3 T F elements, about 5 T F FLOPs: bound by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch, power_of_two


@triton.jit
def _silu_mul(gate_up, out, F, gate_up_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    alive = column < F
    at = gate_up + row * gate_up_stride + column
    gate = tl.load(at, mask=alive, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=alive, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=alive)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T, 2 F] -> [T, F], into ``out`` or a new tensor."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width) if out is None else out
    block = min(1024, power_of_two(width))
    grid = (rows, triton.cdiv(width, block))
    launch(_silu_mul, grid, gate_up, out, width, gate_up.stride(0), out.stride(0), BLOCK=block, warps=4)
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """In the type of gate_up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up
