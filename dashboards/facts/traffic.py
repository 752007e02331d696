"""The traffic of a run as it was replayed: arrivals through time, how bursty they were, how long prompts and answers.

Facts of the requests table alone: no label is read.
"""

from __future__ import annotations

from typing import Any, Final

from dashboards.source import Rows, Source

#: Column -> what it counts.  Lengths are binned by quarters of a power of two.
LENGTHS: Final = {"input_tokens": "prompt", "expected_output_tokens": "answer"}


def lengths(run: Source) -> Rows:
    """Per kind (prompt, answer) and range of tokens: low, high (exclusive), n."""
    parts = " UNION ALL ".join(
        f"SELECT '{kind}' AS kind, {column} AS tokens FROM requests WHERE {column} > 0"
        for column, kind in LENGTHS.items()
    )
    return run.ask(
        f"""
        SELECT kind, pow(2, floor(log2(tokens) * 4) / 4) AS low, pow(2, (floor(log2(tokens) * 4) + 1) / 4) AS high,
            count(*) AS n
        FROM ({parts}) GROUP BY kind, floor(log2(tokens) * 4) ORDER BY kind, low
        """
    )


def totals(run: Source) -> dict[str, Any]:
    """n, first_s, last_s, tokens in and asked for with mean and p99, and cv: the spread of the gaps between arrivals.

    cv: standard deviation over mean; 1 for Poisson arrivals, more for bursts.  null below three requests.
    """
    return run.ask(
        """
        WITH gaps AS (
            SELECT intended_s - lag(intended_s) OVER (ORDER BY intended_s, "index") AS gap FROM requests
        ), spread AS (
            SELECT CASE WHEN count(gap) >= 2 THEN stddev_samp(gap) / nullif(avg(gap), 0) END AS cv FROM gaps
        )
        SELECT count(*) AS n, min(intended_s) AS first_s, max(intended_s) AS last_s,
            avg(input_tokens) AS input_mean, quantile_disc(input_tokens, 0.99) AS input_p99,
            avg(expected_output_tokens) AS output_mean, quantile_disc(expected_output_tokens, 0.99) AS output_p99,
            sum(input_tokens)::BIGINT AS input_sum, sum(expected_output_tokens)::BIGINT AS output_sum,
            (SELECT cv FROM spread) AS cv
        FROM requests
        """
    )[0]


def classes(run: Source) -> Rows:
    """Requests per traffic class with the mean of their lengths: name, n, input_mean, output_mean."""
    return run.ask(
        """
        SELECT coalesce("class", '') AS name, count(*) AS n, avg(input_tokens) AS input_mean,
            avg(expected_output_tokens) AS output_mean FROM requests GROUP BY name ORDER BY n DESC, name LIMIT 50
        """
    )
