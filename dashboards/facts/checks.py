"""How the answers were checked: what failed, canaries per replica, what the engine said of itself, what could be seen.

Must always hold: an answer that nothing checked in depth is not called right; beside "none wrong" stands the rate that
could have stayed unseen.
"""

from __future__ import annotations

from typing import Any, Final

from dashboards.source import Rows, Source
from telemetry import names

#: Counters of the engine about its own answers -> what they count.
COUNTERS: Final = {
    names.M_SHADOWED: "answers computed again, alone, and compared",
    names.M_DIVERGENCE: "of them different",
    names.M_NONFINITE: "values that were not finite numbers",
    names.M_LAW_VIOLATIONS: "violated laws of the engine's own accounting",
}


def totals(run: Source) -> dict[str, Any]:
    """answered, wrong, checked (verdict yes or no, not "unchecked"), verified, canaries; counts of requests."""
    return run.ask(
        """
        SELECT count_if(answered = 'yes') AS answered, count_if(label = $wrong) AS wrong,
            count_if(answered = 'yes' AND correct <> 'unchecked') AS checked, count_if(verified) AS verified,
            count(canary_kind) AS canaries FROM rows
        """,
        wrong=names.WRONG,
    )[0]


def kinds(run: Source) -> Rows:
    """Failed checks of answers, of those that are also late too: wrong_kind, n, late, first_s, example (an index)."""
    return run.ask(
        """
        SELECT wrong_kind, count(*) AS n, count_if(late) AS late, min(intended_s) AS first_s, min("index") AS example
        FROM rows WHERE wrong_kind IS NOT NULL GROUP BY wrong_kind ORDER BY n DESC, wrong_kind
        """
    )


def canaries(run: Source) -> Rows:
    """Per kind of canary and replica: canary_kind, replica, n, wrong, unanswered."""
    return run.ask(
        """
        SELECT canary_kind, coalesce(replica, '') AS replica, count(*) AS n, count_if(correct = 'no') AS wrong,
            count_if(answered = 'no') AS unanswered
        FROM rows WHERE canary_kind IS NOT NULL GROUP BY ALL ORDER BY canary_kind, replica LIMIT 400
        """
    )


def counters(run: Source) -> Rows:
    """The engine's own counters, what each gained during the run: source, name, gained."""
    wanted = ", ".join(f"'{name}', '{name}_total'" for name in COUNTERS)
    found = run.ask(
        f"""
        WITH moments AS (
            SELECT source, t_s, replace(name, '_total', '') AS name, sum(value) AS value
            FROM series WHERE name IN ({wanted}) GROUP BY ALL
        )
        SELECT source, name, arg_max(value, t_s) - arg_min(value, t_s) AS gained FROM moments
        GROUP BY source, name
        """
    )
    return sorted(found, key=lambda row: (row["source"], list(COUNTERS).index(row["name"])))


def unseen_rate(checked: int) -> float | None:
    """The rate of wrong answers that would still have shown none among ``checked`` in 5 % of cases; None for none."""
    return None if checked == 0 else float(1 - 0.05 ** (1 / checked))


def needed_to_see(rate: float) -> int:
    """Answers to check so that at least three wrong ones are met with 95 %, at this rate of wrong (binomial, exact)."""

    def unseen(n: int) -> float:
        keep = 1 - rate
        return float(keep**n + n * rate * keep ** (n - 1) + n * (n - 1) / 2 * rate**2 * keep ** (n - 2))

    high = 3
    while unseen(high) > 0.05:
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if unseen(middle) > 0.05 else (low, middle)
    return high
