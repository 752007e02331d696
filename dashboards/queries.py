"""Aggregates for the pages: plain functions over the tables of a run bundle, computed in DuckDB.

What must always hold: what is counted here equals what the command line counts, because labels come from the verdict
table and phases from ``telemetry.phases``; nothing here judges.  Results are small: bins and a handful of rows.
Tables are joined by ``index``, the position of a request in the schedule.
"""

from __future__ import annotations

from typing import Any, Final

import duckdb
import pyarrow as pa

from telemetry.names import DROPPED, INVALID, LABELS

Rows = list[dict[str, Any]]

#: Bin widths people can read, in seconds.
_NICE_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)
_TARGET_BINS: Final = 40
_PER_BIN: Final = 3  # requests a bin should hold on average, so that its shares mean something


def bin_width(span_s: float, requests: int) -> float:
    """Seconds per bin: a readable width, about 40 bins, fewer where bins would hold hardly any request."""
    bins = max(1, min(_TARGET_BINS, requests // _PER_BIN))
    return float(next((width for width in _NICE_S if span_s / width <= bins), _NICE_S[-1]))


def span_s(requests: pa.Table) -> float:
    """From clock zero to the last intended send, in seconds; 0 for no requests."""
    found = _ask("SELECT max(intended_s) AS last FROM requests", requests=requests)[0]["last"]
    return 0.0 if found is None else float(found)


def outcomes_over_time(requests: pa.Table, verdicts: pa.Table, bin_s: float) -> Rows:
    """Per bin of intended send and label that occurs: start_s, end_s, label, requests, of, share_low, share_high.

    The shares of a bin are stacked in the order of ``names.LABELS`` and end at 1.
    """
    order = " ".join(f"WHEN '{label}' THEN {place}" for place, label in enumerate(LABELS))
    return _ask(
        f"""
        WITH bins AS (
            SELECT floor(intended_s / $bin_s) AS bin, label, CASE label {order} END AS place, count(*) AS requests
            FROM requests JOIN verdicts USING ("index") GROUP BY bin, label
        ), stacked AS (
            SELECT *, sum(requests) OVER (PARTITION BY bin) AS "of",
                sum(requests) OVER (PARTITION BY bin ORDER BY place) AS upto
            FROM bins
        )
        SELECT bin * $bin_s AS start_s, (bin + 1) * $bin_s AS end_s, label, requests, "of"::BIGINT AS "of",
            (upto - requests) / "of" AS share_low, upto / "of" AS share_high
        FROM stacked ORDER BY bin, place
        """,
        {"bin_s": bin_s},
        requests=requests,
        verdicts=verdicts,
    )


#: Requests per bin of intended send: start_s, end_s, requests, per_s.  Empty bins are left out.
LOAD_OVER_TIME: Final = """
    SELECT floor(intended_s / $bin_s) * $bin_s AS start_s, start_s + $bin_s AS end_s,
        count(*) AS requests, count(*) / $bin_s AS per_s
    FROM requests GROUP BY start_s ORDER BY start_s
"""


def load_over_time(requests: pa.Table, bin_s: float) -> Rows:
    """LOAD_OVER_TIME of a table."""
    return _ask(LOAD_OVER_TIME, {"bin_s": bin_s}, requests=requests)


def worst(requests: pa.Table, verdicts: pa.Table, *, by: str, label: str | None, limit: int) -> Rows:
    """The slowest requests by ``e2e`` or ``ttft``, from the intended send, facts and verdict joined.

    label: only those with it; None: all but the invalid, those without an answer after the others, as on the command
    line.  Requests that never got that far (no end, no first token) cannot be ranked.
    """
    end = {"e2e": "end_s", "ttft": "first_token_s"}[by]
    return _ask(
        f"""
        SELECT requests.*, label, reason, end_s - intended_s AS e2e_s, first_token_s - intended_s AS ttft_s
        FROM requests JOIN verdicts USING ("index")
        WHERE {end} IS NOT NULL AND CASE WHEN $label IS NULL THEN label <> $invalid ELSE label = $label END
        ORDER BY label = $dropped, {end} - intended_s DESC, "index" LIMIT $limit
        """,
        {"label": label, "limit": limit, "dropped": DROPPED, "invalid": INVALID},
        requests=requests,
        verdicts=verdicts,
    )


def _ask(sql: str, values: dict[str, Any] | None = None, **tables: pa.Table) -> Rows:
    with duckdb.connect(":memory:", config={"threads": 2}) as base:
        for name, table in tables.items():
            base.register(name, table)
        found = base.execute(sql, values or {})
        columns = [column[0] for column in found.description]
        return [dict(zip(columns, row, strict=True)) for row in found.fetchall()]
