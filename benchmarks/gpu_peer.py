"""The peer on the device: a plain Llama in torch (SDPA, static contiguous KV), optionally through torch.compile.

Without it our figures would say little: this is what torch alone gives, with CUDA graphs from mode="reduce-overhead".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from engine.rope_tables import rope_tables
from models.shape import ModelShape


class PlainGpu:
    """``room`` first, then ``prefill`` of one prompt or ``decode`` of a whole batch at one position."""

    def __init__(
        self, shape: ModelShape, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype

        def w(name: str) -> torch.Tensor:
            return weights[name].to(device, dtype)

        self.embedding, self.norm = w("model.embed_tokens.weight"), w("model.norm.weight")
        self.head = self.embedding if shape.tied_embeddings else w("lm_head.weight")
        self.layers = []
        for i in range(shape.n_layers):
            p = f"model.layers.{i}."
            self.layers.append(
                (
                    w(p + "input_layernorm.weight"),
                    torch.cat([w(p + f"self_attn.{x}_proj.weight") for x in "qkv"]),
                    w(p + "self_attn.o_proj.weight"),
                    w(p + "post_attention_layernorm.weight"),
                    torch.cat([w(p + f"mlp.{x}_proj.weight") for x in ("gate", "up")]),
                    w(p + "mlp.down_proj.weight"),
                )
            )
        self._run: Callable[..., torch.Tensor] = self._forward
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def room(self, batch: int, length: int) -> None:
        """KV for so many sequences of so many tokens."""
        self.cache = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        size = (batch, self.shape.n_kv_heads, length, self.shape.head_dim)
        self.cache = [
            (
                torch.zeros(size, device=self.device, dtype=self.dtype),
                torch.zeros(size, device=self.device, dtype=self.dtype),
            )
            for _ in self.layers
        ]
        cos, sin = rope_tables(self.shape, length)
        self.cos, self.sin = cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)
        self.last = torch.full((batch, 1), 5, device=self.device)

    def compile(self, on: bool) -> None:
        """Use torch.compile from now on, or not."""
        if not on:
            self._run = self._forward
            return
        torch._dynamo.reset()  # the last batch's graphs hold its KV
        self._run = torch.compile(self._forward, mode="reduce-overhead")

    def _forward(self, ids: torch.Tensor, at: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """ids [batch, n] at positions ``at`` [n]; logits of the last position."""
        shape, (batch, n) = self.shape, ids.shape
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]

        def rotate(y: torch.Tensor) -> torch.Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        for (norm1, qkv, o, norm2, gate_up, down), (keys, values) in zip(self.layers, self.cache, strict=True):
            y = F.linear(F.rms_norm(x, (shape.hidden,), norm1, shape.rms_eps), qkv).view(batch, n, -1, shape.head_dim)
            q, k, v = y.split([shape.n_heads, shape.n_kv_heads, shape.n_kv_heads], 2)
            keys.index_copy_(2, at, rotate(k).transpose(1, 2))
            values.index_copy_(2, at, v.transpose(1, 2))
            length = n if mask is None else keys.shape[2]
            y = F.scaled_dot_product_attention(
                rotate(q).transpose(1, 2),
                keys[:, :, :length],
                values[:, :, :length],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=shape.n_heads > shape.n_kv_heads,
            )
            x = x + F.linear(y.transpose(1, 2).reshape(batch, n, -1), o)
            gate, up = F.linear(F.rms_norm(x, (shape.hidden,), norm2, shape.rms_eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x[:, -1], (shape.hidden,), self.norm, shape.rms_eps), self.head)

    @torch.inference_mode()
    def prefill(self, n: int) -> torch.Tensor:
        """A prompt of n tokens."""
        ids = torch.arange(n, device=self.device)[None] % 1000 + 3
        return self._forward(ids, torch.arange(n, device=self.device), None).argmax(-1)

    @torch.inference_mode()
    def decode(self, context: int) -> list[int]:
        """One token for every sequence behind ``context`` tokens; its ids, on the host as a server needs them."""
        at = torch.tensor([context], device=self.device)
        mask = (torch.arange(self.cache[0][0].shape[2], device=self.device) <= context)[None, None, None]
        tokens: list[int] = self._run(self.last, at, mask).argmax(-1).tolist()
        return tokens
