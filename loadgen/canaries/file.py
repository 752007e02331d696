"""The canary file: what was recorded on a trusted server, as JSON that can be read, kept and compared.

Owns the format and its version.  Must always hold: a file names the model, the set of questions and the prompts that it
was made with; one of another version, or whose questions have changed since, is refused with the remedy to record
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadgen.canaries.goldens import Golden, Left
from models.errors import UserError
from telemetry.drift import Drift, Position
from telemetry.parts import write_atomically
from telemetry.question_sets import SETS
from telemetry.questions import digest

FORMAT_VERSION: Final = 1
MAX_BYTES: Final = 64 << 20
_RECORD: Final = "record it again: tailspan canaries record"


@dataclass(frozen=True, slots=True)
class CanaryFile:
    """goldens, left: admitted and refused prompts.  noise: nats between baseline runs.  reference: None without W2.

    spread: drifts between recordings of the reference on the trusted server.  questions: name and digest of the set;
    scores: right or wrong by question id.
    """

    model: str
    target: str
    recorded_unix_ns: int
    runs: int
    noise: float
    goldens: tuple[Golden, ...]
    left: tuple[Left, ...]
    reference: tuple[Position, ...] | None
    spread: tuple[Drift, ...]
    drift_refused: str | None
    questions: str
    questions_sha256: str
    scores: Mapping[str, bool]

    def write(self, path: Path) -> None:
        """Write it, all or nothing.  UserError where it cannot be written."""
        reference = self.reference
        content = {
            "tailspan_canaries": FORMAT_VERSION,
            "model": self.model,
            "target": self.target,
            "recorded_unix_ns": self.recorded_unix_ns,
            "runs": self.runs,
            "noise": self.noise,
            "goldens": [one.to_dict() for one in self.goldens],
            "left": [one.to_dict() for one in self.left],
            "reference": None if reference is None else [{"top": dict(p.top), "actual": p.actual} for p in reference],
            "spread": [one.to_dict() for one in self.spread],
            "drift_refused": self.drift_refused,
            "questions": self.questions,
            "questions_sha256": self.questions_sha256,
            "scores": dict(self.scores),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        except OSError as problem:
            raise UserError(
                f"cannot be written: {problem.strerror}", where=str(path), remedy="give another file by --out"
            ) from problem

    @classmethod
    def read(cls, path: Path) -> CanaryFile:
        """UserError naming the file and what is wrong with it."""
        try:
            if path.stat().st_size > MAX_BYTES:
                raise UserError("larger than 64 MiB: not a canary file", where=str(path), remedy=_RECORD)
            found = json.loads(path.read_bytes())
        except OSError as problem:
            raise UserError(f"cannot be read: {problem.strerror}", where=str(path), remedy=_RECORD) from problem
        except ValueError as problem:
            raise UserError(f"not JSON: {problem}", where=str(path), remedy=_RECORD) from problem
        version = found.get("tailspan_canaries") if isinstance(found, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(f"canary file version {version!r}, not {FORMAT_VERSION}", where=str(path), remedy=_RECORD)
        try:
            made = cls(
                model=str(found["model"]),
                target=str(found["target"]),
                recorded_unix_ns=int(found["recorded_unix_ns"]),
                runs=int(found["runs"]),
                noise=float(found["noise"]),
                goldens=tuple(_golden(one) for one in found["goldens"]),
                left=tuple(Left(**one) for one in found["left"]),
                reference=_reference(found["reference"]),
                spread=tuple(Drift(**one) for one in found["spread"]),
                drift_refused=found["drift_refused"],
                questions=str(found["questions"]),
                questions_sha256=str(found["questions_sha256"]),
                scores={str(key): bool(value) for key, value in found["scores"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise UserError(f"not a canary file: {problem!r}", where=str(path), remedy=_RECORD) from problem
        if made.questions not in SETS or digest(SETS[made.questions]()) != made.questions_sha256:
            raise UserError(
                f"its questions {made.questions!r} are not those of this version", where=str(path), remedy=_RECORD
            )
        return made


def _golden(found: Mapping[str, Any]) -> Golden:
    made = Golden(
        id=str(found["id"]),
        prompt=str(found["prompt"]),
        tokens=tuple(map(str, found["tokens"])),
        margins=tuple(map(float, found["margins"])),
        logprobs=tuple(map(float, found["logprobs"])),
        prompt_tokens=found["prompt_tokens"],
        ended=bool(found.get("ended", False)),
    )
    if not len(made.tokens) == len(made.margins) == len(made.logprobs) > 0:
        raise ValueError(f"golden {made.id!r} has {len(made.tokens)} tokens, {len(made.margins)} margins")
    return made


def _reference(found: Any) -> tuple[Position, ...] | None:
    if found is None:
        return None
    return tuple(Position({str(k): float(v) for k, v in p["top"].items()}, float(p["actual"])) for p in found)
