"""What the text of an answer tells by itself: facts for the checks that cost nothing (W0), never a verdict.

Owns the definition of `repeat_share`, the score of a text that fell into a loop:

* The **tail** is the last half of the text, at least its last 200 characters (the whole of a shorter text), so that
  a sound beginning does not hide a loop that lasts to the end.
* A **run** is the longest end of the tail that is one unit of p characters repeated (the first copy may be cut by
  the tail's beginning, the last by max_tokens): every character equals the one p before it.  It counts from three
  whole copies on.  Units of every length are tried; blanks and letters count alike, so it works without words.
* `repeat_share` = characters of the longest run / max(characters of the tail, 200).  A text under 200 characters
  thus scores low, unless it is nothing but one unit begun at least eight times: then the score is 1.

`dominance` is the share of the commonest token, by the chunks as they came or, where these are few, by our own count: a
text of one token alone scores 1, long before it is long enough to be a loop.  `sketch` counts what a text is made of
in a few bins, so that two runs can be compared without keeping a text.

"the the the ..." and a sentence repeated to the end score 1; prose with a closing refrain stays under 0.3.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from loadgen.clean import clean
from telemetry.scripts import foreign_letters, main_script

TAIL_CHARS: Final = 200
MIN_COPIES: Final = 3
DEGENERATE_COPIES: Final = 8
DOMINANCE_TOKENS: Final = 16  # fewer tokens say nothing of the commonest
BINS: Final = 16
MANY_TOKENS: Final = 64  # from here on what counts in C is faster, its start included
SKETCH_BYTES: Final = 1024
_ANCHOR: Final = 16  # a run shorter than this cannot matter against TAIL_CHARS


class PlainEncoder(Protocol):
    """What is needed of a tokenizer (models.tokenizer.Tokenizer has it)."""

    def encode_plain(self, text: str, /) -> list[int]: ...


class TextFacts(NamedTuple):
    """sha: hex SHA-256 of the UTF-8 text; chars: code points; tokens: None without a tokenizer.

    dominance: None below DOMINANCE_TOKENS.  foreign_letters: None where the prompt's scripts are not known.
    """

    sha: str
    chars: int
    replacement_chars: int
    special_leaks: int
    repeat_share: float
    tokens: int | None
    dominance: float | None
    foreign_letters: int | None
    script: str | None
    sketch: list[int] | None


def leak_counter(special_texts: Iterable[str]) -> Callable[[str], int]:
    """A function that counts, in a text, the special tokens spelled out (longest first where they overlap)."""
    texts = sorted((text for text in special_texts if text), key=len, reverse=True)
    if not texts:
        return lambda text: 0
    pattern = re.compile("|".join(map(re.escape, texts)))
    return lambda text: len(pattern.findall(text))


def text_facts(
    text: str,
    count_leaks: Callable[[str], int],
    tokenizer: PlainEncoder | None,
    pieces: Sequence[str] = (),
    known_scripts: frozenset[str] | None = None,
) -> TextFacts:
    """The facts of one answer's text; pure.  pieces: its chunks as they came.  known_scripts: those of its prompt."""
    ids = tokenizer.encode_plain(clean(text)) if tokenizer is not None else None
    return TextFacts(
        # A lone surrogate can come out of a JSON escape; it has no UTF-8 form of its own.
        sha=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        chars=len(text),
        replacement_chars=text.count("�"),
        special_leaks=count_leaks(text),
        repeat_share=repeat_share(text),
        tokens=None if ids is None else len(ids),
        dominance=dominance(pieces, ids or ()),
        foreign_letters=None if known_scripts is None else foreign_letters(text, known_scripts),
        script=main_script(text),
        sketch=None if ids is None else _in_bins(ids),
    )


def dominance(pieces: Sequence[str], ids: Sequence[int]) -> float | None:
    """The share of the commonest chunk, of the commonest token where chunks are few; None where both are."""
    parts: Sequence[str | int] = pieces if len(pieces) >= DOMINANCE_TOKENS else ids
    if len(parts) < DOMINANCE_TOKENS:
        return None
    counts: dict[str | int, int] = {}
    if len(parts) > MANY_TOKENS:
        counts = Counter(parts)
    else:
        for part in parts:
            counts[part] = counts.get(part, 0) + 1
    return max(counts.values()) / len(parts)


def _in_bins(ids: Sequence[int]) -> list[int]:
    """Token ids counted in BINS bins by their last four bits."""
    if len(ids) > MANY_TOKENS:
        return list(np.bincount(np.array(ids, dtype=np.int64) % BINS, minlength=BINS).tolist())
    bins = [0] * BINS
    for token in ids:
        bins[token % BINS] += 1
    return bins


def sketch(text: str) -> list[int]:
    """UTF-8 bytes of a text, evenly chosen from a long one, counted in BINS bins by their last four bits."""
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    chosen = data[:: len(data) // SKETCH_BYTES + 1]
    return list(np.bincount(chosen % BINS, minlength=BINS).tolist())


def matches(text: str, answer: str) -> bool:
    """Does the text give this answer, as a whole number or word of its own?"""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def repeat_share(text: str) -> float:
    """Share (0..1) of the text's tail that one repeated unit covers, as the module defines it."""
    size = len(text)
    tail = text[-max(TAIL_CHARS, size // 2) :]
    length, period = _longest_run(tail)
    if 0 < size < TAIL_CHARS and length == size and length > (DEGENERATE_COPIES - 1) * period:
        return 1.0
    return length / max(len(tail), TAIL_CHARS)


def _longest_run(tail: str) -> tuple[int, int]:
    """(length, period) of the longest run at the end of `tail`; (0, 0) if there is none.

    A period can only be a distance at which the last few characters occur again.  Two periods whose sum fits into a
    run share their greatest common divisor (Fine and Wilf), so after a run of length r with period p the next period
    worth a look is above r - p: few distances are ever measured.
    """
    size = len(tail)
    anchor = tail[-max(1, min(_ANCHOR, size // MIN_COPIES)) :]
    best = (0, 0)
    least = 1  # the smallest period still worth a look
    while least * MIN_COPIES <= size:
        # The occurrence of the anchor nearest to the end that lies at least `least` before it.
        at = tail.rfind(anchor, 0, size - least)
        if at < 0:
            break
        period = size - len(anchor) - at
        if period * MIN_COPIES > size:
            break
        length = period + _common_suffix(tail, period)
        if length >= MIN_COPIES * period:
            if length > best[0]:
                best = (length, period)
            least = max(period, length - period) + 1
        else:
            least = period + 1
    return best


def _common_suffix(tail: str, period: int) -> int:
    """How many characters at the end of `tail` equal those `period` before them."""
    size = len(tail)
    low, high = 0, size - period
    while low < high:  # if the last m characters match, so do the last m - 1: bisect on m
        middle = (low + high + 1) // 2
        if tail[size - period - middle : size - period] == tail[size - middle :]:
            low = middle
        else:
            high = middle - 1
    return low
