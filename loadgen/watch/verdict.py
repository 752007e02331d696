"""Does the SLO hold now?  The last minute's requests judged as a run's are, and a breach called when it is no chance.

A breach begins when two looks in a row are broken and have no more than a few requests in common, and ends with the
first look that holds.  Memory: rows of the look, at most MOST.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from telemetry import outcomes
from telemetry.bundle import COMPLETE
from telemetry.judged import Judged, decide, judge_objectives
from telemetry.objective import BROKEN, HELD, UNDECIDED
from telemetry.schema import REQUESTS
from telemetry.slo import Slo

MOST: Final = 50_000  # rows of a look that are held in memory; of more the newest


@dataclass(frozen=True, slots=True)
class Look:
    """The SLO over the last ``seconds`` before ``at_s`` (on the watch's clock)."""

    at_s: float
    seconds: float
    requests: int
    decision: str
    objectives: tuple[Judged, ...]
    labels: dict[str, int]


class Recent:
    """The rows that ended within the last ``seconds``.  ``add`` and ``look`` on one thread."""

    def __init__(self, slo: Slo, seconds: float) -> None:
        self._slo, self.seconds = slo, seconds
        self._rows: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MOST)

    def add(self, at_s: float, rows: list[dict[str, Any]]) -> None:
        """Rows that came at ``at_s``."""
        self._rows.extend((at_s, row) for row in rows)

    def count_since(self, at_s: float) -> int:
        """Rows that came from then on, of those that are still held."""
        return sum(came >= at_s for came, _ in self._rows)

    def look(self, now_s: float) -> Look:
        """Judge what is there."""
        while self._rows and self._rows[0][0] < now_s - self.seconds:
            self._rows.popleft()
        n = len(self._rows)
        if not n:
            return Look(now_s, self.seconds, 0, UNDECIDED, (), {})
        numbered = [{**row, "index": at} for at, (_, row) in enumerate(self._rows)]
        table = pa.Table.from_pylist(numbered, schema=REQUESTS)
        verdicts = outcomes.judge(table, self._slo, n, COMPLETE)
        objectives = judge_objectives(self._slo, table, verdicts)
        return Look(now_s, self.seconds, n, decide(self._slo, objectives), objectives, dict(outcomes.counts(verdicts)))


@dataclass(slots=True)
class Breach:
    """from_s: when the first broken look began.  seen_s: when it was called.  until_s: its end, None: it goes on."""

    from_s: float
    seen_s: float
    reason: str
    until_s: float | None = None


class Breaches:
    """Calls breaches from looks."""

    def __init__(self) -> None:
        self.now: Breach | None = None
        self.count = 0
        self._broken: Look | None = None
        self._good: tuple[float, float] | None = None

    @property
    def last_good(self) -> tuple[float, float] | None:
        """The last stretch of looks that held: (start, end) on the watch's clock."""
        return self._good

    def see(self, look: Look) -> Breach | None:
        """One more look; gives a breach in the moment in which it is called."""
        if look.decision == HELD:
            start = look.at_s - look.seconds
            goes_on = self._good is not None and self._broken is None and self.now is None
            self._good = (self._good[0] if goes_on and self._good is not None else start, look.at_s)
            self._broken = None
            if self.now is not None:
                self.now.until_s = look.at_s
                self.now = None
            return None
        if look.decision != BROKEN:
            return None
        if self._broken is None:
            self._broken = look
            return None
        apart = look.at_s - self._broken.at_s
        if self.now is not None or apart < look.seconds / 2:
            return None
        failing = [one.objective.text for one in look.objectives if one.verdict == BROKEN]
        return self.call(Breach(self._broken.at_s - look.seconds / 2, look.at_s, "; ".join(failing)))

    def call(self, breach: Breach) -> Breach:
        """A breach begins, by looks or by canaries."""
        self.now = breach
        self.count += 1
        return breach
