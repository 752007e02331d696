"""What may be asked: bodies of OpenAI requests, validated into a ``Call``.

What must hold: an option does what it says or is refused by name.  Options that this server does not have are
accepted only with the value that asks for nothing (``NEUTRAL``); everything else is a 400 whose ``param`` names it.
Nothing here knows the engine: lengths in tokens are checked where tokens are known.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

T = TypeVar("T")

INVALID: Final = "invalid_request_error"
MAX_STOPS: Final = 16
MAX_MESSAGES: Final = 4096
SHOWN: Final = 80  # characters of a wrong value that an error repeats
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
ROLES: Final = ("system", "developer", "user", "assistant")

#: Options of OpenAI and vLLM that are not supported, with the values that ask for nothing; null always does.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": (),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
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


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape.  retry_after: seconds, for 429 and 503."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the option."""
    return ApiError(400, message, param=param, code=code)


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request.  Exactly one of messages and prompt is set; max_tokens None fills up the context.

    add_special_tokens: put what the model wants before a plain text (its BOS) before the prompt; a chat template
    brings its own.
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


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A valid ``/tokenize`` request; exactly one of messages and prompt is set."""

    model: str | None
    messages: list[dict[str, str]] | None
    prompt: str | None
    add_generation_prompt: bool
    add_special_tokens: bool


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object.  Raises ApiError."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise bad(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad(f"The body must be a JSON object, not {_kind(body)}.", code="invalid_json")
    return body


def parse_chat(body: dict[str, Any]) -> Call:
    """A body of /v1/chat/completions.  Raises ApiError."""
    fields = Fields(body)
    model, messages = fields.need("model", _text), fields.need("messages", parse_messages)
    return _call(fields, chat=True, model=model, messages=messages)


def parse_completion(body: dict[str, Any]) -> Call:
    """A body of /v1/completions.  Raises ApiError."""
    fields = Fields(body)
    model, prompt = fields.need("model", _text), fields.need("prompt", _prompt)
    return _call(fields, chat=False, model=model, prompt=prompt)


def parse_tokenize(body: dict[str, Any]) -> TokenizeCall:
    """A body of /tokenize: a prompt or messages.  Raises ApiError."""
    fields = Fields(body)
    model = fields.take("model", None, _text)
    messages = fields.take("messages", None, parse_messages)
    prompt = fields.take("prompt", None, _text)
    if (messages is None) == (prompt is None):
        raise bad("Give either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
    call = TokenizeCall(
        model,
        messages,
        prompt,
        add_generation_prompt=fields.take("add_generation_prompt", True, _flag),
        add_special_tokens=prompt is not None and fields.take("add_special_tokens", True, _flag),
    )
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
    max_param = "max_tokens"
    max_tokens = fields.take("max_tokens", None, _integer(1))
    if chat:
        newer = fields.take("max_completion_tokens", None, _integer(1))
        if newer is not None:
            if max_tokens not in (None, newer):
                raise bad(
                    f"max_tokens is {max_tokens} and max_completion_tokens is {newer}: give one.",
                    "max_completion_tokens",
                )
            max_tokens, max_param = newer, "max_completion_tokens"
    min_tokens = fields.take("min_tokens", 0, _integer(0))
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad(f"min_tokens is {min_tokens}, above {max_param} {max_tokens}.", "min_tokens")
    stream = fields.take("stream", False, _flag)
    options = fields.take("stream_options", None, _stream_options)
    if options is not None and not stream:
        raise bad("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    fields.take("user", None, _text)
    top_k = fields.take("top_k", 0, _integer(-1))
    call = Call(
        chat=chat,
        model=model,
        messages=messages,
        prompt=prompt,
        max_tokens=max_tokens,
        max_tokens_param=max_param,
        min_tokens=min_tokens,
        temperature=fields.take("temperature", 1.0, _number(0, 2)),
        top_p=fields.take("top_p", 1.0, _number(0, 1, open_low=True)),
        top_k=max(top_k, 0),  # vLLM's -1 is "do not cut" too
        seed=fields.take("seed", None, _integer(SEED_MIN, SEED_MAX)),
        stop=fields.take("stop", (), _stops),
        stop_token_ids=fields.take("stop_token_ids", (), _token_ids),
        ignore_eos=fields.take("ignore_eos", False, _flag),
        add_special_tokens=not chat and fields.take("add_special_tokens", True, _flag),
        stream=stream,
        include_usage=bool(options),
    )
    fields.refuse_the_rest()
    return call


@dataclass(slots=True)
class Fields:
    """The options of a body; each is taken once, and what nobody took is refused."""

    body: dict[str, Any]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, default: T, check: Callable[[Any, str], Any]) -> Any:
        """The checked value, or ``default`` when the option is absent or null."""
        self.taken.add(name)
        value = self.body.get(name)
        return default if value is None else check(value, name)

    def need(self, name: str, check: Callable[[Any, str], T]) -> T:
        """The checked value; absent or null is an error."""
        self.taken.add(name)
        value = self.body.get(name)
        if value is None:
            raise bad(f"You must provide the parameter '{name}'.", name, "missing_required_parameter")
        return check(value, name)

    def refuse_the_rest(self) -> None:
        """Every option left must be a known one with a value that asks for nothing."""
        for name, value in self.body.items():
            if name in self.taken or (name in NEUTRAL and (value is None or _asks_nothing(value, NEUTRAL[name]))):
                continue
            if name not in NEUTRAL:
                name = name[:SHOWN]
                raise bad(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
            allowed = ", ".join(json.dumps(item) for item in (*NEUTRAL[name], None))
            raise bad(
                f"'{name}' is not supported by this server; the only accepted values are {allowed}.",
                name,
                "unsupported_parameter",
            )


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # bool is an int in Python: true must not pass for 1
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def parse_messages(value: Any, name: str = "messages") -> list[dict[str, str]]:
    """Messages as role and text; text parts are joined.  ``developer`` is today's word for ``system``."""
    if not isinstance(value, list) or not value:
        raise bad(f"'{name}' must be a non-empty list of messages.", name)
    if len(value) > MAX_MESSAGES:
        raise bad(f"'{name}' has {len(value)} messages; at most {MAX_MESSAGES} are allowed.", name)
    return [_message(item, f"{name}[{at}]") for at, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad(f"'{where}' must be an object, not {_kind(value)}.", where)
    role = value.get("role")
    if role not in ROLES:
        raise bad(f"'{where}.role' is {_show(role)}; it must be one of {', '.join(ROLES)}.", f"{where}.role")
    for key, item in value.items():
        if key not in ("role", "content") and item not in (None, [], ""):
            raise bad(f"'{where}.{key}' is not supported by this server.", f"{where}.{key}", "unsupported_parameter")
    content = value.get("content")
    if isinstance(content, list):
        text = "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif isinstance(content, str):
        text = _text(content, f"{where}.content")
    else:
        raise bad(
            f"'{where}.content' must be a string or a list of text parts, not {_kind(content)}.", f"{where}.content"
        )
    return {"role": "system" if role == "developer" else str(role), "content": text}


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise bad(f"'{where}' must be an object, not {_kind(value)}.", where)
    if value.get("type") != "text":
        raise bad(f"'{where}.type' is {_show(value.get('type'))}; only \"text\" is supported.", f"{where}.type")
    for key in value:
        if key not in ("type", "text"):
            raise bad(f"'{where}.{key}' is not supported by this server.", f"{where}.{key}", "unsupported_parameter")
    return _text(value.get("text"), f"{where}.text")


def _prompt(value: Any, name: str) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        return _text(value, name)
    if not isinstance(value, list):
        raise bad(f"'{name}' must be a string or a list of token ids, not {_kind(value)}.", name)
    if value and isinstance(value[0], str | list):
        raise bad(
            f"'{name}' holds {len(value)} prompts; this server takes one a request.", name, "unsupported_parameter"
        )
    return list(_token_ids(value, name))


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise bad(f"'{name}' must be a list of token ids, not {_kind(value)}.", name)
    for at, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise bad(f"'{name}[{at}]' must be a token id, not {_show(item)}.", name)
    return tuple(value)


def _stops(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise bad(f"'{name}' must be a string or a list of strings, not {_kind(value)}.", name)
    if len(stops) > MAX_STOPS:
        raise bad(f"'{name}' has {len(stops)} strings; at most {MAX_STOPS} are allowed.", name)
    for at, item in enumerate(stops):
        if not _text(item, f"{name}[{at}]"):
            raise bad(f"'{name}[{at}]' is empty: it would stop at once.", name)
    return tuple(stops)


def _stream_options(value: Any, name: str) -> bool:
    if not isinstance(value, dict):
        raise bad(f"'{name}' must be an object, not {_kind(value)}.", name)
    for key, item in value.items():
        if key != "include_usage" and item not in (None, False):
            raise bad(f"'{name}.{key}' is not supported by this server.", f"{name}.{key}", "unsupported_parameter")
    include = value.get("include_usage")
    return False if include is None else _flag(include, f"{name}.include_usage")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise bad(f"'{name}' must be a string, not {_kind(value)}.", name, "invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad(f"'{name}' is not valid Unicode: a lone surrogate at character {error.start}.", name) from error
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise bad(f"'{name}' must be true or false, not {_kind(value)}.", name, "invalid_type")
    return value


def _integer(low: int, high: int | None = None) -> Callable[[Any, str], int]:
    def check(value: Any, name: str) -> int:
        if type(value) is not int:
            raise bad(f"'{name}' must be an integer, not {_kind(value)}.", name, "invalid_type")
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise bad(f"'{name}' is {value}; it must be {bounds}.", name)
        return value

    return check


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[Any, str], float]:
    def check(value: Any, name: str) -> float:
        if type(value) not in (int, float):
            raise bad(f"'{name}' must be a number, not {_kind(value)}.", name, "invalid_type")
        if not low <= value <= high or (open_low and value == low):  # NaN fails too
            bounds = f"above {low} and at most {high}" if open_low else f"between {low} and {high}"
            raise bad(f"'{name}' is {value}; it must be {bounds}.", name)
        return float(value)

    return check


def _show(value: Any) -> str:
    return json.dumps(value)[:SHOWN]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
