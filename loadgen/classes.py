"""Traffic classes: which share of the load is of which kind, and what its prompts are.

A class is judged by the rules of its name in the SLO.  Kinds: `plain` prose of the trace's lengths, which shares
prefixes as the trace says; `documents`, questions on a shared policy with an answer that can be checked; `file`, the
user's own prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from loadgen.transforms import DEFAULT_CLASS, Mix
from models.errors import UserError

PLAIN: Final = "plain"
DOCUMENTS: Final = "documents"
FILE: Final = "file"
KINDS: Final = (PLAIN, DOCUMENTS, FILE)


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """share: of the sessions, or of the requests where there are none.  file: of the kind "file"."""

    name: str = DEFAULT_CLASS
    share: float = 1.0
    prompts: str = PLAIN
    file: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def mix(self) -> Mix:
        return Mix(self.name, self.share)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> TrafficClass:
        """From a mapping of a plan.  Raises UserError."""
        made = cls(**{str(key): value for key, value in values.items()})
        remedy = "write - {name: chat, share: 0.8, prompts: plain}"
        if not isinstance(made.name, str) or not made.name or isinstance(made.share, bool):
            raise UserError(f"{dict(values)} is no class", where=where, remedy=remedy)
        if not isinstance(made.share, int | float) or not 0 <= made.share <= 1:
            raise UserError(
                f"the share {made.share!r} of {made.name} is not between 0 and 1", where=where, remedy=remedy
            )
        if made.prompts not in KINDS:
            raise UserError(f"{made.prompts!r} is no kind of prompts", where=where, remedy=f"choose {', '.join(KINDS)}")
        if (made.prompts == FILE) != (made.file is not None):
            raise UserError(
                f"class {made.name}: file and prompts: file go together", where=where, remedy="name the JSONL file"
            )
        if made.file is not None:
            path = Path(made.file).expanduser()
            if not path.is_file():
                raise UserError(f"there is no file {made.file}", where=where, remedy="give a JSONL file of prompts")
            return cls(made.name, made.share, made.prompts, str(path.resolve()))
        return made
