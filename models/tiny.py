"""A tiny random Llama (or Mistral, Qwen2, Qwen3) with a real byte-level tokenizer and a chat template, in no time.

It owns the smallest folder that every part of the system accepts as a model: config.json, tokenizer.json,
tokenizer_config.json and model.safetensors in the Hugging Face layout.  Tests and dry runs use it where no
download should be needed; its text means nothing, its arithmetic and its tokenizer are those of a real model.
The same arguments always write the same bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.errors import UserError

#: model_type -> the class of transformers
FAMILIES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEFAULT_VOCAB: Final = 512
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What the merges are learnt from: enough common English, code, digits and some CJK and emoji, so that a text mixes
# one-byte and longer tokens and that a character of several bytes spreads over several tokens.
_CORPUS: Final = (
    "The quick brown fox jumps over the lazy dog while the queue grows longer than the server can carry.",
    "Every request has a deadline, and every deadline that passes is a person who waits for an answer.",
    "What is the capital of France? The capital of France is Paris, and the river there is the Seine.",
    "def step(self, batch): return [token for token in self.model.forward(batch) if token is not None]",
    "When the load is higher than the service rate, the waiting time grows without any bound at all.",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve: 1 2 3 4 5 6 7 8 9 10 11 12.",
    "Please write a short story about a small robot that wanted to see the ocean and the mountains.",
    "There are other things that this system should do, such as answering questions about the world.",
    "你好，世界。 東京は日本の首都です。 안녕하세요 세계. Привет, мир! Grüße aus Köln, señor. 😀 👍🏽 🚀",
    "Information theory measures how much uncertainty a message takes away from the one who reads it.",
)


def write_tiny(
    folder: Path,
    *,
    seed: int = 0,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    ffn: int = 128,
    vocab: int | None = None,
    max_context: int = 512,
    tied: bool = True,
    family: str = "llama",
    rope_scaling: dict[str, Any] | None = None,
) -> Path:
    """Write a random model of a family into folder (made if needed) and return it.

    family: a key of FAMILIES; Qwen2 has biases on q, k and v, Qwen3 norms on the heads of q and k.
    vocab: rows of the embedding and size of the tokenizer, at least 3 specials + 256 bytes = 259; default 512.
    head_dim is hidden // n_heads.  Raises UserError for sizes that do not fit together.
    """
    size = DEFAULT_VOCAB if vocab is None else vocab
    if size < len(SPECIALS) + 256:
        raise UserError(f"vocab {size} is too small", remedy=f"give at least {len(SPECIALS) + 256}")
    if hidden % n_heads or (hidden // n_heads) % 2 or n_heads % n_kv_heads:
        raise UserError(
            f"hidden {hidden}, heads {n_heads} and KV heads {n_kv_heads} do not fit together",
            remedy="hidden must be heads times an even head size, and heads a multiple of KV heads",
        )
    if family not in FAMILIES:
        raise UserError(f"family {family!r} is unknown", remedy=f"one of {', '.join(FAMILIES)}")
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_context,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "config.json",
        {
            "architectures": [FAMILIES[family]],
            "model_type": family,
            "num_hidden_layers": n_layers,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
            "head_dim": hidden // n_heads,
            "vocab_size": size,
            "max_position_embeddings": max_context,
            "rope_theta": 10000.0,
            **({"rope_scaling": rope_scaling} if rope_scaling is not None else {}),
            **({"sliding_window": None} if family == "mistral" else {}),  # transformers' own default is 4096
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "torch_dtype": "float32",
        },
    )
    _write_weights(
        folder / "model.safetensors",
        rng=np.random.default_rng(seed),
        n_layers=n_layers,
        hidden=hidden,
        heads=(n_heads, n_kv_heads),
        ffn=ffn,
        vocab=size,
        tied=tied,
        family=family,
    )
    return folder


def _tokenizer(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # The corpus runs out of merges at some size: real models fill up with reserved tokens too.
    missing = size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|reserved_{n}|>", special=True, normalized=False) for n in range(missing)]
    )
    return tokenizer


def _write_weights(
    path: Path,
    *,
    rng: np.random.Generator,
    n_layers: int,
    hidden: int,
    heads: tuple[int, int],
    ffn: int,
    vocab: int,
    tied: bool,
    family: str,
) -> None:
    from safetensors.numpy import save_file

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * (scale / math.sqrt(columns))).astype(np.float32)

    def norm(scale: float = 1.0, width: int = hidden) -> np.ndarray:
        return (scale * (1.0 + 0.1 * rng.standard_normal(width))).astype(np.float32)

    head_dim = hidden // heads[0]
    # Small embeddings beside full-size layers: the layers, not the last token, decide the next one, so that greedy
    # text does not just repeat itself; the final norm brings the logits back to a spread of about 3.
    weights = {"model.embed_tokens.weight": matrix(vocab, hidden, 0.5)}
    for layer in range(n_layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = norm()
        weights[prefix + "self_attn.q_proj.weight"] = matrix(heads[0] * head_dim, hidden, 1.5)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(heads[1] * head_dim, hidden, 1.5)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(heads[1] * head_dim, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, heads[0] * head_dim)
        weights[prefix + "post_attention_layernorm.weight"] = norm()
        weights[prefix + "mlp.gate_proj.weight"] = matrix(ffn, hidden)
        weights[prefix + "mlp.up_proj.weight"] = matrix(ffn, hidden)
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, ffn)
        if family == "qwen2":
            for name, rows in zip("qkv", (heads[0], heads[1], heads[1]), strict=True):
                weights[prefix + f"self_attn.{name}_proj.bias"] = matrix(1, rows * head_dim, 8.0)[0]
        if family == "qwen3":
            for name in "qk":
                weights[prefix + f"self_attn.{name}_norm.weight"] = norm(width=head_dim)
    weights["model.norm.weight"] = norm(6.0)
    if not tied:
        weights["lm_head.weight"] = matrix(vocab, hidden, 0.5)
    save_file(weights, str(path), metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
