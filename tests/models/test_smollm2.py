"""The real SmolLM2: its published figures, and the same tokens as transformers reads from the same GGUF."""

from __future__ import annotations

from pathlib import Path

from models.store import load, source_gguf

MIXED = (
    "<|im_start|>user\nHello, wörld! 12345 + 67.8 = ?\n\n\tdef f(x):\r\n    return x**2  # 你好 😀👍🏽 don't WE'LL "
    "東京は日本の首都です。 안녕하세요 ½ ² ١٢٣ \u00a0\u200b e\u0301 <repo_name> <|im_end|>   trailing  "
)


def test_the_real_model(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    model = load("smollm2")
    assert model.shape.parameters() == 134_515_008
    assert (model.shape.n_layers, model.shape.n_heads, model.shape.n_kv_heads, model.shape.head_dim) == (30, 9, 3, 64)
    assert (model.shape.rope_theta, model.shape.rms_eps, model.shape.eos_token_ids) == (1e5, 1e-5, (2,))
    assert len(model.weights) == 272
    original = source_gguf(smollm2)
    assert original is not None
    theirs = AutoTokenizer.from_pretrained(original.parent, gguf_file=original.name)
    ids = model.tokenizer.encode(MIXED)
    assert ids == theirs.encode(MIXED, add_special_tokens=False)
    assert model.tokenizer.decode(ids, skip_special=False) == MIXED
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = model.template.render(messages)
    assert prompt == theirs.apply_chat_template(
        messages, chat_template=model.template.source, tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
