"""The CPU forward in C, over the same plan and KV layout as the torch runner, bit-equal in every batch.

Owns packed weights, KV and scratch memory.  One call computes one step without the interpreter, so the server's
event loop goes on meanwhile.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from engine.config import EngineConfig
from engine.native.build import library
from engine.runner_cpu import cpu_threads, kv_blocks_from_memory, rope_tables
from engine.scheduler import Slice
from models.store import LoadedModel

_PANEL = 16  # NR of llama.c
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class _Layer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in ("norm1", "norm2", "qkv", "o", "gate_up", "down", "k", "v")]


class _Model(ctypes.Structure):
    _fields_ = [
        *[
            (name, _INT)
            for name in (
                "n_layers",
                "hidden",
                "ffn",
                "heads",
                "kv_heads",
                "head_dim",
                "vocab",
                "type",
                "threads",
                "page",
            )
        ],
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        *[(name, _POINTER) for name in ("norm", "cos", "sin", "embedding", "head", "layers")],
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, _INT) for name in ("rows", "sampled", "table_width")],
        *[
            (name, _POINTER)
            for name in (
                "ids",
                "pos",
                "seq",
                "slots",
                "tables",
                "sample",
                "logits",
                "x",
                "norm",
                "wide",
                "mix",
                "scores",
            )
        ],
        ("longest", _INT),
    ]


def fits(model: LoadedModel) -> str | None:
    """Why llama.c cannot run this model; None when it can."""
    shape = model.shape
    widths = {
        "hidden": shape.hidden,
        "ffn": shape.ffn,
        "head size": shape.head_dim,
        "kv width": shape.n_kv_heads * shape.head_dim,
    }
    for name, width in widths.items():
        step = 8 if name == "head size" else _PANEL
        if width % step:
            return f"{name} {width} is not a multiple of {step}"
    if shape.n_heads // shape.n_kv_heads > 16:
        return f"{shape.n_heads // shape.n_kv_heads} query heads per KV head"
    return None


class NativeRunner:
    """``forward(slices)`` -> logits of the rows that sample, [rows, vocabulary] float32."""

    name = "native"

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        shape = model.shape
        self.shape, self.config = shape, config
        self.dtype = torch.float32 if config.dtype == "fp32" else torch.bfloat16
        self.weight_bytes, self.kv_bytes = float(self.dtype.itemsize), 4
        self.max_context = min(config.max_context or shape.max_context, shape.max_context)
        self.threads = cpu_threads(config)
        self.kv_blocks = config.kv_blocks or kv_blocks_from_memory(shape, config, torch.float32)
        self._forward = library().tailspan_forward
        self._forward.argtypes, self._forward.restype = [_POINTER, _POINTER], None
        self._keep: list[torch.Tensor | ctypes.Array[_Layer]] = []  # what the C side points to
        slots, width = self.kv_blocks * config.block_size, shape.n_kv_heads * shape.head_dim
        # never zeroed: a slot is written before it is read, and the memory is only taken as pages are used
        self._kv = [(torch.empty(slots, width), torch.empty(slots, width)) for _ in range(shape.n_layers)]
        self.reweigh(model.weights)
        self._scratch: dict[str, torch.Tensor] = {}

    def _hold(self, tensor: torch.Tensor) -> int:
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _panels(self, weight: torch.Tensor) -> int:
        """[outputs, inputs] -> [outputs / 16][inputs][16], outputs padded with zeros."""
        rows, inputs = weight.shape
        padded = -(-rows // _PANEL) * _PANEL
        if padded != rows:
            weight = torch.cat([weight, weight.new_zeros(padded - rows, inputs)])
        return self._hold(weight.to(self.dtype).view(-1, _PANEL, inputs).transpose(1, 2).contiguous())

    def reweigh(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights from now on; the KV pool stays as it is."""
        self._keep.clear()
        self._model = self._pack(weights)

    def _pack(self, weights: Mapping[str, torch.Tensor]) -> _Model:
        shape = self.shape
        layers = (_Layer * shape.n_layers)()
        for i, layer in enumerate(layers):
            p = f"model.layers.{i}."
            layer.norm1 = self._hold(weights[p + "input_layernorm.weight"].float().contiguous())
            layer.norm2 = self._hold(weights[p + "post_attention_layernorm.weight"].float().contiguous())
            layer.qkv = self._panels(torch.cat([weights[p + f"self_attn.{x}_proj.weight"] for x in "qkv"]))
            layer.o = self._panels(weights[p + "self_attn.o_proj.weight"])
            layer.gate_up = self._panels(torch.cat([weights[p + f"mlp.{x}_proj.weight"] for x in ("gate", "up")]))
            layer.down = self._panels(weights[p + "mlp.down_proj.weight"])
            layer.k, layer.v = (kv.data_ptr() for kv in self._kv[i])
        self._keep.append(layers)
        cos, sin = rope_tables(shape, self.max_context)
        embedding = self._panels(weights["model.embed_tokens.weight"])
        return _Model(
            n_layers=shape.n_layers,
            hidden=shape.hidden,
            ffn=shape.ffn,
            heads=shape.n_heads,
            kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            vocab=shape.vocab,
            type=0 if self.dtype == torch.float32 else 1,
            threads=self.threads,
            page=self.config.block_size,
            eps=shape.rms_eps,
            scale=1.0 / math.sqrt(shape.head_dim),
            norm=self._hold(weights["model.norm.weight"].float().contiguous()),
            cos=self._hold(cos.contiguous()),
            sin=self._hold(sin.contiguous()),
            embedding=embedding,
            head=embedding if shape.tied_embeddings else self._panels(weights["lm_head.weight"]),
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
        sample: list[int] = []  # rows whose logits are wanted
        longest = at = 0
        for index, piece in enumerate(slices):
            end = at + piece.n
            blocks = piece.request.blocks
            tables[index, : len(blocks)] = blocks
            ids[at:end] = piece.request.tokens[piece.start : piece.start + piece.n]
            positions = np.arange(piece.start, piece.start + piece.n)
            pos[at:end], seq[at:end] = positions, index
            slots[at:end] = tables[index, positions // size].astype(np.int64) * size + positions % size
            longest = max(longest, piece.start + piece.n)
            if piece.all_logits:
                sample.extend(range(at, end))
            elif piece.sample:
                sample.append(end - 1)
            at = end
        vocab = -(-shape.vocab // _PANEL) * _PANEL
        logits = torch.empty(len(sample), vocab)
        chosen = np.array(sample, np.int32)
        longest = -(-longest // 8) * 8
        heads_width = shape.n_heads * shape.head_dim
        qkv = heads_width + 2 * shape.n_kv_heads * shape.head_dim
        step = _Step(
            rows=rows,
            sampled=len(sample),
            table_width=tables.shape[1],
            ids=ids.ctypes.data,
            pos=pos.ctypes.data,
            seq=seq.ctypes.data,
            slots=slots.ctypes.data,
            tables=tables.ctypes.data,
            sample=chosen.ctypes.data,
            logits=logits.data_ptr(),
            x=self._room("x", rows * shape.hidden),
            norm=self._room("norm", rows * shape.hidden),
            wide=self._room("wide", rows * max(qkv, 2 * shape.ffn)),
            mix=self._room("mix", rows * max(heads_width, shape.ffn)),
            scores=self._room("scores", self.threads * (shape.n_heads // shape.n_kv_heads) * longest),
            longest=longest,
        )
        self._forward(ctypes.byref(self._model), ctypes.byref(step))
        return logits[:, : shape.vocab]

    def warm_up(self, make_slices: Callable[[int], list[Slice]]) -> float:
        """Run a small and a full step, so that the first request meets warm memory; returns seconds taken."""
        start = time.perf_counter()
        for n in (1, self.config.token_budget):
            self.forward(make_slices(n))
        return time.perf_counter() - start
