"""Shapes: sizes by hand, the published SmolLM2 and Llama figures, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from models.errors import UserError
from models.shape import ModelShape

LLAMA_3_1_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}


def shape(**changes: Any) -> ModelShape:
    return ModelShape.from_config({**LLAMA_3_1_8B, **changes}, "config.json")


def test_llama_3_1_8b_has_its_published_size() -> None:
    model = shape()
    assert model.parameters() == 8_030_261_248
    assert model.kv_bytes_per_token(2) == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert model.eos_token_ids == (128001, 128008, 128009)
    assert model.head_dim == 128


def test_a_tied_head_counts_once() -> None:
    assert shape().parameters() - shape(tie_word_embeddings=True).parameters() == 128256 * 4096
    assert "lm_head.weight" not in shape(tie_word_embeddings=True).tensor_shapes()


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA_3_1_8B["rope_scaling"]])
def test_rope_frequencies_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = {**LLAMA_3_1_8B, "rope_scaling": scaling}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq
    assert ModelShape.from_config(config, "x").inverse_frequencies() == pytest.approx(theirs.tolist(), rel=1e-5)


def test_the_newer_rope_parameters_are_read() -> None:
    newer = {key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}
    assert ModelShape.from_config(newer, "x").inverse_frequencies() == shape().inverse_frequencies()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "mistral"}, "sliding_window"),  # left out, transformers takes 4096
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 5}, "KV heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        shape(**changes)
    assert caught.value.where == "config.json"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 131_072},  # as long as the context: it hides nothing
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen3", "sliding_window": 4096, "layer_types": ["full_attention"] * 32},
    ],
)
def test_a_window_that_hides_nothing_is_accepted(changes: dict[str, Any]) -> None:
    assert shape(**changes).hidden == 4096


def test_biases_and_head_norms_are_expected_where_the_family_has_them() -> None:
    qwen2, qwen3 = shape(model_type="qwen2"), shape(model_type="qwen3")
    assert qwen2.tensor_shapes()["model.layers.0.self_attn.k_proj.bias"] == (1024,)
    assert "model.layers.0.self_attn.o_proj.bias" not in qwen2.tensor_shapes()
    assert qwen3.tensor_shapes()["model.layers.31.self_attn.q_norm.weight"] == (128,)
    assert not any("bias" in name or "q_norm" in name for name in shape().tensor_shapes())
