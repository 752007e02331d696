"""Token ids word by word are those of the library for the whole text, for every way of cutting that is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from models import words
from models.tiny import write_tiny
from models.words import Words

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = _WORD + _REST
QWEN_2 = LLAMA_3.replace("{1,3}", "")


def own_regex() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def digits(individual: bool) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=individual), own_regex()])


def split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.Sequence:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior), byte_level])


WAYS: dict[str, Callable[[], Any]] = {
    "gpt-2": own_regex,
    "smollm2": lambda: digits(True),
    "digits": lambda: digits(False),
    "llama-3": lambda: split(LLAMA_3),
    "qwen-2": lambda: split(QWEN_2),
}


@cache
def library(way: str) -> Library:
    """A tiny vocabulary behind one way of cutting."""
    with TemporaryDirectory() as folder:
        found = Library.from_file(str(write_tiny(Path(folder)) / "tokenizer.json"))
    found.encode_special_tokens = True
    found.pre_tokenizer = WAYS[way]()
    return found


def whole(one: Library, text: str) -> list[int]:
    return list(one.encode(text, add_special_tokens=False).ids)


@cache
def remembering(way: str) -> Words:
    one = library(way)
    found = Words.of(one, lambda text: whole(one, text))
    assert found is not None
    return found


usual = st.text(st.sampled_from(" \n\r\t'\"The quick1234567890.,!?-_<|>{}()sStTrReEvVmMlLdD\x0b\x0c\x1c\x1f\x00\x7f"))


@pytest.mark.parametrize("way", WAYS)
@given(st.one_of(usual, st.text(st.characters(max_codepoint=127))))
@example("I'll don'T  stop\r\n\r\n  <|im_end|> 12345 a 1 \t\x0b\x1c x\n ")
@example("")
@example(" tok" * 300)
def test_a_text_has_the_ids_that_the_library_gives_it(way: str, text: str) -> None:
    found = remembering(way)
    assert "".join(found.cut(text)) == text
    for _ in range(2):  # the second time from memory
        ids = found.encode(text)
        assert ids is None or ids == whole(library(way), text)


@pytest.mark.parametrize("way", WAYS)
def test_ordinary_text_is_not_left_to_the_library(way: str) -> None:
    text = "The ferry leaves at 6:05, and it's full.\n\nNo room: 12 people wait (in the rain)!\n"
    assert remembering(way).encode(text) == whole(library(way), text)
    assert remembering(way).encode("déjà") is None


def test_memory_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST_WORDS", 8)
    one = library("gpt-2")
    found = Words.of(one, lambda text: whole(one, text))
    assert found is not None
    for n in range(40):
        text = f" w{'abcdefgh'[n % 8] * (n + 1)}"
        assert found.encode(text) == whole(one, text)
        assert len(found._ids) <= 8
    assert max(map(len, found._ids)) <= words.LONGEST_WORD


def test_other_ways_are_left_to_the_library() -> None:
    def made(change: str) -> Library:
        one = Library.from_str(library("gpt-2").to_str())
        match change:
            case "prefix":
                one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
            case "expression":
                one.pre_tokenizer = split(r"\p{L}+|.")
            case "behavior":
                one.pre_tokenizer = split(LLAMA_3, "merged_with_previous")
            case "normalizer":
                one.normalizer = normalizers.Lowercase()
            case "added":
                one.add_tokens([AddedToken("ferry", special=False)])
            case "truncation":
                one.enable_truncation(3)
            case "dropout":
                one.model.dropout = 0.5
            case "none":
                one.pre_tokenizer = None
        return one

    changes = ("prefix", "expression", "behavior", "normalizer", "added", "truncation", "dropout", "none")
    for change in changes:
        assert Words.of(made(change), lambda text: []) is None, change
    assert Words.of(made("nothing"), lambda text: []) is not None
