"""Trials on disk, a line of JSON each, so that hours of trials go on where they were stopped.

Must always hold: a trial is taken over only where the same question was asked (the scenario as its file has it, way,
load, seed, pairs, requests) of the same code; a torn last line costs that trial alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from loadgen.lab.scenario import VIRTUAL, Scenario
from loadgen.lab.trial import Trial
from models.errors import UserError

FILE: Final = "trials.jsonl"  # in the folder of the trials' bundles
#: What a trial depends on: the engine, the generator, the diagnosis and what they stand on.
_FOLDERS: Final = ("engine", "loadgen", "models", "telemetry")
_SOURCES: Final = (".py", ".c", ".h")


class Kept:
    """The trials of one run; resume: those of earlier ones count as well.  Raises UserError for a file not to be
    written or read."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.path = folder / FILE
        self._known: dict[str, Trial] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            if resume:
                self._known = {line["question"]: Trial.of(line["trial"]) for line in _lines(self.path)}
        except OSError as error:
            raise UserError(error.strerror or "no file", where=str(self.path), remedy="name another --runs") from None

    def known(self, question: str) -> Trial | None:
        """The answer of an earlier run."""
        return self._known.get(question)

    def add(self, question: str, trial: Trial) -> None:
        """Keep it, at once: several runs may write into one file."""
        line = json.dumps({"question": question, "code": code(), "trial": trial.to_dict()}, default=str)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def question_of(scenario: Scenario, way: str, *, load: float, seed: int, pairs: int, requests: int, twin: bool) -> str:
    """What was asked, as one word."""
    played = scenario.virtual if way == VIRTUAL else scenario.real
    asked = [scenario.id, scenario.truth, scenario.then, played, way, load, seed, pairs, requests, twin]
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=12).hexdigest()


@cache
def code() -> str:
    """A digest of all sources that a trial depends on."""
    root = Path(__file__).parents[2]
    found = hashlib.blake2b(digest_size=12)
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SOURCES:
                found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # torn: it was killed while it wrote
        if isinstance(line, dict) and line.get("code") == code():
            yield line
