"""The description and the server agree: the same paths, the same options, the same values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from engine.server import openai_api
from engine.server.app import build_app
from engine.server.fields import Fields
from engine.server.openapi import DESCRIPTION, describe
from engine.server.service import Limits, Service
from tests.engine.serving import client, serving

HELLO = [{"role": "user", "content": "hello"}]
SCHEMAS = DESCRIPTION["components"]["schemas"]
ENDPOINTS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "ChatRequest": (openai_api.parse_chat, {"model": "m", "messages": HELLO}),
    "CompletionRequest": (openai_api.parse_completion, {"model": "m", "prompt": "x"}),
    "TokenizeRequest": (openai_api.parse_tokenize, {"prompt": "x"}),
    "DetokenizeRequest": (openai_api.parse_detokenize, {"tokens": []}),
}
VALUES: list[Any] = [
    *(None, True, False, -101, -3, -2, -1, -0.5, 0, 0.001, 0.5, 1, 1.5, 2, 2.5, 5, 20, 21, 101, 128, 129),
    *(2**63, -(2**63) - 1, "", "x", "auto", "default", "none", "required"),
    *([], [""], ["x"], ["x"] * 17, [1, 2], [-1], [1.5], [[1]], [[]], [["x"]], ["a", "b"], [None], ["text"], ["audio"]),
    *({}, {"x": 1}, {"5": 1}, {"5": 101}, {"5": None}, {"5" * 12: 1}),
    *({"include_usage": True}, {"include_usage": 1}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    HELLO,
    [{"role": "user"}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}],
    [{"role": "user", "content": "x", "name": "bob"}],
    *({"type": "text"}, {"type": "json_object"}, {"type": "json_object", "json_schema": None}, {"type": "xml"}),
    *({"type": "json_object", "json_schema": {}}, {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"name": "x"}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True, "description": "y"}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "more": 1}},
]
#: What an option needs beside it, so that it is judged by itself.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_accepted_option_is_described_and_the_other_way_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Fields] = []

    class Watched(Fields):
        def refuse_the_rest(self) -> None:
            seen.append(self)
            super().refuse_the_rest()

    monkeypatch.setattr(openai_api, "Fields", Watched)
    parse, body = ENDPOINTS[name]
    parse(body)
    accepted = seen[0].taken | set(seen[0].neutral)
    assert accepted == set(SCHEMAS[name]["properties"])
    assert SCHEMAS[name]["additionalProperties"] is False


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_value_is_described_exactly_when_it_is_accepted(name: str) -> None:
    parse, body = ENDPOINTS[name]
    schema = {**SCHEMAS[name], "components": DESCRIPTION["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    for option in SCHEMAS[name]["properties"]:
        for value in VALUES:
            asked = {**body, **BESIDE.get(option, {}), option: value}
            if (name, option) == ("TokenizeRequest", "messages"):
                asked.pop("prompt")
            if option in ("messages", "prompt") and name == "TokenizeRequest" and value is None:
                continue  # either of the two: told in words
            if option == "best_of" and value != 1:
                continue  # the same as n: told in words
            if option == "max_tokens" and value == 0:
                asked["echo"] = True
                if name == "ChatRequest":
                    asked.pop("echo")
            try:
                parse(asked)
                accepted = True
            except openai_api.ApiError:
                accepted = False
            if (name, option) == ("CompletionRequest", "prompt") and value in ("", [], [""], [[]]):
                accepted = False  # refused when tokenised
            described = validator.is_valid(asked)
            assert described == accepted, (option, value, accepted)


def test_every_path_is_described_and_the_other_way_round() -> None:
    async def go() -> None:
        app = build_app(Service(asyncio.get_running_loop(), "r", Limits(), None))
        routes = {
            (route.resource.canonical, route.method.lower())
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        described = {(path, method) for path, item in DESCRIPTION["paths"].items() for method in item}
        assert described <= routes
        assert {item for item in routes if not item[0].startswith("/debug/")} <= described

    asyncio.run(go())


def test_it_is_served_and_every_reference_leads_somewhere() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            served = await (await http.get("/openapi.json")).json()
            assert served == describe("tiny", 512)
            assert served["components"]["schemas"]["ModelName"] == {"enum": ["tiny"]}
            assert served["paths"] == DESCRIPTION["paths"]

    asyncio.run(go())

    def references(of: Any) -> list[str]:
        if isinstance(of, dict):
            own = [of["$ref"]] if isinstance(of.get("$ref"), str) else []
            return own + [found for value in of.values() for found in references(value)]
        return [found for item in of for found in references(item)] if isinstance(of, list) else []

    for reference in references(DESCRIPTION):
        assert reference.removeprefix("#/components/schemas/") in SCHEMAS
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
