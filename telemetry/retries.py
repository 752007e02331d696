"""What users who try again did to the load, from the attempts of a run.

Amplification is attempts sent per logical request.  The time to recover runs from the first attempt that failed in a
way that was retried to the end of the last one; there is none where attempts still failed in the last RECENT part of
the load: that a storm ends when nobody new comes is no recovery.  Must always hold: figures come from rows, and a run
without attempts has none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from models.wording import several

RECENT: Final = 0.05
COLUMNS: Final = ("index", "attempt", "due_s", "end_s", "error", "verdict")


@dataclass(frozen=True, slots=True)
class Retries:
    """requests: logical ones with an attempt.  recovered_by_retry: answered, but not at the first attempt.

    no_budget: requests whose retry the budget refused.  recovery_s: None where nothing failed, or it still does.
    """

    requests: int
    attempts: int
    retries: int
    recovered_by_retry: int
    gave_up: int
    no_budget: int
    first_failure_s: float | None
    recovery_s: float | None
    still_failing: bool

    @property
    def amplification(self) -> float:
        return self.attempts / self.requests if self.requests else 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"amplification": self.amplification}

    def sentence(self) -> str:
        text = (
            f"{several(self.attempts, 'attempt')} at {several(self.requests, 'request')}: "
            f"amplification {self.amplification:.2f}, "
            f"{self.recovered_by_retry} answered by a retry, {self.gave_up} given up, {self.no_budget} without budget"
        )
        if self.still_failing:
            return f"{text}; not recovered by the end"
        if self.recovery_s is not None and self.first_failure_s is not None:
            return f"{text}; recovered {self.recovery_s:.2f} s after the first failure at {self.first_failure_s:.1f} s"
        return text


def of_attempts(attempts: pa.Table) -> Retries | None:
    """The figures of a table of attempts (COLUMNS); None where it has no rows."""
    if not attempts.num_rows:
        return None
    requests = pc.count_distinct(attempts.column("index")).as_py()
    verdict = attempts.column("verdict")

    def count(word: str) -> int:
        return int(pc.sum(pc.equal(verdict, word)).as_py() or 0)

    answered = attempts.filter(pc.equal(verdict, "answered"))
    later = int(pc.sum(pc.greater(answered.column("attempt"), 0)).as_py() or 0)
    failed = attempts.filter(
        pc.and_(pc.is_valid(attempts.column("error")), pc.is_in(verdict, pa.array(["retried", "gave_up", "no_budget"])))
    )
    first = recovery = None
    still = False
    if failed.num_rows:
        first = float(pc.min(failed.column("due_s")).as_py())
        last = float(pc.max(failed.column("end_s")).as_py())
        moments = pc.min_max(attempts.filter(pc.equal(attempts.column("attempt"), 0)).column("due_s")).as_py()
        still = last > moments["max"] - RECENT * (moments["max"] - moments["min"])
        recovery = None if still else last - first
    return Retries(
        requests=int(requests),
        attempts=attempts.num_rows,
        retries=attempts.num_rows - int(requests),
        recovered_by_retry=later,
        gave_up=count("gave_up"),
        no_budget=count("no_budget"),
        first_failure_s=first,
        recovery_s=recovery,
        still_failing=still,
    )
