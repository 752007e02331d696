"""Which requests of a run a page looks at: a window of time, of latency, an outcome, a phase, a class, a replica."""

from __future__ import annotations

import math
from collections.abc import Mapping
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

    @property
    def address(self) -> dict[str, object]:
        """Its conditions as the parameters of a link; ``of_address`` reads them."""
        found = {key: getattr(self, name) for name, key in _KEYS.items()}
        return {key: value for key, value in found.items() if value is not None and (key, value) != ("by", "e2e")}

    @classmethod
    def of_address(cls, parameters: Mapping[str, str]) -> Chosen:
        """What the parameters of an address choose; one that makes no sense is no condition."""
        said: dict[str, Any] = {name: parameters.get(key) or None for name, key in _KEYS.items()}
        for name in ("from_s", "to_s", "low_s", "high_s"):
            said[name] = _finite(said[name])
        if said["measure"] not in MEASURES:
            del said["measure"]
        return cls(**said)


#: Condition -> its key in an address, that of the widget which asks for it.
_KEYS: Final = {
    "label": "label", "phase": "phase", "traffic_class": "class", "replica": "replica", "from_s": "from", "to_s": "to",
    "low_s": "low", "high_s": "high", "measure": "by",
}  # fmt: skip


def _finite(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def indices(run: Source, chosen: Chosen) -> list[int]:
    """The chosen requests."""
    rows = run.ask(f'SELECT "index" FROM rows WHERE {chosen.sql} ORDER BY "index"', **chosen.values)
    return [int(row["index"]) for row in rows]


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
