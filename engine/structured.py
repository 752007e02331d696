"""JSON that always parses: a grammar says at every step which tokens may come next, the others are masked.

Compiled by llguidance from a JSON schema (``Grammars``, once per schema), walked by one request (``GrammarState``).
What must hold: an answer under a grammar is complete, and parses, unless it was cut by ``length``.  Whitespace is
bounded, since a model may otherwise go on with it for ever.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from models.shape import ModelShape
    from models.tokenizer import Tokenizer

_WHITESPACE: Final = r" |\n[ \t]{0,20}"
_OPTIONS: Final = "x-guidance"  # llguidance's own key in a schema; ours are fixed
_KEPT: Final = 32


class GrammarError(Exception):
    """The schema cannot be had, or walking it took more than the library allows; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled schema.  ``start`` gives a request its own place in it."""

    schema: str
    _matcher: Any = field(repr=False)

    def start(self) -> GrammarState:
        """At the beginning."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """How far one answer is; fed token by token."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def forbidden(self) -> np.ndarray:
        """[vocabulary] bool: tokens that may not come next.  Raises GrammarError; never all of them."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        banned: np.ndarray = allowed == 0
        if banned.all():
            raise GrammarError("no token may come next")
        return banned

    @property
    def complete(self) -> bool:
        """May the answer end here?"""
        return bool(self._matcher.is_accepting())

    def advance(self, token: int) -> bool:
        """Take a token; True when the answer is complete and nothing may follow.  Raises GrammarError."""
        if not self._matcher.consume_token(token):
            raise GrammarError(self._matcher.get_error() or f"token {token} may not come here")
        return bool(self._matcher.is_stopped())


class Grammars:
    """Grammars of one model.  ``compile`` may be called from any thread.

    ``prepare`` reads the vocabulary (0.9 s for 49,152 tokens, a third of it with the interpreter's lock held), so it
    belongs before the first request.
    """

    def __init__(self, tokenizer: Tokenizer, shape: ModelShape) -> None:
        self._tokenizer, self._shape = tokenizer, shape
        self._library: Any = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary, once; where there are no grammars (no end-of-text token, no llguidance), ``compile``
        says why."""
        with self._lock:
            if self._library is None and self._shape.eos_token_ids and find_spec("llguidance") is not None:
                self._library = _library_tokenizer(self._tokenizer, self._shape)

    def compile(self, schema: str) -> Grammar:
        """schema: a JSON object as text.  Raises GrammarError for what is no schema, or not supported."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise GrammarError("structured answers need llguidance, which is not installed here") from error

        self.prepare()
        with self._lock:
            if self._library is None:
                raise GrammarError("the model has no end-of-text token, so a structured answer could not end")
            found = self._kept.get(schema)
            if found is not None:
                self._kept.move_to_end(schema)
                return found
            if _OPTIONS in json.loads(schema):
                raise GrammarError(f"'{_OPTIONS}' is not supported")
            try:
                text = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
            except ValueError as error:
                raise GrammarError(str(error)) from error
            wrong, messages = LLMatcher.validate_grammar_with_warnings(text, self._library)
            if wrong:
                raise GrammarError("; ".join(messages))
            grammar = Grammar(schema, LLMatcher(self._library, text, log_level=0))
            grammar.start().forbidden()  # a grammar that fails at its first token fails here
            self._kept[schema] = grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return grammar


class _Words:
    """The vocabulary as llguidance wants it: the bytes that a token adds to the text, as our detokenizer has them."""

    def __init__(self, tokenizer: Tokenizer, shape: ModelShape) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = shape.eos_token_ids[0], None
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < shape.vocab)
        self.tokens = [
            tokenizer.decode([token], skip_special=False).encode()
            if token in tokenizer.special_ids
            else tokenizer.token_bytes(token)
            for token in range(shape.vocab)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode_plain(text if isinstance(text, str) else text.decode(errors="replace"))


def _library_tokenizer(tokenizer: Tokenizer, shape: ModelShape) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    words = TokenizerWrapper(_Words(tokenizer, shape))
    return LLTokenizer(words, n_vocab=shape.vocab, eos_token=list(shape.eos_token_ids))
