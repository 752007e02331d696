"""What the engine's steps cost: time by batch and by context beside the floor of the same work, and through the run.

Owns only groups and quantiles; floors are the engine's own (``telemetry.floor``).  Steps of the probe before the run
are left out where the clocks can be joined (``timeline.clocks``).
"""

from __future__ import annotations

from typing import Final

from dashboards.facts.timeline import Clock
from dashboards.queries import bin_width
from dashboards.source import Rows, Source

_TOOK: Final = "(end_ns - start_ns) / 1e6"
_CONTEXT_BINS: Final = 24
_TIME_BINS: Final = 120


def by_batch(run: Source, clock: Clock | None) -> Rows:
    """Per kind of step and sequences in it: n, low_ms, mid_ms, high_ms (p10, p50, p90) and floor_ms (median)."""
    return run.ask(
        f"""
        SELECT kind, (decode_seqs + prefill_seqs)::BIGINT AS batch, {_QUANTILES}
        FROM steps WHERE {_during(clock)} GROUP BY kind, batch ORDER BY kind, batch
        """,
        **_values(clock),
    )


def by_context(run: Source, clock: Clock | None) -> Rows:
    """Per kind and range of context tokens: context (middle of the range), n, low_ms, mid_ms, high_ms, floor_ms."""
    values = _values(clock)
    most = run.ask(f"SELECT max(context_tokens) AS most FROM steps WHERE {_during(clock)}", **values)[0]["most"]
    if not most:
        return []
    return run.ask(
        f"""
        SELECT kind, (floor(context_tokens / $width) + 0.5) * $width AS context, {_QUANTILES}
        FROM steps WHERE {_during(clock)} AND context_tokens > 0 GROUP BY kind, context ORDER BY kind, context
        """,
        width=max(1.0, most / _CONTEXT_BINS),
        **values,
    )


def through_run(run: Source, clock: Clock) -> Rows:
    """Per bin: start_s, end_s, running, waiting, prefill_tokens, kv_share, mid_ms, high_ms, gap_ms, steps."""
    length = float(run.bundle.manifest.get("length_s") or 0) or _last(run, clock)
    return run.ask(
        f"""
        SELECT floor((start_ns / 1e9 + $offset) / $width) * $width AS start_s, start_s + $width AS end_s,
            avg(running) AS running, avg(waiting) AS waiting, sum(prefill_tokens)::BIGINT AS prefill_tokens,
            max(kv_used / nullif(kv_used + kv_free, 0)) AS kv_share, quantile_cont({_TOOK}, 0.5) AS mid_ms,
            quantile_cont({_TOOK}, 0.99) AS high_ms, sum(gap_ns) / 1e6 AS gap_ms, count(*) AS steps
        FROM steps WHERE {_during(clock)} GROUP BY start_s ORDER BY start_s LIMIT {4 * _TIME_BINS}
        """,
        width=bin_width(length, 3 * _TIME_BINS) / 2,
        **_values(clock),
    )


_QUANTILES: Final = f"""count(*) AS n, quantile_cont({_TOOK}, 0.1) AS low_ms, quantile_cont({_TOOK}, 0.5) AS mid_ms,
            quantile_cont({_TOOK}, 0.9) AS high_ms, quantile_cont(floor_ns / 1e6, 0.5) AS floor_ms"""


def _during(clock: Clock | None) -> str:
    return "true" if clock is None else "replica = $replica AND start_ns / 1e9 + $offset >= 0"


def _values(clock: Clock | None) -> dict[str, object]:
    return {} if clock is None else {"replica": clock.replica, "offset": clock.offset_s}


def _last(run: Source, clock: Clock) -> float:
    found = run.ask(f"SELECT max(start_ns / 1e9 + $offset) AS last FROM steps WHERE {_during(clock)}",
                    **_values(clock))[0]["last"]  # fmt: skip
    return float(found or 1.0)
