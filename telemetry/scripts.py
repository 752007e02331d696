"""Which scripts a text is written in (LATIN, CYRILLIC, CJK, …), from the first word of its letters' Unicode names.

Must always hold: a text of ASCII costs no look at its single characters unless they are counted.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache
from typing import Final

LATIN: Final = "LATIN"


def scripts(text: str) -> Counter[str]:
    """Letters of a text by script."""
    return Counter(script for character in text if (script := _script(character)))


def scripts_in(text: str) -> frozenset[str]:
    """The scripts that occur in a text; LATIN for any text of ASCII, since every model may answer in it."""
    return frozenset((LATIN,)) if text.isascii() else frozenset((LATIN, *scripts(text)))


def foreign_letters(text: str, known: frozenset[str]) -> int:
    """Letters of scripts that are not in ``known``."""
    if text.isascii() and LATIN in known:
        return 0
    return sum(count for script, count in scripts(text).items() if script not in known)


def main_script(text: str) -> str | None:
    """The script of most letters; None where there is no letter."""
    if text.isascii():
        return LATIN if any(map(str.isalpha, text)) else None
    found = scripts(text)
    return max(found, key=lambda script: (found[script], script)) if found else None


@lru_cache(maxsize=65_536)
def _script(character: str) -> str:
    return unicodedata.name(character, "").split(" ")[0].split("-")[0] if character.isalpha() else ""
