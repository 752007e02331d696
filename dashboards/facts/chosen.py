"""Which requests of a run a page looks at: a window of time, of latency, an outcome, a phase, a class, a replica."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from dashboards.source import Source

#: From the intended send to the first token, or to the end of the answer (of the wait, where none came).
MEASURES: Final = {"e2e": "e2e_s", "ttft": "ttft_s"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Conditions that all hold; None: no condition.  Times in seconds; ``low_s``, ``high_s`` bound ``measure``."""

    label: str | None = None
    phase: str | None = None
    traffic_class: str | None = None
    replica: str | None = None
    from_s: float | None = None
    to_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    measure: str = "e2e"

    @property
    def sql(self) -> str:
        """A WHERE condition over the view ``rows``; its parameters are ``values``."""
        latency = MEASURES[self.measure]
        conditions = {
            "label": "label = $label",
            "phase": "phase = $phase",
            "traffic_class": '"class" = $traffic_class',
            "replica": "replica = $replica",
            "from_s": "intended_s >= $from_s",
            "to_s": "intended_s < $to_s",
            "low_s": f"{latency} >= $low_s",
            "high_s": f"{latency} < $high_s",
        }
        held = [condition for name, condition in conditions.items() if getattr(self, name) is not None]
        return " AND ".join(held) or "true"

    @property
    def values(self) -> dict[str, Any]:
        """The parameters of ``sql``."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "measure"}

    @property
    def empty(self) -> bool:
        """Whether it lets every request through."""
        return all(getattr(self, field.name) is None for field in fields(self) if field.name != "measure")


def kinds(run: Source, column: str, most: int = 40) -> list[str]:
    """The values of ``class``, ``replica``, ``label`` or ``phase`` that occur, most frequent first."""
    if column not in ("class", "replica", "label", "phase"):
        raise ValueError(f"no kind of request: {column!r}")
    found = run.ask(
        f"""SELECT "{column}" AS kind, count(*) AS n FROM rows WHERE "{column}" IS NOT NULL
            GROUP BY kind ORDER BY n DESC, kind LIMIT $most""",
        most=most,
    )
    return [row["kind"] for row in found]


def counted(run: Source, chosen: Chosen) -> dict[str, int]:
    """Requests per label among the chosen."""
    sql = f"SELECT label, count(*) AS n FROM rows WHERE {chosen.sql} GROUP BY label"
    return {row["label"]: row["n"] for row in run.ask(sql, **chosen.values)}
