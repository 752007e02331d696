"""The HTTP API as OpenAPI 3.1, written by hand and served at /openapi.json.

What must hold: it says what ``openai_api`` accepts, option by option and bound by bound; a test compares the two.  An
option that may be left out may be null as well.  Under ``/debug`` only the two windows that are always there are told.
Bounds that depend on the model are filled in when there is one.
"""

from __future__ import annotations

from typing import Any, Final

from engine.server.fields import MAX_STOPS
from engine.server.openai_api import (
    DEADLINE_MAX_MS,
    FORMATS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    NEUTRAL,
    PRIORITY_MAX,
    PRIORITY_MIN,
    ROLES,
    SEED_MAX,
    SEED_MIN,
)

Schema = dict[str, Any]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _object(properties: Schema, required: tuple[str, ...] = (), *, closed: bool = True) -> Schema:
    found: Schema = {"type": "object", "properties": properties, "required": list(required)}
    return {**found, "additionalProperties": False} if closed else found


_STRING: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_TOKENS: Final[Schema] = {"type": "array", "items": _ref("TokenId")}
_SOME_TOKENS: Final[Schema] = {**_TOKENS, "minItems": 1}
_MAYBE_TEXT: Final[Schema] = {"type": ["string", "null"]}

_TEXT_PART: Final = _object({"type": {"const": "text"}, "text": _STRING}, ("type", "text"))
_MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [_STRING, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["role", "content"],
    "additionalProperties": {"enum": [None, [], ""]},  # what an earlier answer carries and says nothing
}
_MESSAGES: Final[Schema] = {"type": "array", "items": _ref("Message"), "minItems": 1, "maxItems": MAX_MESSAGES}
_PROMPT: Final[Schema] = {
    "anyOf": [
        _TEXT,
        _SOME_TOKENS,
        {"type": "array", "items": {"anyOf": [_TEXT, _SOME_TOKENS]}, "minItems": 1, "maxItems": 1},
    ]
}
_JSON_SCHEMA: Final = _object(
    {"name": _STRING, "description": _MAYBE_TEXT, "schema": {"type": "object"}, "strict": _FLAG}, ("name", "schema")
)
_RESPONSE_FORMAT: Final = _or_null(
    _object({"type": {"enum": list(FORMATS[:2])}, "json_schema": {"type": "null"}}, ("type",)),
    _object({"type": {"const": FORMATS[2]}, "json_schema": _JSON_SCHEMA}, ("type", "json_schema")),
)

#: Options of both endpoints that generate.
_COMMON: Final[Schema] = {
    "model": _ref("ModelName"),
    "max_tokens": {"type": ["integer", "null"], "minimum": 1, "description": "Missing: what the context has room for."},
    "min_tokens": {"type": ["integer", "null"], "minimum": 0},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_CHOICES},
    "best_of": {"type": ["integer", "null"], "minimum": 1, "description": "Only the same as n."},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": -1, "description": "0 and -1 do not cut."},
    "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": ["number", "null"], "minimum": 0.01, "maximum": 100},
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,11}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
        "description": "Token id -> added to its logit.",
    },
    "seed": {"type": ["integer", "null"], "minimum": SEED_MIN, "maximum": SEED_MAX},
    "stop": _or_null(_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}),
    "stop_token_ids": {**_TOKENS, "type": ["array", "null"]},
    "ignore_eos": _FLAG,
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG},
        "additionalProperties": {"enum": [None, False]},
    },
    "prompt_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS},
    "response_format": _RESPONSE_FORMAT,
    "user": _MAYBE_TEXT,
    "priority": {
        "type": ["integer", "null"],
        "minimum": PRIORITY_MIN,
        "maximum": PRIORITY_MAX,
        "description": "Lower is sooner, where the server's policy is priority.",
    },
    "deadline_ms": {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": DEADLINE_MAX_MS,
        "description": "When the whole answer is wanted, after the head of the request; for the policy deadline.",
    },
    "cache_salt": {
        "type": ["string", "null"],
        "minLength": 1,
        "description": "Prompts share what is cached only with those of the same salt.",
    },
}
_NEUTRAL: Final[Schema] = {
    name: {"enum": [*values, None], "description": "Not supported; these values ask for nothing."}
    for name, values in NEUTRAL.items()
}
_CHAT: Final[Schema] = {
    **_NEUTRAL,
    **_COMMON,
    "messages": _MESSAGES,
    "max_completion_tokens": {
        "type": ["integer", "null"],
        "minimum": 1,
        "description": "The newer name of max_tokens.",
    },
    "logprobs": _FLAG,
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS},
}
_COMPLETION: Final[Schema] = {
    **_NEUTRAL,
    **_COMMON,
    "prompt": _PROMPT,
    "max_tokens": {"type": ["integer", "null"], "minimum": 0, "description": "0 is possible with echo."},
    "logprobs": _or_null({"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}, {"const": False}),
    "echo": _FLAG,
    "add_special_tokens": _FLAG,
}
_TOKENIZE: Final = _object(
    {
        "model": _or_null(_ref("ModelName")),
        "prompt": _MAYBE_TEXT,
        "messages": _or_null(_MESSAGES),
        "add_generation_prompt": _FLAG,
        "add_special_tokens": _FLAG,
        "return_token_strs": {"enum": [False, None]},
    }
)
_TOKENIZE["description"] = "Either prompt or messages."
_DETOKENIZE: Final = _object({"model": _or_null(_ref("ModelName")), "tokens": _TOKENS}, ("tokens",))

_USAGE: Final = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}, ("cached_tokens",)),
    },
    ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
)
_CHOICE: Final[Schema] = {
    "index": _COUNT,
    "finish_reason": {"enum": ["stop", "length"]},
    "logprobs": {"type": ["object", "null"]},
}
_CHAT_MESSAGE: Final = _object(
    {"role": {"const": "assistant"}, "content": _STRING, "refusal": {"type": "null"}}, ("role", "content", "refusal")
)
_PROMPT_LOGPROBS: Final[Schema] = {"type": "array", "items": {"type": ["object", "null"]}}


def _answer(kind: str, choice: Schema, more: Schema) -> Schema:
    head: Schema = {"id": _STRING, "object": {"const": kind}, "created": _COUNT, "model": _STRING}
    head["system_fingerprint"] = _STRING
    choices = {"type": "array", "items": choice, "minItems": 1}
    required = (*head, "choices", "usage")
    account = {"type": "object", "description": "The phases, with the request header x-tailspan-phases: 1."}
    return _object({**head, "choices": choices, "usage": _USAGE, "tailspan": account, **more}, required)


_SIMULATED: Final[Schema] = {
    "simulated": {**_STRING, "description": "Only where nothing is computed: what is simulated."}
}
_MODEL: Final = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _STRING,
        "max_model_len": _COUNT,
        **_SIMULATED,
    },
    ("id", "object", "created", "owned_by", "max_model_len"),
)
_ERROR_FIELDS: Final[Schema] = {"message": _STRING, "type": _STRING, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT}

_SCHEMAS: Final[Schema] = {
    "ModelName": {"type": "string", "description": "As in /v1/models."},
    "TokenId": _COUNT,
    "Message": _MESSAGE,
    "ChatRequest": _object(_CHAT, ("model", "messages")),
    "CompletionRequest": _object(_COMPLETION, ("model", "prompt")),
    "TokenizeRequest": _TOKENIZE,
    "DetokenizeRequest": _DETOKENIZE,
    "ChatAnswer": _answer(
        "chat.completion",
        _object({**_CHOICE, "message": _CHAT_MESSAGE}, (*_CHOICE, "message")),
        {"prompt_logprobs": _PROMPT_LOGPROBS},
    ),
    "CompletionAnswer": _answer(
        "text_completion",
        _object({**_CHOICE, "text": _STRING, "prompt_logprobs": _PROMPT_LOGPROBS}, (*_CHOICE, "text")),
        {},
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _TOKENS}, ("count", "max_model_len", "tokens")
    ),
    "Text": _object({"prompt": _STRING}, ("prompt",)),
    "Model": _MODEL,
    "Models": _object(
        {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}, ("object", "data")
    ),
    "State": _object({"status": _STRING, "state": _STRING, "model": _STRING, **_SIMULATED}, ("status",)),
    "Invariants": _object({"ok": {"type": "boolean"}}, ("ok",), closed=False),
    "Error": _object(
        {"error": _object(_ERROR_FIELDS, tuple(_ERROR_FIELDS)), "tailspan": {"type": "object"}}, ("error",)
    ),
}

_WRONG: Final = {
    "400": "An option is wrong or not supported; param names it.",
    "401": "The API key is wrong or missing.",
    "404": "No such model.",
    "405": "Another method.",
    "413": "The body is above the server's limit.",
    "429": "Too many wait; Retry-After says when to come again.",
    "500": "The engine failed.",
    "503": "The server loads, drains or takes no more; Retry-After says when to come again.",
}


_EVENT: Final = _object({"event": _STRING, "data": _STRING}, ("data",), closed=False)
_EVENT["description"] = "With 'stream': chunks, perhaps the event tailspan.phases, then [DONE]."


def _responses(schema: str, *wrong: str, streamed: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": _ref(schema)}}
    if streamed:
        content["text/event-stream"] = {"schema": _EVENT}
    found: Schema = {"200": {"description": "The answer.", "content": content}}
    for status in wrong:
        error = {"application/json": {"schema": _ref("Error")}}
        found[status] = {"description": _WRONG[status], "content": error}
    return found


def _post(summary: str, request: str, answer: str, *wrong: str, streamed: bool = False) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    responses = _responses(answer, "400", "401", "404", "413", *wrong, "503", streamed=streamed)
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _get(summary: str, responses: Schema, *parameters: Schema, open_to_all: bool = False) -> Schema:
    found: Schema = {"summary": summary, "parameters": list(parameters), "responses": responses}
    return {"get": {**found, "security": []} if open_to_all else found}


def _raw(media: str) -> Schema:
    return {"200": {"description": "The figures.", "content": {media: {"schema": {}}}}}


_MODEL_NAME: Final[Schema] = {"name": "model", "in": "path", "required": True, "schema": _ref("ModelName")}
_AFTER: Final[Schema] = {"name": "after", "in": "query", "required": False, "schema": {"type": "integer"}}
_NEWEST: Final[Schema] = {
    "name": "newest", "in": "query", "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 2147483647},
}  # fmt: skip

DESCRIPTION: Final[Schema] = {
    "openapi": "3.1.0",
    "info": {
        "title": "tailspan engine",
        "version": "1",
        "description": "OpenAI's API as far as this server has it. What it has not is refused by name, never ignored.",
    },
    "security": [{"key": []}, {}],
    "paths": {
        "/v1/chat/completions": _post("Chat", "ChatRequest", "ChatAnswer", "429", "500", streamed=True),
        "/v1/completions": _post(
            "Continue a text", "CompletionRequest", "CompletionAnswer", "429", "500", streamed=True
        ),
        "/v1/models": _get("The one model", _responses("Models", "401", "503")),
        "/v1/models/{model}": _get("One model", _responses("Model", "401", "404", "503"), _MODEL_NAME),
        "/tokenize": _post("Text or messages to token ids", "TokenizeRequest", "Tokens"),
        "/detokenize": _post("Token ids to text", "DetokenizeRequest", "Text"),
        "/health": _get("As /health/ready", _responses("State", "503"), open_to_all=True),
        "/health/live": _get("Does the process run?", _responses("State"), open_to_all=True),
        "/health/ready": _get("Are requests taken?", _responses("State", "503"), open_to_all=True),
        "/metrics": _get(
            "Prometheus metrics", {**_raw("text/plain"), "503": _responses("State", "503")["503"]}, open_to_all=True
        ),
        "/openapi.json": _get(
            "This description", {**_raw("application/json"), "503": _responses("State", "503")["503"]}, open_to_all=True
        ),
        "/debug/steps": _get(
            "The step log, an Arrow stream",
            {
                **_raw("application/vnd.apache.arrow.stream"),
                **{s: _responses("State", s)[s] for s in ("400", "401", "503")},
            },
            _AFTER,
            _NEWEST,
        ),
        "/debug/invariants": _get("Broken laws", _responses("Invariants", "401", "503")),
    },
    "components": {
        "schemas": _SCHEMAS,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Only with --api-key-env."}},
    },
}


def describe(model: str, vocab: int) -> Schema:
    """The description of a server with this model: its name, and token ids below ``vocab``."""
    schemas = {
        **_SCHEMAS,
        "ModelName": {"enum": [model]},
        "TokenId": {"type": "integer", "minimum": 0, "maximum": vocab - 1},
    }
    return {**DESCRIPTION, "components": {**DESCRIPTION["components"], "schemas": schemas}}
