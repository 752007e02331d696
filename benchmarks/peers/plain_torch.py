"""A plain Llama forward in torch, as fast as torch alone gives it: whole batches, contiguous KV, fused attention.

Usage: plain_torch.py FOLDER fp32|bf16|int4   (int4: torch's packed 4-bit product, groups of 32, and an 8-bit head)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from worker import serve


class Linear:
    """x -> x W^T at one precision."""

    def __init__(self, weight: torch.Tensor, kind: str) -> None:
        self.kind, self.outputs = kind, weight.shape[0]
        if kind == "int4":
            groups = weight.view(weight.shape[0], -1, 32)
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            scale = (high - low).clamp(min=1e-8) / 15
            q = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).view(weight.shape)
            self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2)
            self.scales = torch.stack([scale, low + 8 * scale], -1).squeeze(2).transpose(0, 1).contiguous().bfloat16()
        elif kind == "int8":
            scale = weight.abs().amax(1) / 127
            self.weight = (weight / scale[:, None]).round().to(torch.int8)
            self.scales = scale.bfloat16()
        else:
            self.weight = weight.to(torch.bfloat16 if kind == "bf16" else torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "int4":
            flat = x.reshape(-1, x.shape[-1])
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.weight, 32, self.scales)
            return y.view(*x.shape[:-1], self.outputs)
        if self.kind == "int8":
            return torch.ops.aten._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.weight, self.scales).view(
                *x.shape[:-1], self.outputs
            )
        return F.linear(x, self.weight)


class PlainTorch:
    """See ``worker.Peer``."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.shape = json.loads((folder / "config.json").read_text())
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(str(file))
        self.dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        self.heads, self.kv_heads = self.shape["num_attention_heads"], self.shape["num_key_value_heads"]
        self.size = self.shape.get("head_dim") or self.shape["hidden_size"] // self.heads
        self.embedding = weights["model.embed_tokens.weight"].to(self.dtype)
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()
        self.head = Linear(head, "int8" if kind == "int4" else kind)
        self.norm = weights["model.norm.weight"].to(self.dtype)
        self.layers = []
        for i in range(self.shape["num_hidden_layers"]):
            p = f"model.layers.{i}."

            def w(name: str, p: str = p) -> torch.Tensor:
                return weights[p + name + ".weight"].float()

            self.layers.append(
                (
                    w("input_layernorm").to(self.dtype),
                    Linear(torch.cat([w(f"self_attn.{x}_proj") for x in "qkv"]), kind),
                    Linear(w("self_attn.o_proj"), kind),
                    w("post_attention_layernorm").to(self.dtype),
                    Linear(torch.cat([w("mlp.gate_proj"), w("mlp.up_proj")]), kind),
                    Linear(w("mlp.down_proj"), kind),
                )
            )
        theta = self.shape.get("rope_theta") or self.shape["rope_parameters"]["rope_theta"]
        frequency = theta ** (-torch.arange(0, self.size, 2).double() / self.size)
        angle = torch.arange(4096).double()[:, None] * frequency
        self.cos, self.sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _rotate(self, x: torch.Tensor, at: int) -> torch.Tensor:
        n = x.shape[1]
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[at : at + n, None], self.sin[at : at + n, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, at: int) -> torch.Tensor:
        """ids: [batch, n] at positions at .. at + n; logits of the last position."""
        batch, n = ids.shape
        x = F.embedding(ids, self.embedding)
        width, eps = self.shape["hidden_size"], self.shape["rms_norm_eps"]
        for layer, (norm1, qkv, o, norm2, gate_up, down) in enumerate(self.layers):
            y = qkv(F.rms_norm(x, (width,), norm1, eps)).view(batch, n, -1, self.size)
            q, k, v = y.split([self.heads, self.kv_heads, self.kv_heads], 2)
            keys, values = self.cache[layer]
            keys[:, :, at : at + n] = self._rotate(k, at).transpose(1, 2)
            values[:, :, at : at + n] = v.transpose(1, 2)
            y = F.scaled_dot_product_attention(
                self._rotate(q, at).transpose(1, 2),
                keys[:, :, : at + n],
                values[:, :, : at + n],
                is_causal=n > 1,
                enable_gqa=True,
            )
            x = x + o(y.transpose(1, 2).reshape(batch, n, -1))
            gate, up = gate_up(F.rms_norm(x, (width,), norm2, eps)).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
        return self.head(F.rms_norm(x[:, -1], (width,), self.norm, eps))

    def _room(self, batch: int, length: int) -> None:
        shape = (batch, self.kv_heads, length, self.size)
        self.cache = [(torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)) for _ in self.layers]

    def prefill(self, tokens: int) -> None:
        self._room(1, tokens)
        self._forward(torch.randint(3, 20000, (1, tokens)), 0)

    def start(self, batch: int, context: int) -> None:
        self._room(batch, context + 256)
        self.at = context
        one = torch.randint(3, 20000, (1, context))
        self.last = self._forward(one.expand(batch, -1), 0).argmax(-1, keepdim=True)

    def step(self) -> None:
        self.last = self._forward(self.last, self.at).argmax(-1, keepdim=True)
        self.at += 1


if __name__ == "__main__":
    serve(PlainTorch(Path(sys.argv[1]), sys.argv[2]))
