"""The shape of a Llama-family model: every number that the engine and the cost accounts need, and nothing else.

A ModelShape is read from a Hugging Face config.json.  What it accepts it describes completely: a feature that would
change the arithmetic (another activation, biases, a sliding window, an unknown RoPE type, quantised weights) is
refused by name, since a silently ignored field is a silently wrong answer.

Families: llama (Llama 2 and 3.x, SmolLM2), mistral, qwen2 (biases on q, k, v), qwen3 dense (norms on the heads of q
and k).  A sliding window is refused unless it is no shorter than the context, where it hides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from models.errors import UserError

_REMEDY = "use a model of the Llama family (Llama, SmolLM2, Mistral without sliding window, Qwen2, Qwen3 dense)"
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes in elements.  rope_scaling is None, {"rope_type": "linear", "factor"} or
    {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}."""

    name: str
    architecture: str
    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_eps: float
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False  # Qwen2: biases on q, k and v, none on o
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k, before RoPE

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> (rows, columns) or (n,) of every weight; a tied head has no lm_head.weight."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.n_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (q, self.hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (kv, self.hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (kv, self.hidden)
            if self.qkv_bias:
                for name, rows in (("q", q), ("k", kv), ("v", kv)):
                    shapes[prefix + f"self_attn.{name}_proj.bias"] = (rows,)
            if self.qk_norm:
                for name in "qk":
                    shapes[prefix + f"self_attn.{name}_norm.weight"] = (self.head_dim,)
            shapes[prefix + "self_attn.o_proj.weight"] = (self.hidden, q)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.ffn, self.hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.ffn, self.hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (self.hidden, self.ffn)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token keeps over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * dtype_bytes

    def inverse_frequencies(self) -> list[float]:
        """RoPE angle per position, in radians, of each of the head_dim / 2 pairs (half-split: pair i is i, i + d/2).

        theta^(-2i/d), as in RoFormer (arXiv 2104.09864), divided by `factor` for linear scaling, or blended by
        wavelength as Llama 3.1 does (the reference code in its release, `apply_scaling`).
        """
        plain = [self.rope_theta ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2)]
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        if scaling["rope_type"] == "linear":
            return [frequency / scaling["factor"] for frequency in plain]
        return [frequency / factor for frequency, factor in zip(plain, llama3_factors(plain, scaling), strict=True)]

    @staticmethod
    def from_config(config: dict[str, Any], where: str, *, name: str | None = None) -> ModelShape:
        """Read a Hugging Face config.json already parsed; where names the file in errors.

        Raises UserError naming the field for anything missing, of the wrong type or unsupported.
        """
        field = _Fields(config, where)
        model_type = config.get("model_type")
        if model_type not in _FAMILIES:
            raise UserError(f"model_type {model_type!r} is not supported", where=where, remedy=_REMEDY)
        _refuse_unsupported(config, where)
        _refuse_window(config, field, where)
        hidden, n_heads = field.size("hidden_size"), field.size("num_attention_heads")
        n_kv_heads = field.size("num_key_value_heads", n_heads)
        if config.get("head_dim") is None and hidden % n_heads:
            raise UserError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {n_heads}", where=where, remedy=_REMEDY
            )
        head_dim = field.size("head_dim", hidden // n_heads)
        if n_heads % n_kv_heads or head_dim % 2:
            raise UserError(
                f"{n_heads} heads over {n_kv_heads} KV heads of size {head_dim}: heads must be a multiple of KV heads "
                "and the head size even",
                where=where,
                remedy=_REMEDY,
            )
        theta, scaling = _rope(config, field, where)
        return ModelShape(
            name=name or str(config.get("_name_or_path") or "model"),
            architecture="llama",
            n_layers=field.size("num_hidden_layers"),
            hidden=hidden,
            ffn=field.size("intermediate_size"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            vocab=field.size("vocab_size"),
            max_context=field.size("max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=field.real("rms_norm_eps", 1e-6),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=field.token("bos_token_id"),
            eos_token_ids=field.tokens("eos_token_id"),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
        )


def llama3_factors(frequencies: list[float], scaling: dict[str, Any]) -> list[float]:
    """What each plain frequency is divided by under Llama 3.1's RoPE scaling (1 = kept, `factor` = stretched)."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        wavelength = 2.0 * math.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(float(factor))
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    """Fields that change the arithmetic, with the only value under which ours is right."""
    wanted: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("hidden_act", ("silu", None)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("quantization_config", (None,)),
        ("partial_rotary_factor", (1.0, None)),
        ("num_local_experts", (None,)),
    )
    for name, accepted in wanted:
        value = config.get(name)
        if value not in accepted:
            raise UserError(f"{name} = {value!r} is not supported", where=where, remedy=_REMEDY)


def _refuse_window(config: dict[str, Any], field: _Fields, where: str) -> None:
    """A window that some layer uses and that is shorter than the context changes what is attended to."""
    # a Mistral config that leaves it out means 4096: transformers' default
    window = config.get("sliding_window", 4096 if config.get("model_type") == "mistral" else None)
    context = field.size("max_position_embeddings")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - {"full_attention", "sliding_attention"}):
        raise UserError(f"layer_types = {kinds!r} is not supported", where=where, remedy=_REMEDY)
    # Qwen carries a window that only use_sliding_window switches on; Mistral's is in force wherever it is given
    used = config.get("use_sliding_window", config.get("model_type") in ("mistral", "llama"))
    if kinds is not None and "sliding_attention" not in kinds:
        used = False
    if window is None or not used:
        if kinds is not None and "sliding_attention" in kinds:
            raise UserError("layer_types has sliding_attention without a sliding_window", where=where, remedy=_REMEDY)
        return
    if isinstance(window, bool) or not isinstance(window, int) or window < context:
        raise UserError(
            f"sliding_window = {window!r} is not supported: it is shorter than the context of {context}",
            where=where,
            remedy=_REMEDY,
        )


def _rope(config: dict[str, Any], field: _Fields, where: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from the old fields (rope_theta, rope_scaling) or the newer rope_parameters."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"rope_scaling {parameters!r} is not an object", where=where, remedy=_REMEDY)
    theta = parameters.get("rope_theta", field.real("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", None):
        return float(theta), None
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise UserError(
            f"RoPE type {kind!r} is not supported",
            where=where,
            remedy="use a model with RoPE default, linear or llama3",
        )
    inner = _Fields(parameters, where)
    return float(theta), {"rope_type": kind, **{name: inner.real(name) for name in needed[kind]}}


class _Fields:
    """Typed reads of a parsed config that name the field when it is missing or wrong."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def _number(self, name: str, default: float | None) -> float:
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            said = "missing" if value is None else f"{value!r}, not a positive number"
            raise UserError(f"{name} is {said}", where=self.where, remedy="fetch the model's config.json again")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self._number(name, default)
        if value != int(value):
            raise UserError(
                f"{name} is {value!r}, not a whole number",
                where=self.where,
                remedy="fetch the model's config.json again",
            )
        return int(value)

    def real(self, name: str, default: float | None = None) -> float:
        return float(self._number(name, default))

    def token(self, name: str) -> int | None:
        ids = self.tokens(name)
        return ids[0] if ids else None

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self.config.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
            raise UserError(
                f"{name} is {value!r}, not a token id", where=self.where, remedy="fetch the model's config.json again"
            )
        return tuple(ids)
