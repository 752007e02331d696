"""Token ids of ASCII text, word by word, where each word is encoded by the library once and then remembered.

Byte-level tokenizers cut a text into words by a regular expression and encode every word by itself; the words of real
texts come again and again, and looking one up takes a tenth of the library's time.  Must always hold: the ids are those
that the library gives for the whole text.  So only ways of cutting are known here whose expression can be written
exactly for ASCII; everything else is left to the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

MOST_WORDS: Final = 1 << 16  # then begun anew
LONGEST_WORD: Final = 64  # characters; what is longer hardly comes again

_SPACE: Final = r"\t-\r "  # what \s is within ASCII; Python's own would add \x1c to \x1f
_TAIL: Final = rf"[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
#: GPT-2's, which the byte-level step uses by itself.
_GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^{_SPACE}A-Za-z0-9]+|{_TAIL}"
_CL100K: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{DIGITS}"
    rf"| ?[^{_SPACE}A-Za-z0-9]+[\r\n]*|[{_SPACE}]*[\r\n]+|{_TAIL}"
)
_CL100K_SOURCE: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: An expression of a tokenizer.json -> the same for ASCII: Llama 3 and Qwen 2.
_KNOWN: Final = {
    _CL100K_SOURCE.replace("DIGITS", "{1,3}"): _CL100K.replace("{DIGITS}", "{1,3}"),
    _CL100K_SOURCE.replace("DIGITS", ""): _CL100K.replace("{DIGITS}", ""),
}
#: Normalizers that leave ASCII alone.
_NORMALIZERS: Final = ("NFC", "NFD", "NFKC", "NFKD")


class Words:
    """Cuts and remembers for one tokenizer.  Safe to use from several threads: at worst a word is encoded twice."""

    def __init__(self, pattern: str, digits: str | None, encode: Callable[[str], list[int]]) -> None:
        """pattern: of a word.  digits: cuts apart before that, where there is such a step.  encode: the library's."""
        self._find = re.compile(pattern).findall
        self._apart = None if digits is None else re.compile(digits).findall
        self._encode = encode
        self._ids: dict[str, list[int]] = {}

    @classmethod
    def of(cls, library: Any, encode: Callable[[str], list[int]]) -> Words | None:
        """For a `tokenizers.Tokenizer` and its encoder without special tokens; None where its way is not known."""
        plain = library.truncation is None and library.padding is None and not library.model.dropout
        ordinary = [one for one in library.get_added_tokens_decoder().values() if not one.special]
        if not plain or ordinary or (_state(library.normalizer) or {"type": "NFC"})["type"] not in _NORMALIZERS:
            return None  # an added token that is not special ends a word wherever it stands
        steps = _state(library.pre_tokenizer) or {}
        match steps.get("pretokenizers", [steps]):
            case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
                return cls(_GPT2, None, encode)
            case [
                {"type": "Digits", "individual_digits": bool(single)},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ]:
                return cls(_GPT2, "[0-9]|[^0-9]+" if single else "[0-9]+|[^0-9]+", encode)
            case [
                {"type": "Split", "pattern": {"Regex": str(source)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ] if source in _KNOWN:
                return cls(_KNOWN[source], None, encode)
        return None

    def encode(self, text: str) -> list[int] | None:
        """The token ids of a text; None where it is not ASCII."""
        if not text.isascii():
            return None
        ids: list[int] = []
        known = self._ids
        for word in self.cut(text):
            found = known.get(word)
            if found is None:
                if self.cut(word) != [word]:
                    return None  # it is one word only where it stands, so the library has to see it there
                found = self._learn(word)
            ids += found
        return ids

    def cut(self, text: str) -> list[str]:
        """The words of an ASCII text; joined they are the text."""
        if self._apart is None:
            return self._find(text)
        return [word for part in self._apart(text) for word in self._find(part)]

    def _learn(self, word: str) -> list[int]:
        found = self._encode(word)
        if len(word) <= LONGEST_WORD:
            if len(self._ids) >= MOST_WORDS:
                self._ids = {}
            self._ids[word] = found
        return found


def _state(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as its JSON; the library shows it by its pickled state alone."""
    if part is None:
        return None
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found
