"""Text to token ids and back, and the exact bytes of every token.

Built on the `tokenizers` library from a tokenizer.json.  What must hold: encode adds nothing by itself; for
byte-level vocabularies the bytes of the tokens of a text, joined, are the bytes of the text, so that a detokenizer
that works on token_bytes can never lose or invent a character.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Library

from models.errors import UserError
from models.words import Words

# A text at a time is encoded here; the library's pool of threads would hand each of them over and back.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_REMEDY: Final = "use a model with a byte-level BPE or SentencePiece-style BPE tokenizer.json"


def byte_map() -> dict[str, int]:
    """GPT-2's printable stand-in character -> byte (its `bytes_to_unicode`, inverted)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}


_BYTE_OF: Final = byte_map()


class Tokenizer:
    """special_ids / special_texts: the control tokens, which add no text.  sha: SHA-256 of tokenizer.json.

    prefix_ids: what the model's own post-processor puts before a plain text (its BOS, often nothing).
    Safe to call from several threads at once.
    """

    def __init__(self, source: bytes, where: str) -> None:
        """source: the bytes of a tokenizer.json.  Raises UserError if it cannot be read or is of another kind."""
        try:
            self._library = Library.from_str(source.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"not a readable tokenizer.json: {error}", where=where, remedy="fetch the model's tokenizer.json again"
            ) from error
        self.sha = hashlib.sha256(source).hexdigest()
        added = self._library.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        self._added = {number: str(token.content) for number, token in added.items()}
        self.byte_level = _is_byte_level(self._library, where)
        self.vocab_size = max(self._library.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.prefix_ids = tuple(self._library.encode("", add_special_tokens=True).ids)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json.  Raises UserError naming it."""
        try:
            return cls(path.read_bytes(), str(path))
        except OSError as error:
            raise UserError(
                f"cannot be read: {error.strerror}", where=str(path), remedy="fetch the model's tokenizer.json again"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of text; special tokens spelled in it are parsed as such, nothing is added."""
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text with spelled special tokens read as ordinary characters."""
        words = self._words
        if words is not None and (ids := words.encode(text)) is not None:
            return ids
        return self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        # The fast way works out no positions in the text, which nobody asks for here: a quarter less time.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def count_plain(self, text: str) -> int:
        """How many tokens `encode_plain` gives."""
        return len(self._plain.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary contribute nothing."""
        pieces = []
        for token in ids:
            special = token in self.special_ids
            pieces.append(
                self._added[token].encode("utf-8") if special and not skip_special else self.token_bytes(token)
            )
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The raw bytes that a token adds to the text; b"" for special tokens and for ids without a token."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    @cached_property
    def _plain(self) -> Library:
        # The library's switch "treat specials as plain text" is state, so the plain reading has its own copy.
        plain = Library.from_str(self._library.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _words(self) -> Words | None:
        return Words.of(self._plain, self._encode_plain)

    @cached_property
    def _bytes(self) -> list[bytes]:
        vocab = self._library.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        for piece, token in vocab.items():
            if token in self.special_ids:
                continue
            if token in self._added:
                table[token] = self._added[token].encode("utf-8")
            elif self.byte_level:
                table[token] = b"".join(
                    bytes((_BYTE_OF[char],)) if char in _BYTE_OF else char.encode("utf-8") for char in piece
                )
            elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                table[token] = bytes((int(piece[3:5], 16),))
            else:
                table[token] = piece.replace("▁", " ").encode("utf-8")
        return table


def _is_byte_level(library: Library, where: str) -> bool:
    """True for GPT-2's byte-level BPE, False for SentencePiece-style BPE with byte fallback; refuses other kinds."""
    kind = type(library.model).__name__
    # The decoder's parts are not reachable from Python; its pickled state is its JSON.
    decoder = {} if library.decoder is None else json.loads(library.decoder.__getstate__())
    steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
    if kind == "BPE" and "ByteLevel" in steps:
        return True
    if kind == "BPE" and "ByteFallback" in steps:
        return False
    raise UserError(f"tokenizer of type {kind!r} with decoder {steps} is not supported", where=where, remedy=_REMEDY)
