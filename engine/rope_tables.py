"""Cosines and sines of every position, made once, in float64 until the end."""

from __future__ import annotations

import torch

from models.shape import ModelShape


def rope_tables(shape: ModelShape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each [length, head size / 2] float32 (frequencies: ``ModelShape``)."""
    frequency = torch.tensor(shape.inverse_frequencies(), dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency[None, :]
    return angle.cos().float(), angle.sin().float()
