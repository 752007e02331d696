"""Who is hit, and since when: groups of requests whose share of bad ones lies above that of the run.

A group is a traffic class, a replica, a range of prompt or answer lengths, a share of the prompt from the cache, or a
number of attempts.  Must always hold: no group of fewer than MIN_GROUP requests is named; the interval (Wilson, 95 %)
stands beside the share.  It takes requests for independent, which queueing makes them not quite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from dashboards.source import PART_SQL, Rows, Source
from telemetry import names

MIN_GROUP: Final = 30
_Z: Final = 1.959964  # of the normal distribution, two-sided 95 %
_BAD: Final = f"label IN ('{names.LATE}', '{names.WRONG}', '{names.DROPPED}')"

#: Dimension -> SQL of the group's name.  Lengths by powers of two: 65-128, 129-256 and so on.
_DIMENSIONS: Final = {
    "class": '"class"',
    "replica": "replica",
    "prompt": "pow(2, ceil(log2(greatest(input_tokens, 1))))::BIGINT::VARCHAR",
    "answer": "pow(2, ceil(log2(greatest(expected_output_tokens, 1))))::BIGINT::VARCHAR",
    "cached": """CASE WHEN cached_tokens IS NULL OR coalesce(prompt_tokens_reported, 0) = 0 THEN NULL
                 WHEN 2 * cached_tokens >= prompt_tokens_reported THEN 'half or more' ELSE 'less than half' END""",
    "attempts": "attempts::VARCHAR",
}


@dataclass(frozen=True, slots=True)
class Group:
    """n requests of which ``bad`` were late, wrong or dropped; low, high: 95 % interval of that share."""

    dimension: str
    name: str
    n: int
    bad: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.bad / self.n


def interval(bad: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; (0, 1) without requests."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = bad / n, _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def hit(run: Source, most: int = 3) -> list[Group]:
    """The groups whose interval lies wholly above the run's own share of bad requests, largest surplus first.

    The surplus is what the group has beyond its part: bad - n * share of the run.  Invalid requests are left out.
    """
    parts = " UNION ALL ".join(
        f"SELECT '{dimension}' AS dimension, {sql} AS name, {_BAD} AS bad FROM base"
        for dimension, sql in _DIMENSIONS.items()
    )
    found = run.ask(
        f"""
        WITH base AS (
            SELECT "class", replica, input_tokens, expected_output_tokens, cached_tokens, prompt_tokens_reported,
                attempts, label FROM rows WHERE label <> $invalid
        )
        SELECT dimension, name, count(*) AS n, count_if(bad) AS bad FROM ({parts})
        WHERE name IS NOT NULL GROUP BY dimension, name HAVING n >= $least ORDER BY dimension, name
        """,
        invalid=names.INVALID,
        least=MIN_GROUP,
    )
    total, bad = _whole(run)
    if not bad:
        return []
    overall = bad / total
    groups = [
        Group(row["dimension"], row["name"], row["n"], row["bad"], *interval(row["bad"], row["n"])) for row in found
    ]
    above = [group for group in groups if group.low > overall]
    return sorted(above, key=lambda group: group.n * overall - group.bad)[:most]


def _whole(run: Source) -> tuple[int, int]:
    row = run.ask(
        f"SELECT count(*) AS n, count_if({_BAD}) AS bad FROM verdicts WHERE label <> $invalid", invalid=names.INVALID
    )[0]
    return row["n"], row["bad"]


def late_phase(run: Source) -> str | None:
    """The phase in which late requests spent most of their time; None: none is late, or the server gives no account."""
    sums = ", ".join(f"sum({sql}) AS {name}" for name, sql in PART_SQL.items())
    row = run.ask(
        f"SELECT {sums} FROM rows WHERE label = $late AND server_duration_s IS NOT NULL AND sent_s IS NOT NULL",
        late=names.LATE,
    )[0]
    spent = {name: seconds for name, seconds in row.items() if seconds is not None}
    return max(spent, key=lambda name: spent[name]) if spent else None


def examples(run: Source, most: int = 3) -> Rows:
    """The slowest of each bad label, then further ones: index, label, reason, phase, e2e_s.  Empty: none is bad."""
    return run.ask(
        f"""
        WITH ranked AS (
            SELECT "index" AS place,
                row_number() OVER (PARTITION BY label ORDER BY e2e_s DESC NULLS LAST, "index") AS rank
            FROM rows WHERE {_BAD}
        ), chosen AS (SELECT place, rank FROM ranked WHERE rank <= $most)
        SELECT "index", label, reason, phase, e2e_s FROM rows JOIN chosen ON rows."index" = chosen.place
        ORDER BY rank, label = '{names.DROPPED}', e2e_s DESC, "index" LIMIT $most
        """,
        most=most,
    )


def since(run: Source) -> Rows:
    """Per bad label: n, first_s, half_s and last_s: the intended sends of the first, the middle and the last of them.

    Requests without a row have no moment and are not here.
    """
    return run.ask(
        f"""
        SELECT label, count(*) AS n, min(intended_s) AS first_s, quantile_disc(intended_s, 0.5) AS half_s,
            max(intended_s) AS last_s
        FROM rows WHERE {_BAD} GROUP BY label ORDER BY n DESC, label
        """
    )
