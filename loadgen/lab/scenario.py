"""A scenario: a fault, the loads under which it is played, and the verdict that is right.  One YAML file each.

    id: S9
    title: a second process burns the same cores
    expect: {label: late, cause: engine_speed}     # then: the smaller one of two faults at once
    trap: ""                                  # what it is easily taken for
    loads: [0.5, 0.8]                         # shares of the server's capacity
    virtual: {change: engine_speed, size: [1.25, 2.0]}      # in virtual time (loadgen.lab.changes)
    real: {faults: [{name: slow_step, size: [15, 60]}]}     # on a server process (loadgen.lab.processes)

A number that is a list of two is drawn between them, anew for each seed.  docs/lab.md has what was adjusted after a
first look.  Must always hold: an unknown key, class or cause is refused with its place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from models.errors import UserError
from models.yaml_text import yaml_errors
from telemetry import names
from telemetry.explain.causes import CAUSES, CLIENT, NO_CHANGE

FOLDER: Final = Path(__file__).parent / "scenarios"
INVALID: Final = names.INVALID
NONE: Final = "none"
LABELS: Final = (names.LATE, names.DROPPED, names.WRONG, INVALID, NONE)
_KEYS: Final = ("id", "title", "expect", "trap", "loads", "virtual", "real", "note")
_VIRTUAL: Final = ("change", "size", "also")
_REAL: Final = ("faults", "healthy", "serve", "load", "wire", "patience", "canaries", "exact_output")
VIRTUAL: Final = "virtual"
SERVER: Final = "simulated"
REAL: Final = "real"
WAYS: Final = (VIRTUAL, SERVER, REAL)


@dataclass(frozen=True, slots=True)
class Scenario:
    """label, cause: the right verdict; then: the smaller cause, where two were played at once.

    virtual, real: what is done, as the file has it; empty: not that way.
    """

    id: str
    title: str
    label: str
    cause: str
    trap: str = ""
    loads: tuple[float, ...] = (0.5, 0.8)
    virtual: Mapping[str, Any] = field(default_factory=dict)
    real: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    then: str = ""

    @property
    def ways(self) -> tuple[str, ...]:
        """How it can be played."""
        found = [VIRTUAL] if self.virtual else []
        if self.real and not self.real.get("canaries"):
            found.append(SERVER)  # a simulated model has no answers that a canary could check
        return (*found, REAL) if self.real else tuple(found)

    @property
    def truth(self) -> tuple[str, str]:
        return self.label, self.cause

    def to_dict(self) -> dict[str, Any]:
        """For people and programs."""
        return {
            "id": self.id,
            "title": self.title,
            "label": self.label,
            "cause": self.cause,
            "then": self.then,
            "trap": self.trap,
            "loads": list(self.loads),
            "ways": list(self.ways),
            "note": self.note,
        }


def read(path: Path) -> Scenario:
    """Raises UserError that names the file and the key."""
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=where, remedy="tailspan lab list") from None
    with yaml_errors(where):
        found = yaml.safe_load(text)
    _known(found, _KEYS, where)
    for key in ("id", "title", "expect"):
        if key not in found:
            raise UserError(f"{key} is missing", where=where, remedy="see the scenarios that ship")
    expect = found["expect"]
    _known(expect, ("label", "cause", "then"), f"{where}: expect")
    if expect.get("label") not in LABELS or not isinstance(expect.get("cause"), str):
        raise UserError(f"expect is {expect!r}", where=where, remedy=f"give a label of {', '.join(LABELS)} and a cause")
    loads = found.get("loads", [0.5, 0.8])
    if not isinstance(loads, list) or not loads or not all(_number(one) and 0 < one <= 4 for one in loads):
        raise UserError(f"loads are {loads!r}", where=where, remedy="give shares of the capacity, such as [0.5, 0.8]")
    virtual, real = found.get("virtual") or {}, found.get("real") or {}
    _known(virtual, _VIRTUAL, f"{where}: virtual")
    _known(real, _REAL, f"{where}: real")
    if not virtual and not real:
        raise UserError("neither virtual nor real says what is done", where=where)
    for played in (virtual, *(virtual.get("also") or ())) if virtual else ():
        if not isinstance(played, dict) or not isinstance(played.get("change"), str):
            raise UserError(f"no change is named in {played!r}", where=f"{where}: virtual", remedy="see docs/lab.md")
    check_verdict(expect["label"], expect["cause"], where=f"{where}: expect")
    if expect.get("then") is not None:
        check_verdict(expect["label"], expect["then"], where=f"{where}: expect: then")
    return Scenario(
        id=str(found["id"]),
        title=str(found["title"]),
        label=expect["label"],
        cause=expect["cause"],
        trap=str(found.get("trap") or ""),
        loads=tuple(float(one) for one in loads),
        virtual=virtual,
        real=real,
        note=str(found.get("note") or ""),
        then=str(expect.get("then") or ""),
    )


def causes_of(label: str) -> tuple[str, ...]:
    """The causes that a class can have."""
    alone = {INVALID: (CLIENT,), NONE: (NO_CHANGE,)}
    return alone.get(label) or tuple(one.name for one in CAUSES.values() if one.label == label)


def check_verdict(label: str, cause: str, *, where: str) -> None:
    """Raises UserError for a class, or a cause of it, that no explanation can give; names those that can be."""
    if label not in LABELS:
        raise UserError(f"no class is called {label!r}", where=where, remedy=f"one of {', '.join(LABELS)}")
    if cause not in causes_of(label):
        raise UserError(
            f"no cause of {label} is called {cause!r}", where=where, remedy=f"one of {', '.join(causes_of(label))}"
        )


def shipped() -> list[Scenario]:
    """All that ship, in the order of their numbers."""
    return sorted((read(path) for path in FOLDER.glob("*.yaml")), key=lambda one: _order(one.id))


def find(names_: list[str], folder: Path | None = None) -> list[Scenario]:
    """Scenarios by id, or by path of a file.  Raises UserError for one that is not known."""
    there = {one.id.lower(): one for one in shipped()}
    found = []
    for name in names_:
        path = Path(name) if folder is None else folder / name
        if name.lower() in there:
            found.append(there[name.lower()])
        elif path.suffix in (".yaml", ".yml"):
            found.append(read(path))
        else:
            raise UserError(f"no scenario {name!r}", remedy=f"one of {', '.join(one.id for one in there.values())}")
    return found


def drawn(value: Any, draw: random.Random) -> Any:
    """A value with every list of two numbers in it replaced by a number between them (evenly in the logarithm)."""
    if isinstance(value, Mapping):
        return {key: drawn(item, draw) for key, item in value.items()}
    if isinstance(value, list) and len(value) == 2 and all(_number(one) for one in value):
        low, high = value
        if low > 0:
            found = math.exp(draw.uniform(math.log(low), math.log(high)))
        else:
            found = draw.uniform(low, high)
        return round(found) if all(type(one) is int for one in value) else found
    if isinstance(value, list):
        return [drawn(item, draw) for item in value]
    return value


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _order(name: str) -> tuple[int, str]:
    digits = "".join(one for one in name if one.isdigit())
    return (int(digits) if digits and name.startswith("S") else 1000, name)


def _known(found: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(found, dict):
        raise UserError("a block of 'key: value' lines is needed", where=where)
    unknown = [key for key in found if key not in keys]
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}", where=where, remedy=f"known here: {', '.join(keys)}")
