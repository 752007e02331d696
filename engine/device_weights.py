"""A model's weights on the device of the Triton runner: in 16 or 32 bits or quantised, whole or one rank's shard.

Products that share their input are one matrix: q, k, v, and gate and up.  With tensor parallelism a rank has its
heads and its part of the MLP: rows of qkv and gate_up, columns of o and down, so that the ranks' results of o and of
down add up to the whole.  Of embedding and head it has its part of the vocabulary, where that can be cut evenly: a
token's row is found on one rank and 0 on the others, and logits are put one after the other.  Norms are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.kernels.linear import Matrix, matrix_bytes
from engine.kernels.quantised import Quantised, pack_q4, pack_q8
from models.errors import UserError
from models.shape import ModelShape

#: What ``--weights`` may be here, and the type of activations and KV that goes with it.
KINDS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of ``world``."""

    rank: int = 0
    world: int = 1

    def part(self, n: int) -> slice:
        """Its part of n equal things, which ``check`` has made sure of."""
        each = n // self.world
        return slice(self.rank * each, (self.rank + 1) * each)

    def check(self, shape: ModelShape) -> None:
        """Raises UserError when the model cannot be cut into so many parts."""
        for name, n in (("KV heads", shape.n_kv_heads), ("FFN inputs", shape.ffn)):
            if n % self.world:
                raise UserError(
                    f"{n} {name} cannot be cut into {self.world} equal parts",
                    where="--tensor-parallel",
                    remedy=f"use a divisor of {shape.n_kv_heads}",
                )


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; bias and head_norms where the model has them."""

    norm1: torch.Tensor
    qkv: Matrix
    o: Matrix
    norm2: torch.Tensor
    gate_up: Matrix
    down: Matrix
    bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """kind: one of KINDS.  head: the embedding itself where they are tied.

    first: the first token of the part of the vocabulary that embedding and head have here; None: they have it all.
    """

    kind: str
    embedding: Matrix
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Matrix
    first: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and KV."""
        return KINDS[self.kind]

    @property
    def bytes(self) -> int:
        """Bytes of all matrices; a tied head counts once."""
        tops = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        layers = [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(matrix_bytes(matrix) for matrix in (*tops, *layers))


class _Inexact(Exception):
    """Four bits would change a weight."""


def load_weights(
    weights: Mapping[str, torch.Tensor], shape: ModelShape, kind: str, device: torch.device, shard: Shard
) -> DeviceWeights:
    """kind: one of KINDS, or auto: int4 where that loses nothing, as with a model from a 4-bit file, else bf16."""
    shard.check(shape)
    if kind == "auto":
        try:
            return _load(weights, shape, "int4", device, shard, exactly=True)
        except _Inexact:
            kind = "bf16"
    if kind not in KINDS:
        raise UserError(
            f"{kind} weights are for the CPU", where="--weights", remedy=f"use auto or one of {', '.join(KINDS)}"
        )
    return _load(weights, shape, kind, device, shard, exactly=False)


def _load(
    weights: Mapping[str, torch.Tensor],
    shape: ModelShape,
    kind: str,
    device: torch.device,
    shard: Shard,
    *,
    exactly: bool,
) -> DeviceWeights:
    dtype = KINDS[kind]

    def vector(name: str) -> torch.Tensor:
        return weights[name].to(device, dtype)

    def matrix(weight: torch.Tensor, pack: Callable[[torch.Tensor], Quantised] | None) -> Matrix:
        if pack is None:
            return weight.to(device, dtype).contiguous()
        packed = pack(weight)
        if exactly and pack is pack_q4 and not packed.exact:
            raise _Inexact
        return packed.to(device)

    in_layer = {"int8": pack_q8, "int4": pack_q4}.get(kind)
    # at 4 bits the embedding and the head stay at 8, where a coarse grid hurts most
    top = pack_q8 if in_layer is not None else None
    layers = []
    for i in range(shape.n_layers):
        p = f"model.layers.{i}."
        heads, kv = shard.part(shape.n_heads), shard.part(shape.n_kv_heads)
        ffn = shard.part(shape.ffn)

        def rows(name: str, part: slice, p: str = p) -> torch.Tensor:
            """Of the heads of a part."""
            whole = weights[p + name]
            return whole[part.start * shape.head_dim : part.stop * shape.head_dim]

        parts = (("q", heads), ("k", kv), ("v", kv))
        columns = slice(heads.start * shape.head_dim, heads.stop * shape.head_dim)
        layers.append(
            Layer(
                norm1=vector(p + "input_layernorm.weight"),
                qkv=matrix(torch.cat([rows(f"self_attn.{x}_proj.weight", part) for x, part in parts]), in_layer),
                o=matrix(weights[p + "self_attn.o_proj.weight"][:, columns], in_layer),
                norm2=vector(p + "post_attention_layernorm.weight"),
                gate_up=matrix(torch.cat([weights[p + f"mlp.{x}_proj.weight"][ffn] for x in ("gate", "up")]), in_layer),
                down=matrix(weights[p + "mlp.down_proj.weight"][:, ffn], in_layer),
                bias=torch.cat([rows(f"self_attn.{x}_proj.bias", part) for x, part in parts]).to(device, dtype)
                if shape.qkv_bias
                else None,
                head_norms=(vector(p + "self_attn.q_norm.weight"), vector(p + "self_attn.k_norm.weight"))
                if shape.qk_norm
                else None,
            )
        )
    cut = shard.world > 1 and shape.vocab % shard.world == 0
    tokens = shard.part(shape.vocab) if cut else slice(None)
    embedding = matrix(weights["model.embed_tokens.weight"][tokens], top)
    head = embedding if shape.tied_embeddings else matrix(weights["lm_head.weight"][tokens], top)
    first = int(tokens.start) if cut else None
    return DeviceWeights(kind, embedding, tuple(layers), vector("model.norm.weight"), head, first)
