"""W3: questions whose answers can be checked exactly, and the checkers.

Owns what a question is and when an answer is right.  The questions themselves are in ``question_sets``.  Must always
hold: a checker is a function of the text alone, so the same text is right or wrong for ever; no model judges a model;
the right answer passes its own checker and the answer of any other question of its kind does not (a test asks both).

What is measured is a difference between two servers on the same questions (``paired``), never a score as such, so a
question may be too hard for a model: it then carries no weight.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

ARITHMETIC: Final = "arithmetic"
EXTRACTION: Final = "extraction"
FORMAT: Final = "format"
KINDS: Final = (ARITHMETIC, EXTRACTION, FORMAT)

NUMBER: Final = "number"  # the last number of the first line that has one
PHRASE: Final = "phrase"  # the phrase is there as whole words, and none of the others
PATTERN: Final = "pattern"  # the whole answer matches
JSON: Final = "json"  # the answer is this JSON value, in a code fence or not
CHECKERS: Final = (NUMBER, PHRASE, PATTERN, JSON)

_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE: Final = re.compile(r"^```[a-z]*\n(.*?)\n?```$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """One question.  expected: the right answer as the checker wants it.  others: phrases that must not be named.

    max_tokens: room for the answer; ``sample``: an answer that passes, as a careful model would write it.
    """

    id: str
    kind: str
    prompt: str
    checker: str
    expected: str
    others: tuple[str, ...] = ()
    max_tokens: int = 16
    sample: str = ""

    @property
    def good_answer(self) -> str:
        return self.sample or self.expected

    def is_right(self, text: str) -> bool:
        """Whether an answer is right."""
        if self.checker == NUMBER:
            found = _last_number(text)
            return found is not None and found == float(self.expected)
        if self.checker == PHRASE:
            words = _plain(text)
            return _names(words, self.expected) and not any(_names(words, other) for other in self.others)
        if self.checker == PATTERN:
            return re.fullmatch(self.expected, text.strip()) is not None
        return bool(_json(text) == json.loads(self.expected))


def score(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, bool]:
    """Right or wrong by question id.  ValueError for another number of answers."""
    if len(questions) != len(answers):
        raise ValueError(f"{len(answers)} answers to {len(questions)} questions")
    return {question.id: question.is_right(answer) for question, answer in zip(questions, answers, strict=True)}


def digest(questions: Sequence[Question]) -> str:
    """sha256 of a set: two scores may be compared only where it is equal."""
    content = [[q.id, q.kind, q.prompt, q.checker, q.expected, list(q.others), q.max_tokens] for q in questions]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def _last_number(text: str) -> float | None:
    for line in text.splitlines():
        if found := _NUMBER.findall(line):
            return float(found[-1].replace(",", ""))
    return None


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[\w:.-]*\w", unicodedata.normalize("NFKC", text).lower()))


def _names(words: str, phrase: str) -> bool:
    return f" {_plain(phrase)} " in f" {words} "


def _json(text: str) -> Any:
    body = text.strip()
    if fenced := _FENCE.match(body):
        body = fenced[1]
    try:
        return json.loads(body)
    except ValueError:
        return _NOTHING


_NOTHING: Final = object()  # equal to no JSON value
