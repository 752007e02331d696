"""Weights as ``panels.h`` reads them: panels of 16 outputs in float, bfloat16, or 8 or 4 bits with scales.

INT8 and INT4 keep a scale for each group of 32 inputs, as GGUF's Q8_0 and Q4_1 do and rounded as they are: weights
that came from such a file are packed without loss (``exact``).
"""

from __future__ import annotations

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


def pack(weight: torch.Tensor, kind: str) -> Packed:
    """[outputs, inputs] float -> panels; outputs are padded with zeros.  ``kind`` is one of TYPES."""
    panels = _panels(weight)
    padded, inputs = panels.shape[0] * PANEL, panels.shape[2]
    if kind == "fp32":
        return Packed(_bytes(panels.transpose(1, 2)), kind, padded, inputs, True)
    if kind == "bf16":
        short = panels.to(torch.bfloat16)
        pairs = short.view(-1, PANEL, inputs // 2, 2).transpose(1, 2)
        return Packed(_bytes(pairs), kind, padded, inputs, torch.equal(short.float(), panels))
    grouped = _groups(panels)
    packed, unpacked = (_int8 if kind == "int8" else _int4)(grouped)
    return Packed(packed, kind, padded, inputs, torch.equal(unpacked, grouped))


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The weights that are left of ``weight`` at a precision: what ``pack`` keeps, as [outputs, inputs] float."""
    if kind == "fp32":
        return weight.float()
    if kind == "bf16":
        return weight.to(torch.bfloat16).float()
    _, unpacked = (_int8 if kind == "int8" else _int4)(_groups(_panels(weight)))
    return unpacked.transpose(1, 2).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] -> [panels, 16, inputs]."""
    rows, inputs = weight.shape
    padded = -(-rows // PANEL) * PANEL
    if padded != rows:
        weight = torch.cat([weight, weight.new_zeros(padded - rows, inputs)])
    return weight.float().view(-1, PANEL, inputs)


def _groups(panels: torch.Tensor) -> torch.Tensor:
    """[panels, 16, inputs] -> [panels, groups, 16, 32]; a last group that is short repeats its last input."""
    inputs = panels.shape[2]
    groups = -(-inputs // GROUP)
    if inputs % GROUP:
        panels = torch.cat([panels, panels[:, :, -1:].expand(-1, -1, groups * GROUP - inputs)], dim=2)
    return panels.view(-1, PANEL, groups, GROUP).transpose(1, 2).contiguous()


def _int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    d = (w.abs().amax(-1, keepdim=True) / 127).half()
    q = _over(w, d.float()).round().clamp(-127, 127)
    words = (q + 128).to(torch.uint8).view(torch.int32)  # [panels, groups, 16, 8], little-endian
    block = torch.cat([_flat(d), _flat(words.transpose(-1, -2))], dim=-1)
    return block.contiguous().view(-1), q * d.float()


def _int4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    d, m = ((high - low) / 15).half(), low.half()
    q = _over(w - m.float(), d.float()).round().clamp(0, 15)
    pairs = q.to(torch.uint8).view(*q.shape[:-1], GROUP // 2, 2)
    words = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int32)  # [panels, groups, 16, 4], little-endian
    block = torch.cat([_flat(d), _flat(m), _flat(words.transpose(-1, -2))], dim=-1)
    return block.contiguous().view(-1), torch.addcmul(m.float(), q, d.float())


def _over(w: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """w / d, 0 where d is 0."""
    return torch.where(d == 0, torch.zeros_like(w), w / torch.where(d == 0, torch.ones_like(d), d))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(-1)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[panels, groups, ...] -> [panels, groups, bytes]."""
    return tensor.contiguous().view(torch.uint8).flatten(2)
