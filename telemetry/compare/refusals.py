"""What the data cannot tell, each with the figure that says so and what would be needed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

TOO_FEW_PAIRS: Final = "too_few_pairs"
UNEQUAL_SIDES: Final = "unequal_sides"
NOT_VALID: Final = "not_valid"
OTHER_LOAD: Final = "other_load"
TOO_FEW_REQUESTS: Final = "too_few_requests"
SAME_RUN: Final = "same_run"


@dataclass(frozen=True, slots=True)
class Refusal:
    """kind: one of the above.  message: with its numbers.  remedy: what would be needed.

    whole: nothing may be said at all; else of some figures.  usage: the wrong runs were named (exit code 4), as
    opposed to runs that are not to be trusted (3).
    """

    kind: str
    message: str
    remedy: str
    whole: bool = True
    usage: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
