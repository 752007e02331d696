"""The folder of a search: ``capacity.json`` with its points, and its runs beside it.

Must always hold: the file on disk is a complete one at any moment and holds every finished point, so that a search that
was interrupted goes on with the next one; it goes on only with the question it was begun with.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loadgen.capacity.point import Point
from models.errors import UserError
from telemetry import names
from telemetry.bundle import runs_root
from telemetry.parts import write_atomically

STATE_FILE: Final = "capacity.json"
VERSION: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(slots=True)
class Group:
    """question: what is searched, as plain JSON.  begun: the first rate and scales.  answer: once there is one."""

    path: Path
    command: str
    question: dict[str, Any]
    begun: dict[str, float] | None = None
    points: list[Point] = field(default_factory=list)
    answer: dict[str, Any] | None = None

    @classmethod
    def open(cls, name: str | None, root: str | None, question: Mapping[str, Any], command: str) -> Group:
        """The group of this name, begun or gone on with; nothing is written before ``save``.

        Raises UserError where it was begun with another question.
        """
        name = name or time.strftime("capacity-%Y%m%d-%H%M%S")
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{name!r} is no name of a folder", where="--group", remedy="use letters, digits, dots and dashes"
            )
        path = (Path(root) if root is not None else runs_root()) / name
        asked: dict[str, Any] = json.loads(json.dumps(question))
        if (path / STATE_FILE).exists():
            return cls._resumed(path, asked, command)
        return cls(path, command, asked)

    @classmethod
    def _resumed(cls, path: Path, asked: dict[str, Any], command: str) -> Group:
        file = path / STATE_FILE
        try:
            kept = json.loads(file.read_bytes())
            found = cls(
                path,
                command,
                kept["question"],
                kept["begun"],
                [Point.of_dict(one) for one in kept["points"]],
                kept["answer"],
            )
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise UserError(
                f"the state of this search cannot be read ({problem})",
                where=str(file),
                remedy="give another --group",
            ) from None
        while found.points and found.points[-1].verdict == names.INCOMPLETE:
            found.points.pop()  # what was cut is made again
        differs = [key for key in sorted({*asked, *found.question}) if asked.get(key) != found.question.get(key)]
        if differs:
            key = differs[0]
            raise UserError(
                f"this search was begun with {key} {found.question.get(key)!r}, not {asked.get(key)!r}",
                where=str(file),
                remedy="give the same options as at its beginning, or another --group",
            )
        return found

    def save(self) -> None:
        """Write the state.  Raises UserError where there can be no such folder."""
        state = {
            "version": VERSION,
            "command": self.command,
            "question": self.question,
            "begun": self.begun,
            "points": [point.to_dict() for point in self.points],
            "answer": self.answer,
        }
        text = json.dumps(state, indent=2, ensure_ascii=False, allow_nan=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(
                f"cannot make the folder of the search: {problem.strerror}",
                where=str(self.path),
                remedy="give another --runs or --group",
            ) from None
        write_atomically(self.path / STATE_FILE, text.encode() + b"\n")
