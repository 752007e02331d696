"""What may be asked: bodies of OpenAI requests, validated into a ``Call``.

What must hold: an option does what it says or is refused by name.  Options that this server does not have are
accepted only with the value that asks for nothing (``NEUTRAL``); everything else is a 400 whose ``param`` names it.
Nothing here knows the engine: lengths in tokens are checked where tokens are known.  ``openapi`` describes the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from engine.server.fields import (
    SHOWN,
    ApiError,
    Fields,
    bad,
    flag,
    integer,
    kind,
    known_keys,
    number,
    parse_json,
    show,
    stops,
    text,
    token_ids,
)
from telemetry.names import DEADLINE_HEADER

__all__ = ["NEUTRAL", "ApiError", "Call", "bad", "parse_chat", "parse_completion", "parse_deadline", "parse_json"]

MAX_MESSAGES: Final = 4096
MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1
DEADLINE_MAX_MS: Final = 24 * 3600 * 1000
ROLES: Final = ("system", "developer", "user", "assistant")
FORMATS: Final = ("text", "json_object", "json_schema")
ANY_OBJECT: Final = '{"type": "object"}'  # json_object as a schema

#: Options of OpenAI and vLLM that are not supported, with the values that ask for nothing; null always does.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "length_penalty": (1,),
    "echo": (False,),
    "suffix": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "add_special_tokens": (False,),
    "return_token_strs": (False,),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request.  Exactly one of messages and prompt is set; max_tokens None fills up the context.

    priority: lower is sooner (vLLM's); deadline_ms: after the head of the request, for the whole answer.
    add_special_tokens: put what the model wants before a plain text (its BOS) before the prompt; a chat template
    brings its own.  logprobs: how many likeliest tokens to tell beside each token, None: nothing.  schema: the JSON
    schema (as text) that the answer must follow.  max_tokens 0 is possible with echo alone.  cache_salt: prompts share
    what is cached only with those of the same salt (vLLM's).
    """

    chat: bool
    model: str
    messages: list[dict[str, str]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    add_special_tokens: bool = False
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    response_format: str = "text"
    schema: str | None = None
    priority: int = 0
    deadline_ms: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A valid ``/tokenize`` request; exactly one of messages and prompt is set."""

    model: str | None
    messages: list[dict[str, str]] | None
    prompt: str | None
    add_generation_prompt: bool
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    """A valid ``/detokenize`` request."""

    model: str | None
    tokens: tuple[int, ...]


def parse_deadline(header: str) -> int:
    """The deadline header.  Raises ApiError."""
    if not (header.isascii() and header.isdigit() and 1 <= int(header[:12]) <= DEADLINE_MAX_MS):
        message = f"{DEADLINE_HEADER} is {show(header)}; it must be an integer between 1 and {DEADLINE_MAX_MS}."
        raise bad(message, DEADLINE_HEADER)
    return int(header[:12])


def parse_chat(body: dict[str, Any]) -> Call:
    """A body of /v1/chat/completions.  Raises ApiError."""
    fields = Fields(body, NEUTRAL)
    model, messages = fields.need("model", text), fields.need("messages", parse_messages)
    return _call(fields, chat=True, model=model, messages=messages)


def parse_completion(body: dict[str, Any]) -> Call:
    """A body of /v1/completions.  Raises ApiError."""
    fields = Fields(body, NEUTRAL)
    model, prompt = fields.need("model", text), fields.need("prompt", _prompt)
    return _call(fields, chat=False, model=model, prompt=prompt)


def parse_tokenize(body: dict[str, Any]) -> TokenizeCall:
    """A body of /tokenize: a prompt or messages.  Raises ApiError."""
    fields = Fields(body, {"return_token_strs": (False,)})
    model = fields.take("model", None, text)
    messages = fields.take("messages", None, parse_messages)
    prompt = fields.take("prompt", None, text)
    if (messages is None) == (prompt is None):
        raise bad("Give either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
    special = fields.take("add_special_tokens", prompt is not None, flag)
    if messages is not None and special:
        raise bad("'add_special_tokens' is for a prompt: a chat template brings its own.", "add_special_tokens")
    generate = fields.take("add_generation_prompt", True, flag)
    fields.refuse_the_rest()
    return TokenizeCall(model, messages, prompt, generate, special)


def parse_detokenize(body: dict[str, Any]) -> DetokenizeCall:
    """A body of /detokenize.  Raises ApiError."""
    fields = Fields(body, {})
    call = DetokenizeCall(fields.take("model", None, text), fields.need("tokens", token_ids))
    fields.refuse_the_rest()
    return call


def _call(
    fields: Fields,
    *,
    chat: bool,
    model: str,
    messages: list[dict[str, str]] | None = None,
    prompt: str | list[int] | None = None,
) -> Call:
    echo = not chat and fields.take("echo", False, flag)
    max_tokens, max_param = _max_tokens(fields, chat=chat, low=0 if echo else 1)
    min_tokens = fields.take("min_tokens", 0, integer(0))
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad(f"min_tokens is {show(min_tokens)}, above {max_param} {max_tokens}.", "min_tokens")
    stream = fields.take("stream", False, flag)
    options = fields.take("stream_options", None, _stream_options)
    if options is not None and not stream:
        raise bad("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    fields.take("user", None, text)
    n = fields.take("n", 1, integer(1, MAX_CHOICES))
    if fields.take("best_of", n, integer(1)) != n:
        raise bad("'best_of' other than 'n' is not supported by this server.", "best_of", "unsupported_parameter")
    response_format, schema = fields.take("response_format", ("text", None), _response_format)
    call = Call(
        chat=chat,
        model=model,
        messages=messages,
        prompt=prompt,
        max_tokens=max_tokens,
        max_tokens_param=max_param,
        min_tokens=min_tokens,
        temperature=fields.take("temperature", 1.0, number(0, 2)),
        top_p=fields.take("top_p", 1.0, number(0, 1, open_low=True)),
        top_k=max(fields.take("top_k", 0, integer(-1)), 0),  # vLLM's -1 is "do not cut" too
        seed=fields.take("seed", None, integer(SEED_MIN, SEED_MAX)),
        stop=fields.take("stop", (), stops),
        stop_token_ids=fields.take("stop_token_ids", (), token_ids),
        ignore_eos=fields.take("ignore_eos", False, flag),
        add_special_tokens=not chat and fields.take("add_special_tokens", True, flag),
        stream=stream,
        include_usage=bool(options),
        n=n,
        min_p=fields.take("min_p", 0.0, number(0, 1)),
        frequency_penalty=fields.take("frequency_penalty", 0.0, number(-2, 2)),
        presence_penalty=fields.take("presence_penalty", 0.0, number(-2, 2)),
        repetition_penalty=fields.take("repetition_penalty", 1.0, number(0.01, 100)),
        logit_bias=fields.take("logit_bias", (), _logit_bias),
        logprobs=_logprobs(fields, chat=chat),
        prompt_logprobs=fields.take("prompt_logprobs", None, integer(0, MAX_LOGPROBS)),
        echo=echo,
        response_format=response_format,
        schema=schema,
        priority=fields.take("priority", 0, integer(PRIORITY_MIN, PRIORITY_MAX)),
        deadline_ms=fields.take("deadline_ms", None, integer(1, DEADLINE_MAX_MS)),
        cache_salt=fields.take("cache_salt", None, _salt),
    )
    fields.refuse_the_rest()
    _fit_together(call)
    return call


def _salt(value: Any, name: str) -> str:
    salt = text(value, name)
    if not salt:
        raise bad(f"'{name}' is empty; leave it out, or give some text.", name)
    return salt


def _max_tokens(fields: Fields, *, chat: bool, low: int) -> tuple[int | None, str]:
    """The limit and the name under which it came."""
    limit: int | None = fields.take("max_tokens", None, integer(low))
    newer: int | None = fields.take("max_completion_tokens", None, integer(low)) if chat else None
    if newer is None:
        return limit, "max_tokens"
    if limit not in (None, newer):
        raise bad(
            f"max_tokens is {show(limit)} and max_completion_tokens is {show(newer)}: give one.",
            "max_completion_tokens",
        )
    return newer, "max_completion_tokens"


def _logprobs(fields: Fields, *, chat: bool) -> int | None:
    if not chat:
        value: int | None = fields.take("logprobs", None, _count_or_false)
        return value
    asked = fields.take("logprobs", False, flag)
    top: int = fields.take("top_logprobs", 0, integer(0, MAX_LOGPROBS))
    if top and not asked:
        raise bad("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    return top if asked else None


def _count_or_false(value: Any, name: str) -> int | None:
    return None if value is False else integer(0, MAX_LOGPROBS)(value, name)


def _fit_together(call: Call) -> None:
    """Refuse what contradicts itself."""
    if call.prompt_logprobs is not None and call.stream:
        raise bad("'prompt_logprobs' is not available when 'stream' is true.", "prompt_logprobs")
    if call.schema is None:
        return
    for name, asked in (("ignore_eos", call.ignore_eos), ("min_tokens", call.min_tokens > 0)):
        if asked:
            message = f"'{name}' cannot be combined with 'response_format': a JSON value ends where it is complete."
            raise bad(message, name)


def _logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise bad(f"'{name}' must be an object of token ids and biases, not {kind(value)}.", name, "invalid_type")
    if len(value) > MAX_BIASES:
        raise bad(f"'{name}' has {len(value)} tokens; at most {MAX_BIASES} are allowed.", name)
    found: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise bad(f"'{name}' has the key {show(key)}, which is no token id.", name)
        found[int(key)] = number(-100, 100)(bias, f"{name}.{key}")
    return tuple(found.items())


def _response_format(value: Any, name: str) -> tuple[str, str | None]:
    """The format and the schema (as text) that stands for it."""
    asked = known_keys(value, name, ("type", "json_schema"))
    form = asked.get("type")
    if form not in FORMATS:
        raise bad(f"'{name}.type' is {show(form)}; it must be one of {', '.join(FORMATS)}.", f"{name}.type")
    wanted = asked.get("json_schema")
    if form != "json_schema":
        if wanted is not None:
            raise bad(f"'{name}.json_schema' is for the type json_schema.", f"{name}.json_schema")
        return form, ANY_OBJECT if form == "json_object" else None
    where = f"{name}.json_schema"
    outer = known_keys(wanted, where, ("name", "description", "schema", "strict"))
    text(outer.get("name"), f"{where}.name")
    if outer.get("description") is not None:
        text(outer["description"], f"{where}.description")
    if outer.get("strict") is not None:
        flag(outer["strict"], f"{where}.strict")  # the answer follows the schema either way
    schema = outer.get("schema")
    if not isinstance(schema, dict):
        raise bad(f"'{where}.schema' must be a JSON schema object, not {kind(schema)}.", f"{where}.schema")
    try:
        return form, json.dumps(schema)
    except RecursionError as error:
        raise bad(f"'{where}.schema' is nested too deeply.", f"{where}.schema") from error


def parse_messages(value: Any, name: str = "messages") -> list[dict[str, str]]:
    """Messages as role and text; text parts are joined.  ``developer`` is today's word for ``system``."""
    if not isinstance(value, list) or not value:
        raise bad(f"'{name}' must be a non-empty list of messages.", name)
    if len(value) > MAX_MESSAGES:
        raise bad(f"'{name}' has {len(value)} messages; at most {MAX_MESSAGES} are allowed.", name)
    return [_message(item, f"{name}[{at}]") for at, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad(f"'{where}' must be an object, not {kind(value)}.", where)
    role = value.get("role")
    if role not in ROLES:
        raise bad(f"'{where}.role' is {show(role)}; it must be one of {', '.join(ROLES)}.", f"{where}.role")
    for key, item in value.items():
        if key not in ("role", "content") and item not in (None, [], ""):
            key = key[:SHOWN]
            raise bad(f"'{where}.{key}' is not supported by this server.", f"{where}.{key}", "unsupported_parameter")
    content = value.get("content")
    if isinstance(content, list):
        joined = "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif isinstance(content, str):
        joined = text(content, f"{where}.content")
    else:
        raise bad(
            f"'{where}.content' must be a string or a list of text parts, not {kind(content)}.", f"{where}.content"
        )
    return {"role": "system" if role == "developer" else str(role), "content": joined}


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise bad(f"'{where}' must be an object, not {kind(value)}.", where)
    if value.get("type") != "text":
        raise bad(f"'{where}.type' is {show(value.get('type'))}; only \"text\" is supported.", f"{where}.type")
    for key in value:
        if key not in ("type", "text"):
            raise bad(f"'{where}.{key}' is not supported by this server.", f"{where}.{key}", "unsupported_parameter")
    return text(value.get("text"), f"{where}.text")


def _prompt(value: Any, name: str) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        return text(value, name)
    if not isinstance(value, list):
        raise bad(f"'{name}' must be a string or a list of token ids, not {kind(value)}.", name)
    if value and isinstance(value[0], str | list):
        raise bad(
            f"'{name}' holds {len(value)} prompts; this server takes one a request.", name, "unsupported_parameter"
        )
    return list(token_ids(value, name))


def _stream_options(value: Any, name: str) -> bool:
    if not isinstance(value, dict):
        raise bad(f"'{name}' must be an object, not {kind(value)}.", name)
    for key, item in value.items():
        if key != "include_usage" and item not in (None, False):
            raise bad(f"'{name}.{key}' is not supported by this server.", f"{name}.{key}", "unsupported_parameter")
    include = value.get("include_usage")
    return False if include is None else flag(include, f"{name}.include_usage")
