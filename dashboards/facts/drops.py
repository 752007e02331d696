"""Requests that got no complete answer: why, when, after how many attempts, and how full the queue was meanwhile."""

from __future__ import annotations

from typing import Any, Final

from dashboards.queries import bin_width
from dashboards.source import Rows, Source
from telemetry import names

_GAUGES: Final = {names.M_RUNNING: "running", names.M_WAITING: "waiting"}


def reasons(run: Source) -> Rows:
    """Per reason: n, with a row (the others never came that far), median seconds until it was given up, statuses."""
    return run.ask(
        """
        SELECT verdicts.reason, count(*) AS n, count(requests."index") AS with_row,
            quantile_cont(end_s - intended_s, 0.5) AS after_s, min(intended_s) AS first_s, max(intended_s) AS last_s,
            list_sort(list_distinct(list(status))) AS statuses
        FROM verdicts LEFT JOIN requests USING ("index") WHERE label = $dropped
        GROUP BY verdicts.reason ORDER BY n DESC, verdicts.reason
        """,
        dropped=names.DROPPED,
    )


def attempts(run: Source) -> Rows:
    """Requests by number of attempts and label: attempts, label, n."""
    return run.ask(
        "SELECT coalesce(attempts, 0) AS attempts, label, count(*) AS n FROM rows GROUP BY ALL ORDER BY attempts, label"
    )


def amplification(run: Source) -> dict[str, Any]:
    """requests, attempts, factor (attempts per request; null without requests), again (requests with more than one)."""
    return run.ask(
        """
        SELECT count(*) AS requests, sum(coalesce(attempts, 0))::BIGINT AS attempts,
            sum(coalesce(attempts, 0)) / nullif(count(*), 0) AS factor, count_if(attempts > 1) AS again FROM rows
        """
    )[0]


def over_time(run: Source) -> Rows:
    """Per bin of intended send and reason: start_s, end_s, reason, n."""
    return run.ask(
        """
        SELECT floor(intended_s / $width) * $width AS start_s, start_s + $width AS end_s, reason, count(*) AS n
        FROM rows WHERE label = $dropped GROUP BY start_s, reason ORDER BY start_s, reason
        """,
        width=_width(run),
        dropped=names.DROPPED,
    )


def queue_over_time(run: Source) -> Rows:
    """What the server said of its queue: start_s, end_s, what (running, waiting), value (largest in the bin)."""
    cases = " ".join(f"WHEN '{name}' THEN '{short}'" for name, short in _GAUGES.items())
    wanted = ", ".join(f"'{name}'" for name in _GAUGES)
    return run.ask(
        f"""
        WITH moments AS (
            SELECT t_s, name, sum(value) AS value FROM series WHERE name IN ({wanted}) AND t_s >= 0 GROUP BY t_s, name
        )
        SELECT floor(t_s / $width) * $width AS start_s, start_s + $width AS end_s, CASE name {cases} END AS what,
            max(value) AS value
        FROM moments GROUP BY start_s, what ORDER BY start_s, what
        """,
        width=_width(run),
    )


def _width(run: Source) -> float:
    found = run.ask("SELECT max(intended_s) AS last, count(*) AS n FROM requests")[0]
    return bin_width(found["last"] or 1.0, max(found["n"], 120))
