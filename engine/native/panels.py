"""Weights as ``panels.h`` reads them: panels of 16 outputs in float, bfloat16, or 8 or 4 bits with scales."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

PANEL = 16  # NR of vectors.h
GROUP = 32  # GROUP of panels.h
TYPES = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, "int4-bf16": 4}  # the enumeration of panels.h


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in panels.  data: its bytes.  exact: unpacking it gives the very weights that were packed."""

    data: torch.Tensor
    type: str
    outputs: int  # up to a multiple of 16
    inputs: int
    exact: bool


def pack(library: ctypes.CDLL, weight: torch.Tensor, kind: str) -> Packed:
    """[outputs, inputs] -> panels, outputs padded with zeros.  kind: one of TYPES; inputs: a multiple of 16."""
    weight = weight.float().contiguous()
    outputs, inputs = weight.shape
    padded = -(-outputs // PANEL) * PANEL
    data = torch.zeros(padded // PANEL * library.tailspan_panel_bytes(TYPES[kind], inputs), dtype=torch.uint8)
    exact = library.tailspan_pack(TYPES[kind], weight.data_ptr(), outputs, inputs, data.data_ptr())
    return Packed(data, kind, padded, inputs, bool(exact))
