"""The words of a canary verdict, and what joins findings to one.

Must always hold: *broken* outranks *numeric drift* outranks *same*; a worse task score is no proof of a broken server
where the drift of probabilities says that the arithmetic is another one: fewer bits cost answers too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from loadgen.canaries.file import CanaryFile

SAME: Final = "same"
NUMERIC: Final = "numeric drift"
BROKEN: Final = "broken"
RANK: Final = (SAME, NUMERIC, BROKEN)
TOLERANCE_FACTOR: Final = 10  # of the recorded noise: what a log-probability may move
TOLERANCE_FLOOR: Final = 1e-3  # nats


@dataclass(frozen=True, slots=True)
class Finding:
    """verdict: one of RANK.  kind: what was looked at (golden, sampling, drift, task, probe, …) or what it points to.

    said: with its evidence, or its power.
    """

    verdict: str
    kind: str
    said: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def joined(findings: Iterable[Finding]) -> str:
    """The gravest."""
    return max((one.verdict for one in findings), key=RANK.index, default=SAME)


def tolerance(recorded: CanaryFile) -> float:
    """What a log-probability may move before it counts as changed, nats."""
    return max(TOLERANCE_FLOOR, TOLERANCE_FACTOR * recorded.noise)
