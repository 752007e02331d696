"""The tokens that the step before drew, put where this step reads its input: nothing of it goes through the host.

    ids [R] int32, in place      drawn [N] int64

An id below 0 stands for a token that the host does not know yet: -1 - k is token k of those drawn last.

Tiling: 256 ids a program, elementwise.  Moves at most 12 R bytes: a launch and nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import launch

_BLOCK = 256


@triton.jit(do_not_specialize=["R"])
def _feed(ids, drawn, R, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + at, mask=at < R, other=0)
    open_ = token < 0
    known = tl.load(drawn + (-1 - token), mask=open_, other=0).to(tl.int32)
    tl.store(ids + at, known, mask=open_)


def feed(ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """Fill in, in place, what the last step drew."""
    launch(_feed, (triton.cdiv(len(ids), _BLOCK),), ids, drawn, len(ids), BLOCK=_BLOCK, warps=4)


def feed_reference(ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The same as a new tensor."""
    return torch.where(ids < 0, drawn[(-1 - ids).clamp(min=0)].int(), ids)
