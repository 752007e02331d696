"""Tokens: round trips byte by byte, special tokens, other kinds of tokenizer, refusals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Library

from models.errors import UserError
from models.tiny import write_tiny
from models.tokenizer import Tokenizer, byte_map

TEXTS = [
    "",
    " leading and trailing ",
    "👍🏽 family 👨‍👩‍👧‍👦 emoji",
    "你好，世界。東京は日本の首都です。 안녕하세요",
    "digits 1234567890 and 3.14159",
    "tabs\tand\r\nnew\n\n\nlines",
    "e\u0301 is not \u00e9",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write_tiny(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json")


def test_the_byte_map_covers_every_byte_once() -> None:
    assert sorted(byte_map().values()) == list(range(256))
    assert byte_map()["Ġ"] == 0x20 and byte_map()["Ċ"] == 0x0A


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_byte_by_byte(tokenizer: Tokenizer, text: str) -> None:
    for ids in (tokenizer.encode(text), tokenizer.encode_plain(text)):
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
        assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = _shared()
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text


_CACHE: list[Tokenizer] = []


def _shared() -> Tokenizer:
    """Hypothesis runs the body many times; the tokenizer is made once."""
    if not _CACHE:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _CACHE.append(Tokenizer.from_file(write_tiny(Path(folder)) / "tokenizer.json"))
    return _CACHE[0]


def test_an_emoji_spreads_over_several_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")
    assert len(ids) >= 3
    assert tokenizer.decode(ids[:2]).endswith("\ufffd")


def test_specials_are_parsed_or_not_as_asked(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>hi<|im_end|>"
    assert tokenizer.encode(text)[0] == 1 and tokenizer.encode(text)[-1] == 2
    plain = tokenizer.encode_plain(text)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.count_plain(text) == len(plain)
    assert [tokenizer.count_plain(one) for one in ("", " ", "né 世界 🎉")] == [
        len(tokenizer.encode_plain(one)) for one in ("", " ", "né 世界 🎉")
    ]
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text)) == "hi"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.special_texts == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert [tokenizer.token_bytes(token) for token in sorted(tokenizer.special_ids)] == [b""] * 3


def test_ids_outside_the_vocabulary_add_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([10**9, *tokenizer.encode("ok")]) == "ok"


def test_many_threads_see_one_truth(tokenizer: Tokenizer) -> None:
    def both(number: int) -> tuple[list[int], list[int]]:
        text = f"<|im_start|>{number} 你好"
        return tokenizer.encode(text), tokenizer.encode_plain(text)

    numbers = list(range(200))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(both, numbers)) == [both(number) for number in numbers]


def test_sentencepiece_style_tokens_have_their_bytes(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i")]
    library = Library(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("hi 😀")
    assert tokenizer.token_bytes(ids[0]) == b" hi"
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == " hi 😀".encode()


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Library(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(UserError, match="WordLevel"):
        Tokenizer.from_file(path)
    path.write_text('{"model": 3}')
    with pytest.raises(UserError, match="not a readable") as caught:
        Tokenizer.from_file(path)
    assert caught.value.where == str(path)
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "none.json")


def test_tiny_models_of_one_seed_are_the_same_bytes(tmp_path: Path, tiny_folder: Path) -> None:
    again = write_tiny(tmp_path / "again", seed=3)
    other = write_tiny(tmp_path / "other", seed=4, vocab=700, tied=False)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (again / name).read_bytes() == (tiny_folder / name).read_bytes()
        assert (other / name).read_bytes() != (tiny_folder / name).read_bytes()
    assert Tokenizer.from_file(other / "tokenizer.json").vocab_size == 700


@pytest.mark.parametrize("sizes", [{"vocab": 100}, {"hidden": 62}, {"n_heads": 4, "n_kv_heads": 3}])
def test_tiny_models_refuse_sizes_that_do_not_fit(sizes: dict[str, int], tmp_path: Path) -> None:
    writer: Callable[..., Path] = write_tiny
    with pytest.raises(UserError):
        writer(tmp_path / "bad", **sizes)
