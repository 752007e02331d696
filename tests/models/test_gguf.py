"""GGUF to folder: exact numbers, half-split q and k, the same tokenizer; and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.errors import UserError
from models.gguf_file import GgufFile, unpermute
from models.shape import ModelShape, llama3_factors
from models.store import load, load_reference, resolve, source_gguf
from models.tokenizer import Tokenizer

Write = Callable[..., Path]


def dequantised(raw: bytes, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """The formulas of ggml's block formats, one block of 32 at a time."""
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    out = []
    for start in range(0, len(raw), size):
        block = raw[start : start + size]
        scale = np.frombuffer(block[:2], np.float16)[0].astype(np.float32)
        if kind == "Q8_0":
            out.append(scale * np.frombuffer(block[2:], np.int8).astype(np.float32))
            continue
        nibbles = np.frombuffer(block[size - 16 :], np.uint8)
        numbers = np.concatenate([nibbles & 15, nibbles >> 4]).astype(np.float32)
        if kind == "Q4_0":
            out.append(scale * (numbers - 8))
        else:
            out.append(scale * numbers + np.frombuffer(block[2:4], np.float16)[0].astype(np.float32))
    return np.concatenate(out).reshape(shape)


def test_unpermute_undoes_the_interleaving() -> None:
    # Two heads of size 4: llama.cpp stores half-split rows 0 1 2 3 as 0 2 1 3.
    stored = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], dtype=np.float32)
    assert unpermute(stored, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_an_fp32_gguf_gives_back_the_very_same_weights(write_gguf: Write, tiny_folder: Path) -> None:
    converted = load_file(resolve(str(write_gguf("F32"))) / "model.safetensors")
    original = load_file(tiny_folder / "model.safetensors")
    assert converted.keys() == original.keys()
    for name, weight in original.items():
        np.testing.assert_array_equal(converted[name], weight, err_msg=name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_dequantised_by_their_formula(kind: str, write_gguf: Write, tiny_folder: Path) -> None:
    path = write_gguf(kind)
    stored = {tensor.name: tensor for tensor in GgufFile(path)._tensors.values()}
    converted = load_file(resolve(str(path)) / "model.safetensors")
    original = load_file(tiny_folder / "model.safetensors")
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        name = f"model.layers.1.{ours}.weight"
        expected = dequantised(stored[f"blk.1.{theirs}.weight"].data.tobytes(), kind, original[name].shape)
        np.testing.assert_array_equal(converted[name], expected)
    # q went through quantisation permuted; back in order it is the original up to one quantisation step.
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(converted[name] - original[name]).max() < (0.01 if kind == "Q8_0" else 0.2)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_floats_are_widened(kind: str, write_gguf: Write, tiny_folder: Path) -> None:
    converted = load_file(resolve(str(write_gguf(kind))) / "model.safetensors")
    for name, weight in load_file(tiny_folder / "model.safetensors").items():
        np.testing.assert_allclose(converted[name], weight, rtol=2**-8, atol=1e-6, err_msg=name)


def test_config_tokenizer_and_template_survive(write_gguf: Write, tiny_folder: Path) -> None:
    path = write_gguf("F32")
    ours, theirs = load_reference(str(path)), load_reference(str(tiny_folder))
    for field in ModelShape.__dataclass_fields__:
        if field != "name":
            assert getattr(ours.shape, field) == getattr(theirs.shape, field), field
    text = "<|im_start|>user\nThe 12 queues, 你好 😀 <|im_end|>"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.template.source == theirs.template.source
    assert source_gguf(ours.folder) == path
    assert source_gguf(theirs.folder) is None


def test_the_second_time_nothing_is_converted(write_gguf: Write) -> None:
    path = write_gguf("Q8_0")
    lines: list[str] = []
    first = resolve(str(path), lines.append)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert len(lines) == 2 and "0.1M weights" in lines[0] and "converted tiny.gguf in" in lines[1]
    assert resolve(str(path), lines.append) == first
    assert len(lines) == 2
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert load(str(path)).weights["model.norm.weight"].dtype.is_floating_point


def test_llama3_rope_factors_are_recognised(write_gguf: Write) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = [10000.0 ** (-2.0 * i / 16) for i in range(8)]
    factors = np.array(llama3_factors(plain, scaling), dtype=np.float32)
    path = write_gguf("F32", extra={"rope_freqs.weight": factors})
    assert load_reference(str(path)).shape.rope_scaling == scaling
    other = write_gguf("F32", name="other.gguf", extra={"rope_freqs.weight": factors * 1.5})
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        resolve(str(other))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"architecture": "gemma3"}, "gemma3"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "RoPE over 8 of 16"),
        ({"metadata": {"llama.block_count": None}}, "block_count"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, "tokenizer 'llama'"),
        ({"metadata": {"tokenizer.ggml.pre": "tekken"}}, "tekken"),
        ({"metadata": {"tokenizer.ggml.merges": None}}, "merges"),
        ({"metadata": {"tokenizer.ggml.merges": ["Ġ nosuchtoken"]}}, "rebuilt"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, r"blk\.0\.attn_q\.bias"),
        ({"without": ("blk.1.ffn_up.weight",)}, r"blk\.1\.ffn_up\.weight is missing"),
        ({"without": ("output_norm.weight",)}, r"output_norm\.weight is missing"),
        ({"metadata": {"llama.feed_forward_length": 96}}, r"ffn_\w+\.weight has shape"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    arguments: dict[str, Any], named: str, write_gguf: Write, own_cache: Path
) -> None:
    path = write_gguf("F32", **arguments)
    with pytest.raises(UserError, match=named) as caught:
        resolve(str(path))
    assert str(path) in str(caught.value.where)
    assert caught.value.remedy
    assert not list((own_cache / "models").iterdir()), "a failed conversion leaves nothing"


def test_an_unsupported_tensor_type_is_named(write_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    path = write_gguf("Q8_0")
    kinds = dict(gguf.quants._type_traits)
    del kinds[gguf.GGMLQuantizationType.Q8_0]
    monkeypatch.setattr(gguf.quants, "_type_traits", kinds)
    with pytest.raises(UserError, match="type Q8_0"):
        resolve(str(path))


@pytest.mark.parametrize("kept", [3, 4, 20, 200, 5000, -100])
def test_a_truncated_gguf_is_named_as_such(kept: int, write_gguf: Write) -> None:
    path = write_gguf("F32")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"truncated|not a GGUF") as caught:
        resolve(str(path))
    assert caught.value.where == str(path)


@pytest.mark.parametrize(("pre", "digits"), [("llama-bpe", 3), ("qwen2", 1)])
def test_word_patterns_of_other_families(pre: str, digits: int, write_gguf: Write) -> None:
    path = write_gguf("F32", metadata={"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": 1})
    folder = resolve(str(path))
    library = Tokenizer.from_file(folder / "tokenizer.json")._library
    words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str("I'm 12345 ok\n\n x")]
    numbers = [word for word in words if word.isdigit()]
    assert numbers == (["123", "45"] if digits == 3 else list("12345"))
    assert words[:2] == ["I", "'m"] and "ĊĊ" in words
    assert Tokenizer.from_file(folder / "tokenizer.json").prefix_ids == (1,)
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is True
