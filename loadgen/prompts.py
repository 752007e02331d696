"""Prompts of an exact number of tokens, template included, in plain English.

What must hold: the asked number of tokens is the number that the reference tokenizer counts for the rendered chat,
generation prompt included (built from counted pieces, then verified by encoding the whole); the same seed, salt and
index give the same prompt on any worker; no two indexes and no two salts share a prefix beyond the template, because
the user's text begins with salt words that are different for each (a fixed text would turn into prefix-cache hits,
which one known tool reports as a 49 times better TTFT).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from models.errors import UserError
from models.tokenizer import Tokenizer

CORPUS: Final = Path(__file__).with_name("corpus.txt")
INSTRUCTIONS: Final = (
    "Continue this text in the same plain style.",
    "Summarize the notes above in plain words.",
    "Which of these sentences is the most surprising, and why?",
    "Write what might happen next.",
    "Retell this for a child of ten.",
    "Find a title for these notes and explain it.",
)
#: Words that are one token in the usual vocabularies; those that are not are left out.
FILLERS: Final = (
    "again",
    "then",
    "now",
    "here",
    "there",
    "too",
    "more",
    "still",
    "so",
    "and",
    "the",
    "a",
    "!",
    ".",
    ",",
)
SALT_BITS: Final = 32  # of different salts: two runs of a million requests meet with a chance of 2e-4 a request
MIN_ALPHABET: Final = 16
MIN_BODY: Final = 8  # tokens of text below which no closing instruction is added
MAX_REPAIRS: Final = 16


class Template(Protocol):
    """What is needed of models.template.ChatTemplate."""

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str: ...


class NoTemplate:
    """A plain prompt, as the completions API takes it: the text alone."""

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        return "".join(str(message["content"]) for message in messages)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user message and the tokens of the whole rendered chat.

    answer: what the server should say, where that is known.  chat: all messages, where it is not one of the user alone.
    """

    text: str
    tokens: int
    answer: str | None = None
    chat: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    tokens: int  # with a leading space
    upto: tuple[int, ...]  # tokens of the first k words, k = 0..words


class PromptMaker:
    """Makes the prompts of a run.  Not thread-safe; under 0.5 ms a prompt, of any length, on a slow core.

    Verifying costs most of that.  Where the tokenizer is found to be additive over whole sentences (it splits before
    each " word"), those in the middle of a long prompt are counted from the cache and the rest of it is encoded.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, *, seed: int, salt: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._seed = seed
        self.prefix, self.suffix = self._around()
        # A server puts the tokenizer's own beginning before a plain prompt; a template spells its own.
        self.extra = len(tokenizer.prefix_ids) if isinstance(template, NoTemplate) else 0
        self._template_tokens = len(tokenizer.encode(self.prefix + self.suffix)) + self.extra
        self._word_counts: dict[str, int] = {}
        self._sentences = [self._counted(line) for line in CORPUS.read_text(encoding="utf-8").splitlines() if line]
        self.additive = all(self._sums(order) for order in (self._sentences, self._sentences[::-1]))
        self._instructions = [(text, self._count(f" {text}")) for text in INSTRUCTIONS]
        self._fillers = [f" {word}" for word in FILLERS if self._count(f" {word}") == 1]
        self._fillers = self._fillers or [mark for mark in (".", "!", ",", "a") if self._count(mark) == 1]
        if not self._fillers:
            raise UserError(
                "no filler word is a single token of this tokenizer",
                where="--model",
                remedy="use the reference model whose tokenizer the server uses",
            )
        self._salt_words, self._salt_length, self._word_tokens = self._salt_alphabet()
        self._salt_space = len(self._salt_words) ** self._salt_length
        start = int.from_bytes(hashlib.blake2b(f"salt {salt}".encode(), digest_size=16).digest(), "big")
        self._salt_start = start % self._salt_space
        stride = (start >> 64) % self._salt_space | 1
        while math.gcd(stride, self._salt_space) != 1:
            stride += 2
        self._salt_stride = stride
        self._stop_tokens = self._count(".")

    @cached_property
    def minimum(self) -> int:
        """Tokens of the shortest prompt: the template and the salt words."""
        return self._template_tokens + self._salt_length * self._word_tokens

    def make(self, index: int, tokens: int) -> Prompt:
        """The prompt of a request.  tokens: at least `minimum`; the prompt has exactly as many.

        Raises UserError where this tokenizer cannot be brought to the exact count.
        """
        if tokens < self.minimum:
            raise ValueError(f"{tokens} tokens are below the minimum of {self.minimum}")
        head = self.salt_words(index)
        room = tokens - self.minimum
        draw = int.from_bytes(hashlib.blake2b(f"{self._seed}:{index}".encode(), digest_size=12).digest(), "big")
        tail, tail_tokens = "", 0
        if room > self._stop_tokens:
            head += "."
            room -= self._stop_tokens
            text, count = self._instructions[draw % len(self._instructions)]
            if room >= count + MIN_BODY:
                tail, tail_tokens = f" {text}", count
        whole, end = self._body(room - tail_tokens, draw >> 16)
        return self._verified(head, whole, end, tail, tokens)

    @cached_property
    def before(self) -> int:
        """Tokens of what the template puts ahead of the text."""
        return self._template_tokens - len(self._tokenizer.encode(self.suffix))

    @property
    def around(self) -> int:
        """Tokens of what the template puts around the text."""
        return self._template_tokens

    @property
    def salt_tokens(self) -> int:
        return self._salt_length * self._word_tokens

    def count_chat(self, messages: Sequence[dict[str, Any]]) -> int:
        """Tokens of a rendered chat, generation prompt included."""
        return len(self._tokenizer.encode(self._template.render(messages))) + self.extra

    def count_text(self, text: str) -> int:
        """Tokens of the chat whose only message is this text."""
        return len(self._tokenizer.encode(self.prefix + text + self.suffix)) + self.extra

    def count(self, text: str) -> int:
        """Tokens of a text by itself, read as plain characters."""
        return self._count(text)

    def fill(self, room: int, draw: int) -> str:
        """Sentences of `room` tokens by the counts of their words, a space ahead; draw: any number, chooses them."""
        whole, end = self._body(room, draw)
        return "".join(f" {sentence.text}" for sentence in whole) + "".join(end)

    def closed(self, head: str, draw: int, tail: str, tokens: int) -> Prompt:
        """head, sentences and tail, together exactly `tokens`.  Raises UserError where they have no room."""
        have = self.count_text(head + tail)
        whole, end = self._body(max(0, tokens - have), draw)
        pieces = [f" {sentence.text}" for sentence in whole] + end
        words = [f" {word}" for piece in pieces for word in piece.split(" ") if word]
        return self._verified(head, [], words, tail, tokens)

    def exact(self, text: str, tokens: int, count: Callable[[str], int]) -> str:
        """The text with fillers added or words taken from its end until count(text) is `tokens`.  Raises UserError."""
        for repair in range(MAX_REPAIRS):
            have = count(text)
            if have == tokens:
                return text
            if have < tokens:
                text += "".join(self._fillers[(repair + k) % len(self._fillers)] for k in range(tokens - have))
            else:
                text = " ".join(text.split(" ")[: -(have - tokens)])
        raise self._no_prompt(tokens)

    def messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The chat of a prompt, as it goes into a request's body."""
        return list(prompt.chat) if prompt.chat is not None else [{"role": "user", "content": prompt.text}]

    def _verified(self, head: str, whole: list[_Sentence], end: list[str], tail: str, tokens: int) -> Prompt:
        """Encode the chat; where pieces merged with their neighbours, add fillers or take words away at the end."""
        if whole:
            end = [*(f" {word}" for word in whole[-1].text.split(" ")), *end]
        known = whole[1:-1] if self.additive else []
        middle = "".join(f" {sentence.text}" for sentence in known)
        known_tokens = sum(sentence.tokens for sentence in known)
        lead = "".join(f" {sentence.text}" for sentence in (whole[:1] if self.additive else whole)[: len(whole) - 1])
        for repair in range(MAX_REPAIRS):
            rest = "".join(end) + tail
            encoded = self._tokenizer.encode(f"{self.prefix}{head}{lead}{rest}{self.suffix}")
            have = len(encoded) + known_tokens + self.extra
            if have == tokens:
                return Prompt(f"{head}{lead}{middle}{rest}", tokens)
            if have < tokens:
                end = [*end, *(self._fillers[(repair + k) % len(self._fillers)] for k in range(tokens - have))]
            elif end:
                end = end[: max(0, len(end) - (have - tokens))]
            elif tail:
                tail = ""
            else:
                break
        raise self._no_prompt(tokens)

    def _no_prompt(self, tokens: int) -> UserError:
        return UserError(
            f"no prompt of exactly {tokens} tokens could be built with this tokenizer",
            where="--model",
            remedy="use the reference model whose tokenizer the server uses",
        )

    def _body(self, room: int, draw: int) -> tuple[list[_Sentence], list[str]]:
        """Whole sentences, then the beginning of one with fillers in pieces: together exactly `room` tokens."""
        total = len(self._sentences)
        at, step = draw % total, 1 + (draw >> 16) % (total - 1)
        while math.gcd(step, total) != 1:
            step += 1
        whole: list[_Sentence] = []
        while self._sentences[at].tokens <= room:
            whole.append(self._sentences[at])
            room -= self._sentences[at].tokens
            at = (at + step) % total
        return whole, self._beginning(self._sentences[at], room, at)

    def _beginning(self, sentence: _Sentence, room: int, at: int) -> list[str]:
        """The first words of a sentence, closed with a full stop where there is room for it, and fillers."""
        stop = self._stop_tokens if room > self._stop_tokens + 2 else 0
        count = max(k for k, used in enumerate(sentence.upto) if used <= room - stop)
        left = room - stop - sentence.upto[count]
        pieces = [f" {word}" for word in sentence.text.split(" ")[:count]]
        if pieces and pieces[-1][-1] in ",;:":
            pieces[-1], left = pieces[-1][:-1], left + 1
        pieces += [self._fillers[(at + k) % len(self._fillers)] for k in range(left)]
        if stop and pieces:
            pieces[-1] += "."
        return pieces

    def salt_words(self, index: int) -> str:
        """Words that this salt gives no other number; `salt_tokens` of them, with or without a space ahead."""
        number = (self._salt_start + index * self._salt_stride) % self._salt_space
        words = []
        for _ in range(self._salt_length):
            number, digit = divmod(number, len(self._salt_words))
            words.append(self._salt_words[digit])
        return " ".join(words)

    def _salt_alphabet(self) -> tuple[list[str], int, int]:
        """Words of one and the same token count with and without a leading space, and how many make a salt."""
        by_count: dict[int, list[str]] = {}
        words = {word.strip(".,;:'").lower() for sentence in self._sentences for word in sentence.text.split(" ")}
        for word in sorted(word for word in words if word.isalpha() and len(word) > 2):
            count = self._count(f" {word}")
            if self._count(word) == count:
                by_count.setdefault(count, []).append(word)
        for count in sorted(by_count):
            if len(by_count[count]) >= MIN_ALPHABET:
                length = math.ceil(SALT_BITS / math.log2(len(by_count[count])))
                return by_count[count], length, count
        raise UserError(
            "this tokenizer gives no words to salt prompts with",
            where="--model",
            remedy="use the reference model whose tokenizer the server uses",
        )

    def _around(self) -> tuple[str, str]:
        """What the template puts before and after the user's text; raises where it changes the text itself."""
        marks = ("Harbor window quiet.", "Seven small boats wait")
        around = set()
        for mark in marks:
            rendered = self._template.render([{"role": "user", "content": mark}], add_generation_prompt=True)
            before, found, after = rendered.partition(mark)
            if not found:
                raise UserError(
                    "the chat template does not render the user's text as it is",
                    where="--model",
                    remedy="use a reference model with a plain chat template",
                )
            around.add((before, after))
        if len(around) != 1:
            raise UserError(
                "the chat template depends on the user's text",
                where="--model",
                remedy="use a reference model with a plain chat template",
            )
        return around.pop()

    def _counted(self, text: str) -> _Sentence:
        """Count a sentence word by word; where the words do not sum to the whole, by its beginnings."""
        words = [f" {word}" for word in text.split(" ")]
        counts = [self._word_counts.setdefault(word, self._count(word)) for word in words]
        total = self._count(f" {text}")
        if sum(counts) == total:
            return _Sentence(text, total, (0, *itertools.accumulate(counts)))
        return _Sentence(text, total, tuple(self._count("".join(words[:k])) for k in range(len(words) + 1)))

    def _sums(self, sentences: list[_Sentence]) -> bool:
        """Does the text of these sentences have the sum of their tokens?"""
        joined = "".join(f" {sentence.text}" for sentence in sentences)
        return self._count(joined) == sum(sentence.tokens for sentence in sentences)

    def _count(self, text: str) -> int:
        return self._tokenizer.count_plain(text)
