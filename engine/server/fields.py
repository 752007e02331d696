"""Options of a request body, taken one by one: each is checked, and what nobody took is refused by name.

Knows JSON and OpenAI's error shape; which options there are is ``openai_api``'s to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

T = TypeVar("T")

INVALID: Final = "invalid_request_error"
SHOWN: Final = 80  # characters of a wrong value that an error repeats
MAX_STOPS: Final = 16


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


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object.  Raises ApiError."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise bad(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad(f"The body must be a JSON object, not {kind(body)}.", code="invalid_json")
    return body


@dataclass(slots=True)
class Fields:
    """The options of a body; each is taken once, and what nobody took is refused.

    neutral: options that are not supported, with the values that ask for nothing; null always does.
    """

    body: dict[str, Any]
    neutral: Mapping[str, tuple[Any, ...]]
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
            if name in self.taken or (
                name in self.neutral and (value is None or _asks_nothing(value, self.neutral[name]))
            ):
                continue
            if name not in self.neutral:
                name = name[:SHOWN]
                raise bad(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
            allowed = ", ".join(json.dumps(item) for item in (*self.neutral[name], None))
            raise bad(
                f"'{name}' is not supported by this server; the only accepted values are {allowed}.",
                name,
                "unsupported_parameter",
            )


def known_keys(value: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """An object with no other keys than ``keys``."""
    if not isinstance(value, dict):
        raise bad(f"'{name}' must be an object, not {kind(value)}.", name, "invalid_type")
    for key in value:
        if key not in keys:
            where = f"{name}.{key[:SHOWN]}"
            raise bad(f"'{where}' is not supported by this server.", where, "unsupported_parameter")
    return value


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # bool is an int in Python: true must not pass for 1
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids; whether the vocabulary has them is checked where it is known."""
    if not isinstance(value, list):
        raise bad(f"'{name}' must be a list of token ids, not {kind(value)}.", name)
    for at, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise bad(f"'{name}[{at}]' must be a token id, not {show(item)}.", name)
    return tuple(value)


def stops(value: Any, name: str) -> tuple[str, ...]:
    """One stop string or several."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise bad(f"'{name}' must be a string or a list of strings, not {kind(value)}.", name)
    if len(found) > MAX_STOPS:
        raise bad(f"'{name}' has {len(found)} strings; at most {MAX_STOPS} are allowed.", name)
    for at, item in enumerate(found):
        if not text(item, f"{name}[{at}]"):
            raise bad(f"'{name}[{at}]' is empty: it would stop at once.", name)
    return tuple(found)


def text(value: Any, name: str) -> str:
    """A string that can be encoded."""
    if not isinstance(value, str):
        raise bad(f"'{name}' must be a string, not {kind(value)}.", name, "invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad(f"'{name}' is not valid Unicode: a lone surrogate at character {error.start}.", name) from error
    return value


def flag(value: Any, name: str) -> bool:
    """true or false, nothing that stands for them."""
    if not isinstance(value, bool):
        raise bad(f"'{name}' must be true or false, not {kind(value)}.", name, "invalid_type")
    return value


def integer(low: int, high: int | None = None) -> Callable[[Any, str], int]:
    """A check for whole numbers in low..high; 1.0 and true are none."""

    def check(value: Any, name: str) -> int:
        if type(value) is not int:
            raise bad(f"'{name}' must be an integer, not {kind(value)}.", name, "invalid_type")
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise bad(f"'{name}' is {show(value)}; it must be {bounds}.", name)
        return value

    return check


def number(low: float, high: float, *, open_low: bool = False) -> Callable[[Any, str], float]:
    """A check for numbers in low..high (open_low: above low)."""

    def check(value: Any, name: str) -> float:
        if type(value) not in (int, float):
            raise bad(f"'{name}' must be a number, not {kind(value)}.", name, "invalid_type")
        if not low <= value <= high or (open_low and value == low):  # NaN fails too
            bounds = f"above {low} and at most {high}" if open_low else f"between {low} and {high}"
            raise bad(f"'{name}' is {show(value)}; it must be {bounds}.", name)
        return float(value)

    return check


def show(value: Any) -> str:
    """A wrong value as an error may repeat it."""
    return json.dumps(value)[:SHOWN]


def kind(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
