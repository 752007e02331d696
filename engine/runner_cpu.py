"""The Llama forward on the CPU in torch, over a paged KV pool.

One call computes one step: every slice of the plan, decodes and chunks of prefill mixed, through shared matrix
products; attention runs per kind (decodes padded into one batch, each prefill chunk alone).  Owns weights and KV
tensors; knows nothing of queues or time.

    tokens of a step   [T] flat, decodes first; slot = page * page size + offset, where a token's K and V are kept
    kv pool            per layer [pages * page size, kv heads * head size], K and V apart
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

import psutil
import torch
import torch.nn.functional as F

from engine.config import EngineConfig
from engine.rope_tables import rope_tables
from engine.scheduler import Slice
from models.shape import ModelShape
from models.store import LoadedModel

_KV_SHARE = 0.25  # of the memory that is free at start, when the pool is not sized by hand
_KV_TOKENS = 65_536  # more than this many tokens of KV are not useful at the speed of a CPU


class CpuRunner:
    """``forward(slices)`` -> logits of the rows that sample, [rows, vocabulary] float32."""

    name = "cpu"
    has_logits = True

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        shape = model.shape
        self.shape, self.config = shape, config
        self.threads = cpu_threads(config)
        torch.set_num_threads(self.threads)
        self.dtype = (
            _choose_dtype(shape)
            if config.dtype == "auto"
            else {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
        )
        self.weight_bytes, self.kv_bytes = float(self.dtype.itemsize), self.dtype.itemsize
        self.max_context = min(config.max_context or shape.max_context, shape.max_context)
        self._cos, self._sin = rope_tables(shape, self.max_context)
        self.reweigh(model.weights)
        self.kv_blocks = config.kv_blocks or kv_blocks_from_memory(shape, config, self.dtype)
        slots = self.kv_blocks * config.block_size
        width = shape.n_kv_heads * shape.head_dim
        # never zeroed: a page is written before it is read, and the memory is only taken as pages are used
        self._keys = [torch.empty(slots, width, dtype=self.dtype) for _ in range(shape.n_layers)]
        self._values = [torch.empty(slots, width, dtype=self.dtype) for _ in range(shape.n_layers)]

    def reweigh(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights from now on; the KV pool stays as it is."""
        dtype = self.dtype

        def w(name: str) -> torch.Tensor:
            return weights[name].to(dtype)

        self._embedding = w("model.embed_tokens.weight")
        self._norm = w("model.norm.weight")
        self._head = self._embedding if self.shape.tied_embeddings else w("lm_head.weight")
        self._layers = []
        biased, normed = self.shape.qkv_bias, self.shape.qk_norm
        for i in range(self.shape.n_layers):
            p = f"model.layers.{i}."
            self._layers.append(
                (
                    w(p + "input_layernorm.weight"),
                    torch.cat([w(p + f"self_attn.{x}_proj.weight") for x in "qkv"]),
                    w(p + "self_attn.o_proj.weight"),
                    w(p + "post_attention_layernorm.weight"),
                    torch.cat([w(p + f"mlp.{x}_proj.weight") for x in ("gate", "up")]),
                    w(p + "mlp.down_proj.weight"),
                    torch.cat([w(p + f"self_attn.{x}_proj.bias") for x in "qkv"]) if biased else None,
                    [w(p + f"self_attn.{x}_norm.weight") for x in "qk"] if normed else None,
                )
            )

    @torch.inference_mode()
    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Compute the slices (decodes first) and write their KV; logits of ``rows`` of each, in order."""
        shape, eps = self.shape, self.shape.rms_eps
        step = _Step(slices, self.config.block_size)
        cos, sin = self._cos[step.positions].unsqueeze(1), self._sin[step.positions].unsqueeze(1)
        hidden = F.embedding(step.ids, self._embedding)
        q_width, kv_width = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        for layer, (norm1, w_qkv, w_o, norm2, w_gate_up, w_down, bias, head_norms) in enumerate(self._layers):
            qkv = F.linear(F.rms_norm(hidden, (shape.hidden,), norm1, eps), w_qkv, bias)
            q, k, v = torch.split(qkv, [q_width, kv_width, kv_width], dim=-1)
            q, k = q.view(-1, shape.n_heads, shape.head_dim), k.view(-1, shape.n_kv_heads, shape.head_dim)
            if head_norms is not None:
                q, k = (F.rms_norm(x, (shape.head_dim,), w, eps) for x, w in zip((q, k), head_norms, strict=True))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self._keys[layer].index_copy_(0, step.slots, k.reshape(-1, kv_width))
            self._values[layer].index_copy_(0, step.slots, v)
            hidden = hidden + F.linear(self._attend(q, layer, step), w_o)
            gate, up = F.linear(F.rms_norm(hidden, (shape.hidden,), norm2, eps), w_gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, w_down)
        rows = F.rms_norm(hidden[step.sampled], (shape.hidden,), self._norm, eps)
        return F.linear(rows, self._head).float()

    def _attend(self, q: torch.Tensor, layer: int, step: _Step) -> torch.Tensor:
        """q: [T, heads, head size], rotated.  Returns [T, heads * head size]."""
        shape = self.shape
        keys, values = self._keys[layer], self._values[layer]
        groups, scale = shape.n_heads // shape.n_kv_heads, 1.0 / math.sqrt(shape.head_dim)
        out = torch.empty_like(q)
        n = step.decodes
        if n:
            # [n, kv heads, group, head size] x [n, kv heads, head size, longest]
            k = keys[step.decode_slots].view(n, -1, shape.n_kv_heads, shape.head_dim).permute(0, 2, 3, 1)
            v = values[step.decode_slots].view(n, -1, shape.n_kv_heads, shape.head_dim).transpose(1, 2)
            score = (q[:n].view(n, shape.n_kv_heads, groups, shape.head_dim) * scale) @ k + step.decode_mask.to(q.dtype)
            out[:n] = (score.softmax(dim=-1) @ v).reshape(n, shape.n_heads, shape.head_dim)
        for chunk in step.chunks:
            k = keys[chunk.slots].view(1, -1, shape.n_kv_heads, shape.head_dim).transpose(1, 2)
            v = values[chunk.slots].view(1, -1, shape.n_kv_heads, shape.head_dim).transpose(1, 2)
            rows = q[chunk.begin : chunk.end].unsqueeze(0).transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                rows, k, v, attn_mask=chunk.mask, scale=scale, enable_gqa=groups > 1
            )
            out[chunk.begin : chunk.end] = attended[0].transpose(0, 1)
        return out.reshape(len(q), shape.n_heads * shape.head_dim)

    def warm_up(self, make_slices: Callable[[int], list[Slice]]) -> float:
        """Run a small and a full step, so that the first request meets warm code; returns seconds taken."""
        start = time.perf_counter()
        for n in (1, self.config.token_budget):
            self.forward(make_slices(n))
        return time.perf_counter() - start


class _Chunk:
    __slots__ = ("begin", "end", "mask", "slots")

    def __init__(self, piece: Slice, begin: int, block_size: int) -> None:
        self.begin, self.end = begin, begin + piece.n
        length = piece.start + piece.n
        self.slots = torch.tensor(_slots(piece.request.blocks, 0, length, block_size))
        # row i of the chunk sees the tokens up to its own position, start + i
        self.mask = torch.ones(piece.n, length, dtype=torch.bool).tril_(diagonal=piece.start)


class _Step:
    """A plan as tensors, made once and used by every layer."""

    def __init__(self, slices: Sequence[Slice], block_size: int) -> None:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        contexts: list[list[int]] = []
        self.chunks: list[_Chunk] = []
        self.decodes = 0
        for piece in slices:
            request, end = piece.request, piece.start + piece.n
            if piece.n == 1 and not self.chunks:
                contexts.append(_slots(request.blocks, 0, end, block_size))
                self.decodes += 1
            else:
                self.chunks.append(_Chunk(piece, len(ids), block_size))
            ids.extend(request.tokens[piece.start : end])
            positions.extend(range(piece.start, end))
            slots.extend(_slots(request.blocks, piece.start, end, block_size))
            if piece.all_logits:
                sampled.extend(range(len(ids) - piece.n, len(ids)))
            elif piece.sample:
                sampled.append(len(ids) - 1)
        self.ids, self.positions = torch.tensor(ids), torch.tensor(positions)
        self.slots, self.sampled = torch.tensor(slots), torch.tensor(sampled, dtype=torch.long)
        if contexts:
            longest = max(len(row) for row in contexts)
            # padding repeats the row's own last slot: always written, masked out
            self.decode_slots = torch.tensor([row + row[-1:] * (longest - len(row)) for row in contexts]).flatten()
            lengths = torch.tensor([len(row) for row in contexts])
            hidden = torch.arange(longest)[None, :] >= lengths[:, None]
            self.decode_mask = torch.zeros(len(contexts), 1, 1, longest).masked_fill_(
                hidden[:, None, None, :], float("-inf")
            )


def cpu_threads(config: EngineConfig) -> int:
    """Threads of the forward: as configured, else one for each processor this process may use."""
    if config.threads is not None:
        return config.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kv_blocks_from_memory(shape: ModelShape, config: EngineConfig, dtype: torch.dtype) -> int:
    """Pages that a share of the free memory holds, and no more than a CPU can make use of."""
    per_token = shape.kv_bytes_per_token(dtype.itemsize)
    tokens = min(int(psutil.virtual_memory().available * _KV_SHARE) // per_token, _KV_TOKENS)
    return max(1, tokens // config.block_size)


def _slots(blocks: Sequence[int], start: int, end: int, size: int) -> list[int]:
    """Slots of the tokens start .. end of a request that holds ``blocks``."""
    return [blocks[position // size] * size + position % size for position in range(start, end)]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE.  x: [T, heads, head size]; cos, sin: [T, 1, head size / 2].  Arithmetic in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _choose_dtype(shape: ModelShape) -> torch.dtype:
    """bf16 where this processor multiplies it faster than fp32 at the sizes that matter, else fp32: measured."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        total = 0.0
        weight = torch.randn(2 * shape.ffn, shape.hidden).to(dtype)
        for rows in (8, 128):
            x = torch.randn(rows, shape.hidden).to(dtype)
            best = math.inf
            for _ in range(4):
                start = time.perf_counter()
                F.linear(x, weight)
                best = min(best, time.perf_counter() - start)
            total += best
        times[dtype] = total
    return min(times, key=lambda dtype: times[dtype])
