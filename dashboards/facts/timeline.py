"""Requests beside each other on one time axis, and beneath them what the engine did meanwhile.

Owns where a request's phases and the engine's steps lie on the generator's clock.  Stamps of two processes are never
subtracted as if they were one clock: a request bounds where the engine's clock can lie.  Its head reached the server
after it was sent and no later than its whole network time after; its first step began exactly ingress + tokenize +
queue later.  So each request gives an interval for (generator's clock - engine's clock), all of them hold at once, and
the middle of what they leave open is used, with half its width as the uncertainty that the page states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboards.facts.chosen import Chosen
from dashboards.source import Rows, Source
from dashboards.view import client_view
from telemetry import names

ROWS_SHOWN: Final = 30
STRIP_BINS: Final = 240
_USED: Final = 4000  # requests that the clocks are set by
_BEFORE: Final = (names.INGRESS, names.TOKENIZE, names.QUEUE)

#: Drawn one after the other.  Stalls lie inside prefill and decode, and preemptions inside decode; each is drawn after.
ORDER: Final = (
    names.CLIENT_WAIT, names.NETWORK, names.INGRESS, names.TOKENIZE, names.QUEUE, names.PREFILL, names.DECODE,
    names.PREEMPTED, names.RECOMPUTE, names.STALL, names.SEND,
)  # fmt: skip
_COLUMNS: Final = ", ".join(
    ('"index"', "label", "reason", "replica", "intended_s", "sent_s", "first_token_s", "end_s", "server_duration_s",
     "input_tokens", "preemptions", *(f"phase_{name}_s" for name in names.PHASES))
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Clock:
    """Add ``offset_s`` to an engine stamp in seconds for the generator's time; right within ``uncertainty_s``."""

    replica: str
    offset_s: float
    uncertainty_s: float
    requests: int


def in_flight(run: Source, chosen: Chosen, at_s: float, length_s: float) -> Rows:
    """The chosen requests that were in flight within the window, in order of arrival; of more than ROWS_SHOWN every
    so-manieth, so that the whole window is seen.
    """
    return run.ask(
        f"""
        WITH there AS (
            SELECT "index" AS place, row_number() OVER (ORDER BY intended_s, "index") - 1 AS number,
                count(*) OVER () AS total
            FROM rows WHERE {chosen.sql} AND intended_s < $until AND coalesce(end_s, intended_s) >= $at
        )
        SELECT {_COLUMNS} FROM rows
        WHERE "index" IN (SELECT place FROM there WHERE number % ceil(total / {ROWS_SHOWN}.0)::BIGINT = 0)
        ORDER BY intended_s, "index"
        """,
        at=at_s,
        until=at_s + length_s,
        **chosen.values,
    )


def how_many(run: Source, chosen: Chosen, at_s: float, length_s: float) -> int:
    """How many there are in all, shown or not."""
    sql = f"""SELECT count(*) AS n FROM rows
        WHERE {chosen.sql} AND intended_s < $until AND coalesce(end_s, intended_s) >= $at"""
    return int(run.ask(sql, at=at_s, until=at_s + length_s, **chosen.values)[0]["n"])


def busiest(run: Source, length_s: float) -> float:
    """Where a window of this length holds most bad requests (most requests, if none is bad), in seconds."""
    found = run.ask(
        f"""
        SELECT floor(intended_s / $length) * $length AS at_s, count(*) AS n,
            count_if(label IN ('{names.LATE}', '{names.WRONG}', '{names.DROPPED}')) AS bad
        FROM rows GROUP BY at_s ORDER BY bad DESC, n DESC, at_s LIMIT 1
        """,
        length=length_s,
    )
    return float(found[0]["at_s"]) if found else 0.0


def bars(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """A row per phase of each request: index, label, phase, start_s, end_s, seconds, on the generator's clock."""
    found: Rows = []
    for row in rows:
        at = row["intended_s"]
        for phase, seconds in parts_of(row).items():
            if seconds > 0:
                found.append(
                    {
                        "index": row["index"],
                        "label": row["label"],
                        "reason": row["reason"],
                        "phase": phase,
                        "start_s": at,
                        "end_s": at + seconds,
                        "seconds": seconds,
                    }
                )
                at += seconds
    return found


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase in drawing order, from the intended send to the end; the client's view without an account."""
    intended, sent, end = row["intended_s"], row["sent_s"], row["end_s"]
    if end is None:
        return {}
    if row["server_duration_s"] is not None and sent is not None:
        server = {name: row[f"phase_{name}_s"] or 0.0 for name in names.PHASES}
        whole = {names.CLIENT_WAIT: sent - intended, names.NETWORK: end - sent - sum(server.values())} | server
        return {name: whole[name] for name in ORDER}
    return client_view(row)


def clocks(run: Source) -> list[Clock]:
    """One per replica whose steps and requests can be joined."""
    before = " + ".join(f"phase_{name}_s" for name in _BEFORE)
    found = run.ask(
        f"""
        WITH asked AS (
            SELECT replica, step_first, sent_s + {before} AS least, end_s - sent_s - server_duration_s AS network
            FROM requests WHERE step_first IS NOT NULL AND server_duration_s IS NOT NULL AND sent_s IS NOT NULL
            ORDER BY hash("index") LIMIT {_USED}
        ), begun AS (SELECT replica, step, start_ns / 1e9 AS start_s FROM steps)
        SELECT asked.replica AS replica, max(least - start_s) AS low,
            min(least + greatest(network, 0) - start_s) AS high,
            median(least + greatest(network, 0) / 2 - start_s) AS middle, count(*) AS n
        FROM asked JOIN begun ON asked.replica = begun.replica AND asked.step_first = begun.step
        GROUP BY asked.replica ORDER BY asked.replica
        """
    )
    return [_clock(row) for row in found]


def _clock(row: Mapping[str, Any]) -> Clock:
    low, high = row["low"], row["high"]
    # Clocks that drift apart, or a log of other requests, leave no moment that suits all: then take the typical one.
    middle = (low + high) / 2 if low <= high else row["middle"]
    return Clock(row["replica"], middle, abs(high - low) / 2, row["n"])


def strip(run: Source, clock: Clock, from_s: float, to_s: float) -> Rows:
    """What the engine did in the window: start_s, end_s, running, waiting, prefill_tokens, kv_share, steps, gap_s.

    One row per step where they fit, else per bin of time: most running and waiting, tokens summed.
    """
    width = (to_s - from_s) / STRIP_BINS
    return run.ask(
        f"""
        WITH shown AS (
            SELECT start_ns / 1e9 + $offset AS start_s, end_ns / 1e9 + $offset AS end_s, running, waiting,
                prefill_tokens, kv_used / nullif(kv_used + kv_free, 0) AS kv_share, gap_ns / 1e9 AS gap_s, step,
                count(*) OVER () AS shown
            FROM steps WHERE replica = $replica
                AND end_ns / 1e9 + $offset >= $from_s AND start_ns / 1e9 + $offset <= $to_s
        )
        SELECT greatest(min(start_s), $from_s) AS start_s, least(max(end_s), $to_s) AS end_s, max(running) AS running,
            max(waiting) AS waiting, sum(prefill_tokens)::BIGINT AS prefill_tokens, max(kv_share) AS kv_share,
            count(*) AS steps, sum(gap_s) AS gap_s
        FROM shown GROUP BY CASE WHEN shown <= {STRIP_BINS} THEN step ELSE floor((start_s - $from_s) / $width) END
        ORDER BY start_s
        """,
        offset=clock.offset_s,
        replica=clock.replica,
        from_s=from_s,
        to_s=to_s,
        width=width,
    )
