"""What users who try again did to the load: recovered, or only out of users."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from telemetry import retries
from telemetry.schema import ATTEMPTS


def attempt(index: int, number: int, due_s: float, end_s: float, verdict: str) -> dict[str, Any]:
    error = None if verdict == "answered" else "timeout_total"
    return {"index": index, "attempt": number, "due_s": due_s, "end_s": end_s, "error": error, "verdict": verdict}


def figures(*rows: dict[str, Any]) -> retries.Retries:
    found = retries.of_attempts(pa.Table.from_pylist(list(rows), schema=ATTEMPTS))
    assert found is not None
    return found


def test_a_storm_that_ends_because_nobody_new_comes_is_no_recovery() -> None:
    rows = [attempt(n, 0, float(n), n + 2.0, "retried") for n in range(10, 60)]
    rows += [attempt(n, 1, n + 2.1, n + 4.1, "gave_up") for n in range(10, 58)]
    rows += [attempt(n, 1, n + 2.1, n + 5.0, "answered") for n in (58, 59)]  # the last have the server to themselves
    rows += [attempt(n, 0, float(n), n + 0.5, "answered") for n in range(10)]
    found = figures(*rows)
    assert found.still_failing and found.recovery_s is None
    assert found.amplification == pytest.approx(110 / 60) and "not recovered by the end" in found.sentence()


def test_recovery_runs_from_the_first_failure_to_the_end_of_the_last() -> None:
    rows = [attempt(n, 0, float(n), n + 0.5, "answered") for n in range(60) if not 10 <= n < 20]
    rows += [attempt(n, 0, float(n), n + 2.0, "retried") for n in range(10, 20)]
    rows += [attempt(n, 1, n + 2.1, n + 3.0, "answered") for n in range(10, 20)]
    found = figures(*rows)
    assert not found.still_failing and found.recovery_s == pytest.approx(11.0) and found.recovered_by_retry == 10
    assert "recovered 11.00 s after the first failure at 10.0 s" in found.sentence()
    assert retries.of_attempts(ATTEMPTS.empty_table()) is None
