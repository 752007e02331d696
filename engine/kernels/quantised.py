"""Weights of 8 or 4 bits as ``gemm_quant`` and ``embed_q8`` read them, packed once at load.

Groups of 32 inputs of one output share a scale, as in GGUF's Q8_0 and Q4_1, rounded to halves as there: weights that
came from such a file come out as they went in (``exact``).

    q8_0   w = d q          data [N, K] int8                        scales [K / 32, N] fp16
    q4_1   w = d q + m      data [N, K / 2] uint8, two groups a     scales, mins [K / 32, N] fp16
                            time: byte j of a pair of groups holds input j low and input 32 + j high

Scales lie with the outputs innermost: a tile of outputs reads them in one piece.  K is padded with zeros to a whole
number of groups (q8_0) or pairs of groups (q4_1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
_ROWS = 4096  # outputs packed at a time: bounds the memory that packing takes beside the result


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [outputs, inputs].  mins: of q4_1, else None.  exact: unpacking gives the very weights."""

    data: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None
    outputs: int
    inputs: int
    exact: bool

    @property
    def bytes(self) -> int:
        """Bytes it takes."""
        return sum(one.nbytes for one in (self.data, self.scales, self.mins) if one is not None)

    def to(self, device: torch.device | str) -> Quantised:
        """The same on another device."""
        mins = None if self.mins is None else self.mins.to(device)
        return Quantised(self.data.to(device), self.scales.to(device), mins, self.outputs, self.inputs, self.exact)

    def rows(self, begin: int, end: int) -> Quantised:
        """Some of its outputs."""
        mins = None if self.mins is None else self.mins[:, begin:end].contiguous()
        scales = self.scales[:, begin:end].contiguous()
        return Quantised(self.data[begin:end], scales, mins, end - begin, self.inputs, self.exact)


def pack_q8(weight: torch.Tensor) -> Quantised:
    """[N, K] -> q8_0."""
    pieces = [_pack_q8(part.float()) for part in weight.split(_ROWS)]
    return _join(pieces, weight)


def pack_q4(weight: torch.Tensor) -> Quantised:
    """[N, K] -> q4_1."""
    pieces = [_pack_q4(part.float()) for part in weight.split(_ROWS)]
    return _join(pieces, weight)


_Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]


def _join(pieces: list[_Piece], weight: torch.Tensor) -> Quantised:
    mins = [piece[2] for piece in pieces if piece[2] is not None]
    return Quantised(
        torch.cat([piece[0] for piece in pieces]),
        torch.cat([piece[1] for piece in pieces], dim=1),
        torch.cat(mins, dim=1) if mins else None,
        weight.shape[0],
        weight.shape[1],
        all(piece[3] for piece in pieces),
    )


def _groups(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    """[N, groups, 32], zeros behind the last input."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % multiple))
    return padded.view(weight.shape[0], -1, GROUP)


def _levels(value: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The nearest whole number of steps in low .. high; 0 where the step is 0."""
    quotient = torch.where(step == 0, torch.zeros_like(value), value / step)
    return quotient.round().nan_to_num().clamp(low, high)


def _pack_q8(weight: torch.Tensor) -> _Piece:
    groups = _groups(weight, GROUP)
    half = (groups.abs().amax(-1) / 127.0).to(torch.float16)  # not finite where a weight is not
    step = half.float()[..., None]
    q = _levels(groups, step, -127, 127)
    exact = bool(torch.equal(q * step, groups))
    return q.to(torch.int8).view(len(weight), -1), half.T.contiguous(), None, exact


def _pack_q4(weight: torch.Tensor) -> _Piece:
    groups = _groups(weight, 2 * GROUP)
    low = groups.amin(-1)
    half_d = ((groups.amax(-1) - low) / 15.0).to(torch.float16)
    half_m = low.to(torch.float16)
    step, base = half_d.float()[..., None], half_m.float()[..., None]
    q = _levels(groups - base, step, 0, 15)
    exact = bool(torch.equal(q * step + base, groups))
    pairs = q.to(torch.uint8).view(len(weight), -1, 2, GROUP)
    data = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return data.reshape(len(weight), -1), half_d.T.contiguous(), half_m.T.contiguous(), exact


def unpack(packed: Quantised) -> torch.Tensor:
    """[N, K] fp32: what the kernels compute with."""
    n = packed.outputs
    step = packed.scales.T.float()[..., None]
    if packed.mins is None:
        weight = packed.data.view(n, -1, GROUP).float() * step
    else:
        pairs = packed.data.view(n, -1, 1, GROUP)
        q = torch.cat((pairs & 15, pairs >> 4), dim=2).view(n, -1, GROUP)
        weight = q.float() * step + packed.mins.T.float()[..., None]
    return weight.reshape(n, -1)[:, : packed.inputs].contiguous()
