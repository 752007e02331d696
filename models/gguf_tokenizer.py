"""The tokenizer inside a GGUF file, rebuilt as a tokenizer.json and a tokenizer_config.json.

Only tokenizers that can be rebuilt exactly are accepted: byte-level BPE ("gpt2") with a known pre-tokenizer.  What
must hold: ids equal those of llama.cpp and of the model's original tokenizer for every text.
"""

from __future__ import annotations

from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from models.errors import UserError

_REMEDY: Final = "use the model's safetensors folder with its tokenizer.json"
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's llama_token_type
# Word patterns of the models themselves, as in their tokenizer.json and in llama.cpp's llama-vocab.cpp; the two differ
# only in how many digits make a word.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def rebuild(metadata: dict[str, Any], where: str) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, tokenizer_config) from GGUF metadata.  Raises UserError naming what cannot be rebuilt."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(f"tokenizer {kind!r} inside a GGUF is not supported", where=where, remedy=_REMEDY)
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise UserError("the tokenizer's tokens or merges are missing", where=where, remedy=_REMEDY)
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if len(vocab) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise UserError("the tokenizer repeats a token or has a damaged merge", where=where, remedy=_REMEDY)
    pre = metadata.get("tokenizer.ggml.pre", "default")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens say
        raise UserError(f"the tokenizer cannot be rebuilt: {error}", where=where, remedy=_REMEDY) from error
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, where)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or []
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [tokens[number] for number, kind_of in enumerate(types) if kind_of == wanted]
        texts = [AddedToken(text, special=special, normalized=False) for text in added]
        tokenizer.add_special_tokens(texts) if special else tokenizer.add_tokens(texts)
    config = _config(metadata, tokens)
    if config["add_bos_token"]:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer, config


def _pre_tokenizer(pre: str, where: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("llama-bpe", "qwen2"):
        words = Regex(_WORDS.format(digits="{1,3}" if pre == "llama-bpe" else ""))
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise UserError(f"pre-tokenizer {pre!r} inside a GGUF is not supported", where=where, remedy=_REMEDY)


def _config(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if number is not None and 0 <= number < len(tokens):
            config[f"{ours}_token"] = tokens[number]
    # llama.cpp adds BOS for the llama-3 tokenizer unless told otherwise, and for no other of these.
    default = metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and "bos_token" in config
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
