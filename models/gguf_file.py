"""A Llama-family GGUF file: its shape as a Hugging Face config, and its weights as fp32 under Hugging Face names.

What must hold: every tensor of the file is either mapped, understood or refused by name.  llama.cpp stores the rows of
q and k permuted for interleaved RoPE; they come out of here in the half-split order that Hugging Face weights have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.errors import UserError
from models.file_kind import first_bytes
from models.shape import ModelShape, llama3_factors

_AGAIN: Final = "fetch the file again"
_OTHER: Final = "use another GGUF of this model, or its safetensors folder"
_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The two published settings of Llama 3.1 (factor 8) and 3.2 (factor 32); a GGUF only carries the resulting factors.
_LLAMA3: Final[tuple[dict[str, Any], ...]] = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """q or k rows [heads * d, in] from GGUF's interleaved order to half-split order (llama.cpp's permute, inverted)."""
    rows, columns = weight.shape
    half = rows // heads // 2
    return np.ascontiguousarray(weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns))


class GgufFile:
    """An opened GGUF.  metadata: key -> plain value.  Opening reads the header only, about 2 s per 50k tokens."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a missing file, another format, a truncated file and any architecture but llama."""
        self.path = path
        start = first_bytes(path)
        if start[:4] != b"GGUF":
            raise UserError(f"not a GGUF file: it starts with {start[:4]!r}", where=str(path), remedy=_AGAIN)
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, UnicodeDecodeError) as error:
            raise UserError(
                f"truncated or damaged GGUF ({path.stat().st_size} bytes): {error}", where=str(path), remedy=_AGAIN
            ) from error
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise UserError(
                f"architecture {architecture!r} is not supported",
                where=str(path),
                remedy="use a GGUF of a Llama-family model (architecture 'llama')",
            )

    def config(self) -> dict[str, Any]:
        """The same model's Hugging Face config.json.  Raises UserError naming what is missing or unsupported."""
        if self.metadata.get("llama.expert_count"):
            raise UserError("a mixture of experts is not supported", where=str(self.path), remedy=_OTHER)
        hidden, heads = self._whole("embedding_length"), self._whole("attention.head_count")
        head_dim = self._whole("attention.key_length", hidden // heads)
        rotary = self._whole("rope.dimension_count", head_dim)
        if rotary != head_dim or self._whole("attention.value_length", head_dim) != head_dim:
            raise UserError(
                f"RoPE over {rotary} of {head_dim} dimensions, or values of another size than keys, is not supported",
                where=str(self.path),
                remedy=_OTHER,
            )
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise UserError("tensor token_embd.weight is missing", where=str(self.path), remedy=_AGAIN)
        theta = float(self.metadata.get("llama.rope.freq_base", 10000.0))
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self._whole("block_count"),
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._whole("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": int(embedding.shape[1]),
            "max_position_embeddings": self._whole("context_length"),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(theta, head_dim),
            # The file holds a float32; its shortest decimal is the number that was meant (1e-5).
            "rms_norm_eps": float(str(np.float32(self._value("attention.layer_norm_rms_epsilon")))),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "torch_dtype": "float32",
        }
        ids = {name: self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
        config["bos_token_id"] = ids["bos"]
        config["eos_token_id"] = list(dict.fromkeys(ends))
        return config

    def weights(self, shape: ModelShape) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """(Hugging Face name, exactly dequantised fp32 array) in the order of shape.tensor_shapes(), one at a time.

        Raises UserError naming the tensor that is missing, unknown, of another shape or of an unsupported type.
        """
        import gguf

        sources = self._sources(shape)
        for name, expected in shape.tensor_shapes().items():
            tensor = self._tensors.get(sources[name])
            if tensor is None:
                raise UserError(f"tensor {sources[name]} is missing", where=str(self.path), remedy=_AGAIN)
            try:
                array = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise UserError(
                    f"tensor {tensor.name} has type {tensor.tensor_type.name}, which is not supported",
                    where=str(self.path),
                    remedy=_OTHER,
                ) from error
            if array.shape != expected:
                raise UserError(
                    f"tensor {tensor.name} has shape {array.shape}, {expected} is needed",
                    where=str(self.path),
                    remedy=_AGAIN,
                )
            values = np.ascontiguousarray(array, dtype=np.float32)
            if name.endswith("q_proj.weight"):
                values = unpermute(values, shape.n_heads)
            elif name.endswith("k_proj.weight"):
                values = unpermute(values, shape.n_kv_heads)
            yield name, values

    def _sources(self, shape: ModelShape) -> dict[str, str]:
        """Hugging Face name -> GGUF name; raises for tensors that would be left over."""
        sources = {ours: theirs for theirs, ours in _TOP.items()}
        for layer in range(shape.n_layers):
            for theirs, ours in _LAYER.items():
                sources[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
        unknown = sorted(set(self._tensors) - set(sources.values()) - {"rope_freqs.weight"})
        if unknown:
            raise UserError(
                f"tensor {unknown[0]} is not part of a plain Llama ({len(unknown)} such tensors)",
                where=str(self.path),
                remedy=_OTHER,
            )
        return sources

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        kind = self.metadata.get("llama.rope.scaling.type", "none")
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(self._value("rope.scaling.factor"))}
        if kind not in ("none", None):
            raise UserError(f"RoPE scaling {kind!r} is not supported", where=str(self.path), remedy=_OTHER)
        tensor = self._tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        factors = np.asarray(tensor.data, dtype=np.float32).ravel()
        plain = [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
        for scaling in _LLAMA3:
            known = np.array(llama3_factors(plain, scaling), dtype=np.float32)
            if known.shape == factors.shape and np.allclose(known, factors, rtol=1e-4):
                return scaling
        raise UserError(
            "rope_freqs.weight holds RoPE factors that are neither Llama 3.1's nor Llama 3.2's",
            where=str(self.path),
            remedy=_OTHER,
        )

    def _value(self, key: str) -> float:
        value = self.metadata.get(f"llama.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise UserError(
                f"metadata llama.{key} is {value!r}, not a positive number", where=str(self.path), remedy=_OTHER
            )
        return value

    def _whole(self, key: str, default: int | None = None) -> int:
        if default is not None and f"llama.{key}" not in self.metadata:
            return default
        return int(self._value(key))
