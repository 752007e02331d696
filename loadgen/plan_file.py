"""The YAML plan of a load test: target, trace, transforms, classes, patience, sending, repeats, in one file.

    target: http://127.0.0.1:8000            # or a list
    trace: azure-2023-conv                   # or {name: …, format: …, columns: {time: …}, time_unit: …}
    slo: chat
    transforms: {window: [0, 60], rate_scale: 0.5, length_scale: 0.1}
    classes: [{name: chat, share: 0.8}, {name: help, share: 0.2, prompts: documents}]
    patience: {first_token_s: 5, retries: 2, backoff_s: 0.5, budget: 0.1}
    send: {workers: 2, api: chat, api_key_env: OPENAI_API_KEY}
    repeats: 3

Owns the file's keys and which option each is.  Must always hold: an unknown or repeated key is refused with its line
and the keys known there; a value of the wrong kind names its line; what the command line says besides wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from loadgen.arrivals import ArrivalModel
from loadgen.classes import TrafficClass
from loadgen.patience import Patience
from loadgen.traces.registry import checked
from loadgen.traces.trace import Choices
from models.errors import UserError, did_you_mean
from models.yaml_text import compose

PRESETS: Final = Path(__file__).parent / "plans"
MAX_BYTES: Final = 1 << 20
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be.  name: in errors; take: the value as the option holds it, or ValueError."""

    name: str
    take: Callable[[Any], Any]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return float(value)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _texts(value: Any) -> str:
    """One or several targets, as the option takes them."""
    return ",".join(_text(one) for one in (value if isinstance(value, list) else [value]))


def _headers(value: Any) -> list[str]:
    if not isinstance(value, dict):
        raise ValueError
    return [f"{name}: {item}" for name, item in value.items()]


NUMBER: Final = Kind("a number", _number)
WHOLE: Final = Kind("a whole number", _whole)
FLAG: Final = Kind("true or false", _flag)
TEXT: Final = Kind("a text", _text)
#: key -> (option of loadgen.options, what it must be)
TOP: Final = {
    "target": ("targets", Kind("an address or a list of them", _texts)),
    "slo": ("slo", TEXT),
    "model": ("model", TEXT),
    "served_model": ("served_model", TEXT),
    "name": ("name", TEXT),
    "seed": ("seed", WHOLE),
    "salt": ("salt", TEXT),
    "keep_text": ("keep_text", TEXT),
    "repeats": ("repeats", WHOLE),
    "canaries": ("canaries", TEXT),
    "canary_share": ("canary_share", NUMBER),
}
SECTIONS: Final = ("description", "trace", "transforms", "classes", "patience", "send")
TRANSFORMS: Final = {
    "start": ("start_s", NUMBER),
    "duration": ("duration_s", NUMBER),
    "speed": ("speed", NUMBER),
    "rate_scale": ("rate_scale", NUMBER),
    "length_scale": ("length_scale", NUMBER),
    "fit": ("fit", NUMBER),
    "over_limit": ("over_limit", TEXT),
    "dequantise": ("dequantise_s", NUMBER),
    "loop": ("loop", WHOLE),
    "share_prefixes": ("share_prefixes", FLAG),
}
SEND: Final = {
    "api": ("api", TEXT),
    "workers": ("workers", WHOLE),
    "max_concurrency": ("max_concurrency", WHOLE),
    "connect_timeout": ("connect_timeout_s", NUMBER),
    "first_token_timeout": ("first_token_timeout_s", NUMBER),
    "total_timeout": ("total_timeout_s", NUMBER),
    "exact_output": ("exact_output", FLAG),
    "temperature": ("temperature", NUMBER),
    "headers": ("headers", Kind("a block of 'name: value' lines", _headers)),
    "api_key_env": ("api_key_env", TEXT),
    "proxy": ("proxy", TEXT),
    "ca_file": ("ca_file", TEXT),
    "verify_tls": ("verify_tls", FLAG),
}
TRACE: Final = ("name", "format", "columns", "time_unit", "block_size", "failures", "restart", "seed")


def presets() -> dict[str, Path]:
    """The plans that ship with tailspan, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def read(reference: str) -> Values:
    """The options that a plan file (or a shipped plan, by its name) sets.  Raises UserError naming file and line."""
    path = Path(reference).expanduser()
    if not path.is_file() and reference in presets():
        path = presets()[reference]
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError("larger than 1 MiB: not a plan", where=reference, remedy="give a plan in YAML")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise UserError(
            f"the plan cannot be read: {reason}",
            where=reference,
            remedy=did_you_mean(reference, presets())
            + f"give a YAML file, or one of the plans that ship: {', '.join(presets())}",
        ) from None
    return parse(text, str(path))


def parse(text: str, where: str) -> Values:
    """The options that the text of a plan sets.  Raises UserError."""
    root = compose(text, where)
    if root is None:
        raise UserError("empty", where=where, remedy=f"begin with a plan that ships: {', '.join(presets())}")
    return _Reader(where).options(root)


class _Reader:
    """Turns YAML nodes into options; holds the file's name for its errors."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._constructor = yaml.constructor.SafeConstructor()

    def options(self, root: yaml.Node) -> Values:
        top = self._mapping(root, (*TOP, *SECTIONS))
        found = {option: self._value(top[key], kind) for key, (option, kind) in TOP.items() if key in top}
        if "trace" in top:
            found |= self._trace(top["trace"])
        if "transforms" in top:
            found |= self._transforms(top["transforms"])
        if "send" in top:
            section = self._mapping(top["send"], tuple(SEND))
            found |= {SEND[key][0]: self._value(node, SEND[key][1]) for key, node in section.items()}
        if "patience" in top:
            self._mapping(top["patience"], tuple(Patience.__slots__))
            found["patience"] = Patience.of(self._plain(top["patience"]), self._line(top["patience"]))
        if "classes" in top:
            found["classes"] = self._classes(top["classes"])
        return found

    def _trace(self, node: yaml.Node) -> Values:
        if isinstance(node, yaml.ScalarNode):
            return {"trace": self._value(node, TEXT)}
        section = self._mapping(node, TRACE)
        if "name" not in section:
            raise self._error(node, "the trace has no name", "write name: and a known trace or a file")
        if "columns" in section:
            self._pairs(section["columns"])
        given = {key: self._plain(value) for key, value in section.items() if key != "name"}
        try:
            choices = checked(Choices(**given))
        except UserError as problem:
            raise UserError(problem.message, where=self._line(node), remedy=problem.remedy) from None
        except (TypeError, AttributeError):
            raise self._error(node, "a value of the wrong kind", f"keys: {', '.join(TRACE)}") from None
        return {"trace": self._value(section["name"], TEXT), "choices": choices}

    def _transforms(self, node: yaml.Node) -> Values:
        section = self._mapping(node, (*TRANSFORMS, "window", "arrivals"))
        found = {
            TRANSFORMS[key][0]: self._value(section[key], TRANSFORMS[key][1]) for key in TRANSFORMS if key in section
        }
        if "window" in section:
            window = self._plain(section["window"])
            ends = window if isinstance(window, list) and len(window) == 2 else [0, 0]
            if not all(type(end) in (int, float) for end in ends) or not 0 <= ends[0] < ends[1]:
                raise self._error(section["window"], f"{window!r} is no window", "write window: [start, end], seconds")
            if {"start", "duration"} & set(section):
                raise self._error(section["window"], "a window beside start or duration", "use one or the other")
            found |= {"start_s": float(ends[0]), "duration_s": float(ends[1] - ends[0])}
        if "arrivals" in section:
            found["arrivals"] = ArrivalModel.parse(self._plain(section["arrivals"]), self._line(section["arrivals"]))
        return found

    def _classes(self, node: yaml.Node) -> tuple[TrafficClass, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self._error(node, "a list of classes is needed here", "write - {name: chat, share: 1.0}")
        for item in node.value:
            self._mapping(item, tuple(TrafficClass.__slots__))
        return tuple(TrafficClass.of(self._plain(item), self._line(item)) for item in node.value)

    # -- nodes --

    def _value(self, node: yaml.Node, kind: Kind) -> Any:
        value = self._plain(node)
        try:
            return kind.take(value)
        except ValueError:
            raise self._error(node, f"{value!r} is not {kind.name}", f"give {kind.name}") from None

    def _plain(self, node: yaml.Node) -> Any:
        try:
            return self._constructor.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as problem:
            raise self._error(node, f"not understood: {problem}", "write plain values") from None

    def _pairs(self, node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, "a block of 'key: value' lines is needed here", "see the plans that ship")
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                raise self._error(key, "a key that is no text, or stands here twice", "keep one of them")
            seen.add(str(key.value))
        return list(node.value)

    def _mapping(self, node: yaml.Node, known: tuple[str, ...]) -> Mapping[str, yaml.Node]:
        pairs = self._pairs(node)
        for key, _ in pairs:
            if key.value not in known:
                raise self._error(
                    key,
                    f"unknown key {key.value!r}",
                    did_you_mean(key.value, known) + f"known here: {', '.join(known)}",
                )
        return {str(key.value): value for key, value in pairs}

    def _line(self, node: yaml.Node) -> str:
        return f"{self._where}:{node.start_mark.line + 1}"

    def _error(self, node: yaml.Node, message: str, remedy: str) -> UserError:
        return UserError(message, where=self._line(node), remedy=remedy)
