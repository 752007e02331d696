"""What a run's canaries found, as the bundle keeps it (``canaries.json``), for whoever shows it.

Must always hold: a bundle without canaries has no report; a file that cannot be read is a UserError that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.errors import UserError
from telemetry import names

FILE: Final = "canaries.json"
BROKEN: Final = "broken"
NUMERIC: Final = "numeric drift"
SAME: Final = "same"
#: How a golden was asked, which pairs are made of.
PLACES: Final = {
    "miss": "streamed, not in the prefix cache",
    "hit": "streamed, from the prefix cache",
    "plain": "not streamed",
}


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """verdict: same, numeric drift or broken.  findings: (verdict, kind, sentence).

    pairs: counts of same, numeric and broken by place (miss, hit, plain) and by replica.
    """

    verdict: str
    findings: tuple[tuple[str, str, str], ...]
    pairs: dict[str, dict[str, dict[str, int]]]

    def to_dict(self) -> dict[str, Any]:
        findings = [dict(zip(("verdict", "kind", "said"), one, strict=True)) for one in self.findings]
        return {"verdict": self.verdict, "findings": findings, "pairs": self.pairs}

    @property
    def counts(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The sides of the pairs: "place" or "replica", which one, and how many goldens were same, drifted, broken."""
        return [
            (kind, side, tuple(int(found.get(verdict, 0)) for verdict in (SAME, NUMERIC, BROKEN)))
            for kind in ("place", "replica")
            for side, found in (self.pairs.get(kind) or {}).items()
        ]

    @property
    def exit_code(self) -> int:
        """What it adds to the exit code of a run: broken answers break any SLO, a drift is a regression."""
        return {BROKEN: names.EXIT_SLO_BROKEN, NUMERIC: names.EXIT_REGRESSION}.get(self.verdict, names.EXIT_OK)

    @property
    def sentences(self) -> list[str]:
        """The findings that decided, then what the others could have seen."""
        deciding = [said for verdict, _, said in self.findings if verdict == self.verdict]
        return [*deciding, *(said for verdict, _, said in self.findings if verdict != self.verdict)]


def read(folder: Path) -> CanaryReport | None:
    """The report of a bundle's folder."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        findings = tuple((str(one["verdict"]), str(one["kind"]), str(one["said"])) for one in found["findings"])
        return CanaryReport(str(found["verdict"]), findings, dict(found["pairs"]))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(
            f"cannot be read: {problem}", where=str(path), remedy="restore it from a copy of the bundle, or delete it"
        ) from problem
