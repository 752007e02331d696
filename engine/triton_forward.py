"""One step's kernels in order, from token ids to logits: nothing of pools, graphs, requests or the host.

Separate from the runner so that the table of compiled kernels (``engine.kernel_table``) walks the very same code with
tensors that have no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.device_batch import Layout, Limits, chunk_batch
from engine.device_weights import DeviceWeights, Layer
from engine.kernels.gemm_quant import embed_q8
from engine.kernels.linear import Matrix, linear
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.paged_decode import occupancy_split, paged_decode
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.quantised import Quantised
from engine.kernels.rope import rope_and_cache
from engine.kernels.silu_mul import silu_mul
from models.shape import ModelShape

KvPool = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Forward:
    """rope: cos and sin, [context, D / 2] fp32.  world: ranks.  processors: of the device, where rows may vary.

    add_up: sums a product over the ranks.  put_together: [rows, n] of every rank, side by side, [rows, n world].  None
    for one rank.
    """

    shape: ModelShape
    weights: DeviceWeights
    rope: tuple[torch.Tensor, torch.Tensor]
    limits: Limits
    invariant: bool = True
    world: int = 1
    processors: int = 1
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None
    put_together: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, layout: Layout, ints: torch.Tensor, kv: KvPool) -> torch.Tensor:
        """Write the step's KV; logits of its samples, [samples, vocabulary] float32.

        ints: the step's memory (``device_batch``).  kv: keys and values of each layer, [slots, KV heads, D].
        """
        at, weights, eps = layout.views(ints), self.weights, self.shape.rms_eps
        hidden = self._embedded(at["ids"])
        normed = rms_norm(hidden, weights.layers[0].norm1, eps)
        for i, layer in enumerate(weights.layers):
            attended = self._attend(normed, layer, layout, at, kv[i])
            normed = add_rms_norm(self._summed(attended, layer.o), hidden, layer.norm2, eps)
            gated = silu_mul(self._linear(normed, layer.gate_up))
            norm = weights.layers[i + 1].norm1 if i + 1 < len(weights.layers) else weights.norm
            normed = add_rms_norm(self._summed(gated, layer.down), hidden, norm, eps)
        logits = self._linear(normed[at["samples"]], weights.head, torch.float32)
        return logits if weights.first is None or self.put_together is None else self.put_together(logits)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding; of a part of the vocabulary, 0 for what is not in it, summed over the ranks."""
        table, dtype, first = self.weights.embedding, self.weights.dtype, self.weights.first
        here = ids if first is None else ids - first
        if first is not None:
            size = table.outputs if isinstance(table, Quantised) else len(table)
            inside = (here >= 0) & (here < size)
            here = torch.where(inside, here, 0)
        rows = embed_q8(here, table, dtype) if isinstance(table, Quantised) else table[here]
        if first is None or self.add_up is None:
            return rows
        return self.add_up(rows * inside[:, None])

    def _attend(
        self,
        normed: torch.Tensor,
        layer: Layer,
        layout: Layout,
        at: dict[str, torch.Tensor],
        kv: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """From a layer's normalised rows to its attended heads, [rows, heads * D]."""
        shape, (keys, values), limits = self.shape, kv, self.limits
        heads, kv_heads, head = shape.n_heads // self.world, keys.shape[1], shape.head_dim
        qkv = self._linear(normed, layer.qkv)
        q = qkv.new_empty(layout.rows, heads, head)
        rope_and_cache(
            qkv,
            q,
            keys,
            values,
            *self.rope,
            at["positions"],
            at["slots"],
            bias=layer.bias,
            norms=layer.head_norms,
            eps=shape.rms_eps,
        )
        out, n, scale = torch.empty_like(q), layout.decodes, 1.0 / math.sqrt(head)
        if n:
            split, splits = limits.split, layout.splits
            if not self.invariant:
                longest = min(splits * split, limits.max_context)
                split = occupancy_split(n, kv_heads, longest, self.processors)
                splits = -(-longest // split)
            paged_decode(
                q[:n],
                keys,
                values,
                at["decode_tables"],
                at["lengths"],
                page=limits.page,
                scale=scale,
                split=split,
                splits=splits,
                out=out[:n],
            )
        if layout.tiles:
            paged_prefill(
                q[n:],
                keys,
                values,
                chunk_batch(at),
                page=limits.page,
                scale=scale,
                block_m=layout.block_m,
                out=out[n:],
            )
        return out.view(layout.rows, heads * head)

    def _linear(self, x: torch.Tensor, w: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        return linear(x, w, invariant=self.invariant, dtype=dtype)

    def _summed(self, x: torch.Tensor, w: Matrix) -> torch.Tensor:
        """A product whose inputs are spread over the ranks."""
        part = self._linear(x, w)
        return part if self.add_up is None else self.add_up(part)
