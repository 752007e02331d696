"""Under a grammar, whatever the model wants, what comes out parses and follows the schema."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.structured import Grammar, GrammarError, Grammars
from models.store import LoadedModel

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/flag"}]},
    },
    "$defs": {"flag": {"type": "boolean"}},
    "required": ["name", "age", "more"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tiny: LoadedModel) -> Grammars:
    return Grammars(tiny.tokenizer, tiny.shape)


def walk(grammar: Grammar, model: LoadedModel, seed: int, limit: int = 3000) -> str | None:
    """A random answer; None when it does not end."""
    rng, state, made = np.random.default_rng(seed), grammar.start(), b""
    for _ in range(limit):
        token = int(rng.choice(np.flatnonzero(~state.forbidden())))
        if token in model.shape.eos_token_ids:
            assert state.complete
            return made.decode()
        over = state.advance(token)
        made += model.tokenizer.token_bytes(token)
        if over:
            return made.decode()
    return None


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {"type": "object"},
        {},
        {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        {"enum": ["yes", "no", 3, None]},
        {"type": "string", "pattern": "^[a-f]{3,5}$"},
    ],
)
def test_any_walk_parses_and_follows_the_schema(grammars: Grammars, tiny: LoadedModel, schema: dict[str, Any]) -> None:
    grammar = grammars.compile(json.dumps(schema))
    ended = 0
    for seed in range(12):
        text = walk(grammar, tiny, seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended >= 3


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"not": {"type": "string"}},
        {"$ref": "http://example.org/x"},
        {"$ref": "#"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "array", "minItems": 5, "maxItems": 2},
        {"enum": []},
        {"x-guidance": {"lenient": True}, "type": "object"},
        {"type": "string", "pattern": "\ud800"},
    ],
)
def test_what_is_no_schema_or_not_supported_is_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        grammars.compile(json.dumps(schema))


def test_a_model_without_an_end_has_no_grammars(tiny: LoadedModel) -> None:
    endless = Grammars(tiny.tokenizer, dataclasses.replace(tiny.shape, eos_token_ids=()))
    endless.prepare()
    with pytest.raises(GrammarError, match="end-of-text"):
        endless.compile("{}")


def test_each_start_is_a_place_of_its_own(grammars: Grammars, tiny: LoadedModel) -> None:
    grammar = grammars.compile(json.dumps(PERSON))
    assert grammars.compile(json.dumps(PERSON)) is grammar
    first, second = grammar.start(), grammar.start()
    for token in tiny.tokenizer.encode('{"name":"x'):
        assert not first.advance(token)
    assert (first.forbidden() != second.forbidden()).any()
    with pytest.raises(GrammarError):
        second.advance(tiny.tokenizer.encode("x")[0])
    assert not first.complete
