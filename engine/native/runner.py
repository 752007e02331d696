"""The CPU forward in C, over the same plan and KV layout as the torch runner, bit-equal in every batch.

Owns packed weights, KV and scratch memory, and the threads that compute.  One call computes one step without the
interpreter, so the server's event loop goes on meanwhile.

Weights: ``fp32`` and ``bf16`` as they say; ``int8`` and ``int4`` with a scale per 32 inputs (at int4 the head and the
embedding stay int8, where a coarse grid hurts most); arithmetic is float.  ``int4-bf16`` rounds rows to bf16 before
each product of a layer, which a processor that multiplies pairs of bf16 does at twice the rate.  ``auto`` takes int4
when that loses nothing, which is so for a model that came from a 4-bit GGUF, or int4-bf16 on such a processor; else
bf16.  One precision serves all batch sizes: a choice by batch size would make a row's bits depend on its mates.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.native.build import library
from engine.native.panels import GROUP, PANEL, TYPES, Packed, pack
from engine.rope_tables import rope_tables
from engine.runner_cpu import cpu_threads, kv_blocks_from_memory
from engine.scheduler import Slice
from models.shape import ModelShape
from models.store import LoadedModel

log = logging.getLogger("tailspan.engine")
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class _Matrix(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("type", _INT), ("inputs", _INT), ("outputs", _INT)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("norm1", "norm2")],
        *[(name, _Matrix) for name in ("qkv", "o", "gate_up", "down")],
        *[(name, _POINTER) for name in ("k", "v")],
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *[(name, _INT) for name in ("n_layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "page")],
        *[(name, _FLOAT) for name in ("eps", "scale")],
        *[(name, _POINTER) for name in ("norm", "cos", "sin")],
        *[(name, _Matrix) for name in ("embedding", "head")],
        ("layers", _POINTER),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, _INT) for name in ("rows", "sampled", "table_width", "blocks", "longest")],
        *[(name, _POINTER) for name in ("ids", "pos", "seq", "slots", "tables", "sample", "block", "logits")],
        *[(name, _POINTER) for name in ("x", "norm", "q", "mix", "own", "model")],
    ]


def fits(model: LoadedModel, config: EngineConfig) -> str | None:
    """Why llama.c cannot run this model; None when it can."""
    shape = model.shape
    if shape.qkv_bias or shape.qk_norm:
        return f"{'biases on q, k, v' if shape.qkv_bias else 'norms on q and k'} are not in llama.c"
    for name, width in {"hidden": shape.hidden, "ffn": shape.ffn, "head size": shape.head_dim}.items():
        if width % PANEL:
            return f"{name} {width} is not a multiple of {PANEL}"
    if config.block_size % PANEL:
        return f"block size {config.block_size} is not a multiple of {PANEL}"
    if shape.n_heads // shape.n_kv_heads > 16:
        return f"{shape.n_heads // shape.n_kv_heads} query heads per KV head"
    if config.dtype == "int4-bf16" and not _in_groups(shape):
        return f"{shape.n_heads // shape.n_kv_heads} heads of {shape.head_dim} are not a multiple of {GROUP}"
    return None


def _in_groups(shape: ModelShape) -> bool:
    """Can a KV head's query heads round their part of a row to bf16 by themselves?"""
    return shape.n_heads // shape.n_kv_heads * shape.head_dim % GROUP == 0


class NativeRunner:
    """``forward(slices)`` -> logits of the rows that sample, [rows, vocabulary] float32."""

    name = "native"
    has_logits = True

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        shape = model.shape
        self.shape, self.config = shape, config
        self.max_context = min(config.max_context or shape.max_context, shape.max_context)
        self.threads = cpu_threads(config)
        self.kv_blocks = config.kv_blocks or kv_blocks_from_memory(shape, config, torch.float32)
        self._library = library()
        self._keep: list[torch.Tensor | ctypes.Array[_Layer]] = []  # what the C side points to
        floats = self.kv_blocks * config.block_size * shape.n_kv_heads * shape.head_dim
        # never zeroed: a slot is written before it is read, and the memory is only taken as pages are used
        self._kv = [(torch.empty(floats), torch.empty(floats)) for _ in range(shape.n_layers)]
        self.reweigh(model.weights)
        self._scratch: dict[str, torch.Tensor] = {}
        self._team = self._library.tailspan_start(self.threads)
        if not self._team:
            raise OSError(f"{self.threads} threads cannot be started")
        self._finalizer = weakref.finalize(self, self._library.tailspan_end, self._team)

    def _hold(self, tensor: torch.Tensor) -> int:
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, packed: Packed) -> _Matrix:
        self._bytes += packed.data.numel()
        return _Matrix(self._hold(packed.data), TYPES[packed.type], packed.inputs, packed.outputs)

    def reweigh(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights from now on; the KV pool stays as it is.  ``auto`` chooses anew."""
        self._keep.clear()
        self._bytes = 0  # of packed matrices
        self.dtype, self._model = self._pack(weights)
        self.weight_bytes, self.kv_bytes = self._bytes / self.shape.parameters(), 4

    def _pack(self, weights: Mapping[str, torch.Tensor]) -> tuple[str, _Model]:
        """The precision taken, and the model in it."""
        dtype = self.config.dtype
        layers = None
        if dtype == "auto":
            layers = self._pack_layers(weights, "int4", exactly=True)
            pairs = self._library.tailspan_pairs() and _in_groups(self.shape)
            dtype = "bf16" if layers is None else "int4-bf16" if pairs else "int4"
            if layers is None:
                log.info("weights: bf16, since 4 bits would change them (--weights int4 takes them all the same)")
        layers = layers or self._pack_layers(weights, dtype, exactly=False)
        assert layers is not None
        if dtype == "int4-bf16":
            layers = [{name: replace(packed, type=dtype) for name, packed in layer.items()} for layer in layers]
        return dtype, self._assemble(weights, layers, "int8" if dtype.startswith("int4") else dtype)

    def _pack_layers(
        self, weights: Mapping[str, torch.Tensor], kind: str, *, exactly: bool
    ) -> list[dict[str, Packed]] | None:
        """Packed matrices of every layer; None when they must be exact and are not."""
        made = []
        for i in range(self.shape.n_layers):
            layer = {}
            for name, weight in _layer_matrices(weights, i):
                layer[name] = pack(self._library, weight, kind)
                if exactly and not layer[name].exact:
                    return None
            made.append(layer)
        return made

    def _assemble(self, weights: Mapping[str, torch.Tensor], packed: list[dict[str, Packed]], head_kind: str) -> _Model:
        shape = self.shape
        layers = (_Layer * shape.n_layers)()
        for i, layer in enumerate(layers):
            p = f"model.layers.{i}."
            layer.norm1 = self._hold(weights[p + "input_layernorm.weight"].float().contiguous())
            layer.norm2 = self._hold(weights[p + "post_attention_layernorm.weight"].float().contiguous())
            for name, matrix in packed[i].items():
                setattr(layer, name, self._matrix(matrix))
            layer.k, layer.v = (kv.data_ptr() for kv in self._kv[i])
        self._keep.append(layers)
        cos, sin = rope_tables(shape, self.max_context)
        embedding = self._matrix(pack(self._library, weights["model.embed_tokens.weight"], head_kind))
        tied = shape.tied_embeddings
        return _Model(
            n_layers=shape.n_layers,
            hidden=shape.hidden,
            ffn=shape.ffn,
            heads=shape.n_heads,
            kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            page=self.config.block_size,
            eps=shape.rms_eps,
            scale=1.0 / math.sqrt(shape.head_dim),
            norm=self._hold(weights["model.norm.weight"].float().contiguous()),
            cos=self._hold(cos.contiguous()),
            sin=self._hold(sin.contiguous()),
            embedding=embedding,
            head=embedding if tied else self._matrix(pack(self._library, weights["lm_head.weight"], head_kind)),
            layers=ctypes.addressof(layers),
        )

    def _room(self, name: str, size: int) -> int:
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            held = self._scratch[name] = torch.empty(size)
        return held.data_ptr()

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Compute the slices and write their KV; logits of ``rows`` of each, in order."""
        shape, size = self.shape, self.config.block_size
        rows = sum(piece.n for piece in slices)
        ids, pos = np.empty(rows, np.int32), np.empty(rows, np.int32)
        seq, slots = np.empty(rows, np.int32), np.empty(rows, np.int64)
        tables = np.zeros((len(slices), max(len(piece.request.blocks) for piece in slices)), np.int32)
        together = max(1, self._library.tailspan_query_rows() // (shape.n_heads // shape.n_kv_heads))
        sample: list[int] = []  # rows whose logits are wanted
        longest = at = 0
        blocks: list[tuple[int, int]] = []
        for index, piece in enumerate(slices):
            end = at + piece.n
            tables[index, : len(piece.request.blocks)] = piece.request.blocks
            ids[at:end] = piece.request.tokens[piece.start : piece.start + piece.n]
            positions = np.arange(piece.start, piece.start + piece.n)
            pos[at:end], seq[at:end] = positions, index
            slots[at:end] = tables[index, positions // size].astype(np.int64) * size + positions % size
            blocks.extend((row, min(together, end - row)) for row in range(at, end, together))
            longest = max(longest, piece.start + piece.n)
            if piece.all_logits:
                sample.extend(range(at, end))
            elif piece.sample:
                sample.append(end - 1)
            at = end
        logits = torch.empty(len(sample), self._model.head.outputs)
        chosen, cut = np.array(sample, np.int32), np.array(blocks, np.int32)
        longest = -(-longest // PANEL) * PANEL
        q_width = shape.n_heads * shape.head_dim
        own = self._library.tailspan_own_floats(ctypes.byref(self._model), rows, longest)
        step = _Step(
            rows=rows,
            sampled=len(sample),
            table_width=tables.shape[1],
            blocks=len(blocks),
            longest=longest,
            ids=ids.ctypes.data,
            pos=pos.ctypes.data,
            seq=seq.ctypes.data,
            slots=slots.ctypes.data,
            tables=tables.ctypes.data,
            sample=chosen.ctypes.data,
            block=cut.ctypes.data,
            logits=logits.data_ptr(),
            x=self._room("x", rows * shape.hidden),
            norm=self._room("norm", rows * shape.hidden),
            q=self._room("q", rows * q_width),
            mix=self._room("mix", rows * max(q_width, shape.ffn)),
            own=self._room("own", self.threads * own),
            model=ctypes.addressof(self._model),
        )
        self._library.tailspan_forward(self._team, ctypes.byref(step))
        return logits[:, : shape.vocab]

    def warm_up(self, make_slices: Callable[[int], list[Slice]]) -> float:
        """Run a small and a full step, so that the first request meets warm memory; returns seconds taken."""
        start = time.perf_counter()
        for n in (1, self.config.token_budget):
            self.forward(make_slices(n))
        return time.perf_counter() - start


def _layer_matrices(weights: Mapping[str, torch.Tensor], i: int) -> list[tuple[str, torch.Tensor]]:
    """What is multiplied together is kept together: q, k, v; and gate and up by turns of a panel."""

    def w(name: str) -> torch.Tensor:
        return weights[f"model.layers.{i}.{name}.weight"]

    halves = [w(f"mlp.{x}_proj") for x in ("gate", "up")]
    by_turns = torch.stack([half.view(-1, PANEL, half.shape[1]) for half in halves], dim=1)
    return [
        ("qkv", torch.cat([w(f"self_attn.{x}_proj") for x in "qkv"])),
        ("o", w("self_attn.o_proj")),
        ("gate_up", by_turns.reshape(-1, halves[0].shape[1])),
        ("down", w("mlp.down_proj")),
    ]
