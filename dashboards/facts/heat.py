"""When requests were slow: how many per cell of intended send and latency on a log scale, and what most of them are.

Must always hold: at most MAX_CELLS cells; every chosen request that has the time is in exactly one.
"""

from __future__ import annotations

from typing import Any, Final

from dashboards.facts.chosen import MEASURES, Chosen
from dashboards.queries import bin_width
from dashboards.source import Rows, Source

#: Colour by the label, or by the phase, that most requests of a cell have.
BY: Final = {"outcome": "label", "phase": "phase"}
MAX_CELLS: Final = 2400
_PER_DECADE: Final = 8
_FLOOR_S: Final = 1e-4
_SLOWEST: Final = 10


def cells(run: Source, chosen: Chosen, by: str) -> Rows:
    """A row per cell that holds a request: from_s, to_s, low_s, high_s, n, name (most frequent), of (its number).

    name is null where no request of the cell has one (no account of phases).
    """
    latency, name = MEASURES[chosen.measure], BY[by]
    span = run.ask(
        f"SELECT count(*) AS n, max(intended_s) AS last FROM rows WHERE {chosen.sql} AND {latency} IS NOT NULL",
        **chosen.values,
    )[0]
    if not span["n"]:
        return []
    start = chosen.from_s or 0.0
    return run.ask(
        f"""
        WITH placed AS (
            SELECT floor((intended_s - $start) / $width) AS t,
                floor(log10(greatest({latency}, {_FLOOR_S})) * {_PER_DECADE}) AS l, {name} AS name
            FROM rows WHERE {chosen.sql} AND {latency} IS NOT NULL
        ), named AS (SELECT t, l, name, count(*) AS n FROM placed GROUP BY t, l, name)
        SELECT $start + t * $width AS from_s, $start + (t + 1) * $width AS to_s,
            pow(10, l / {_PER_DECADE}) AS low_s, pow(10, (l + 1) / {_PER_DECADE}) AS high_s,
            sum(n)::BIGINT AS n, arg_max(name, n) AS name, max(n) FILTER (name IS NOT NULL) AS "of"
        FROM named GROUP BY t, l ORDER BY sum(n) DESC, t, l LIMIT {MAX_CELLS}
        """,
        start=start,
        width=bin_width(max(span["last"] - start, 0.1), 10_000),
        **chosen.values,
    )


def slowest(run: Source, chosen: Chosen) -> Rows:
    """The slowest of the chosen requests: index, label, reason, phase, class, replica, e2e_s, ttft_s, tokens."""
    latency = MEASURES[chosen.measure]
    # First which, then what of them: a sort of all columns of a million rows takes seconds.
    places = run.ask(
        f"""
        SELECT "index" AS place FROM rows WHERE {chosen.sql} AND {latency} IS NOT NULL
        ORDER BY {latency} DESC, "index" LIMIT {_SLOWEST}
        """,
        **chosen.values,
    )
    return run.ask(
        f"""
        SELECT "index", label, reason, phase, "class", replica, e2e_s, ttft_s, input_tokens,
            coalesce(completion_tokens_reported, completion_tokens_counted) AS output_tokens
        FROM rows WHERE "index" IN (SELECT unnest($places)) ORDER BY {latency} DESC, "index"
        """,
        places=[row["place"] for row in places],
    )


def bounds(run: Source, measure: str) -> dict[str, Any]:
    """last_s: the last intended send; low_s, high_s: the least and the greatest latency; null without a request."""
    latency = MEASURES[measure]
    return run.ask(
        f"SELECT max(intended_s) AS last_s, min({latency}) AS low_s, max({latency}) AS high_s FROM rows "
        f"WHERE {latency} IS NOT NULL"
    )[0]
