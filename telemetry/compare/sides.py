"""Which bundles a reference on the command line stands for: a run, several, a baseline, or a group of paired replays.

    ID            one run (id, unique start of it, path, latest)
    ID,ID,ID      several, in order of the repeats
    NAME          a baseline (tailspan runs baseline)
    GROUP         both sides of `tailspan run --repeats K --against URL`;  GROUP:A or GROUP:B: one of them

Owns the files ``groups/ID.json`` beside the bundles: {"id", "a": [run ids], "b": [run ids]}, in order of the pairs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from models.errors import UserError
from telemetry.baseline import resolve_baseline
from telemetry.bundle import Bundle, runs_root
from telemetry.parts import write_atomically

FOLDER: Final = "groups"
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Sides = tuple[list[Bundle], list[Bundle]]


def write_group(group: str, a: Sequence[str], b: Sequence[str], root: Path | None = None) -> Path:
    """Keep which runs belong together; pair i is a[i], b[i].  Written anew after every run, whole or not at all."""
    path = _file(group, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"id": group, "a": list(a), "b": list(b), "set_unix_ns": time.time_ns()}, indent=2)
    write_atomically(path, text.encode() + b"\n")
    return path


def list_groups(root: Path | None = None) -> list[str]:
    """Ids of the groups under a root, newest first."""
    folder = (root if root is not None else runs_root()) / FOLDER
    return [path.stem for path in sorted(folder.glob("*.json"), key=lambda one: one.stem, reverse=True)]


def resolve_sides(
    a: str, b: str | None = None, root: Path | None = None, *, command: str = "tailspan compare"
) -> Sides:
    """Both sides of a comparison.  UserError where a reference stands for nothing, or b is missing.

    command: what the references were given to, for the error.
    """
    if b is None:
        if _is_group(a, root):
            return read_group(a, root)
        resolve_side(a, root, command=command)
        known = ", ".join(list_groups(root)[:3]) or "none"
        raise UserError(
            f"{a!r} is one side, and no group of paired replays; groups: {known}",
            where=command,
            remedy="name two sides, or a group that `tailspan run --repeats K --against URL` left",
        )
    return resolve_side(a, root, command=command), resolve_side(b, root, command=command)


def resolve_side(reference: str, root: Path | None = None, *, command: str = "tailspan compare") -> list[Bundle]:
    """One side."""
    if "," in reference:
        return [Bundle.open(one.strip(), root) for one in reference.split(",") if one.strip()]
    group, colon, side = reference.rpartition(":")
    if colon and side in ("A", "B") and _is_group(group, root):
        return read_group(group, root)[0 if side == "A" else 1]
    if _is_group(reference, root):
        raise UserError(
            f"group {reference} has two sides", where=command,
            remedy=f"name it alone, or one side of it: {reference}:A",
        )  # fmt: skip
    return resolve_baseline(reference, root, command)


def read_group(group: str, root: Path | None = None) -> Sides:
    """The complete pairs of a group: a run that is missing on one side is left out with its partner."""
    path = _file(group, root)
    try:
        found = json.loads(path.read_bytes())
        sides = [[str(one) for one in found[side]] for side in ("a", "b")]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"cannot be read: {problem}", where=str(path), remedy="run the pairs again") from problem
    pairs = min(len(side) for side in sides)
    if not pairs:
        raise UserError(f"group {group} has no complete pair", where=str(path), remedy="run the pairs again")
    a, b = ([Bundle.open(one, root) for one in side[:pairs]] for side in sides)
    return a, b


def _is_group(reference: str, root: Path | None) -> bool:
    return bool(_ID.fullmatch(reference)) and _file(reference, root).is_file()


def _file(group: str, root: Path | None) -> Path:
    if not _ID.fullmatch(group):
        raise UserError(f"{group!r} is not a name for a group", where="group", remedy="letters, digits, '.', '_', '-'")
    return (root if root is not None else runs_root()) / FOLDER / f"{group}.json"
