"""A run while it goes: how far it is, what came of the last requests, what the server says of itself right now."""

from __future__ import annotations

from typing import Any, Final

from dashboards.source import Rows, Source
from telemetry import names

RECENT_S: Final = 15.0
#: Gauges that say how things stand -> what each is.
GAUGES: Final = {
    names.M_RUNNING: "running",
    names.M_WAITING: "waiting",
    names.M_KV_USAGE: "KV memory used",
    names.M_CLIENT_INFLIGHT: "in flight, by the generator",
}


def progress(run: Source) -> dict[str, Any]:
    """rows, now_s (latest end of a request, or scrape), recent (ended in the last RECENT_S), recent_bad, per_s."""
    found = run.ask(
        f"""
        WITH clock AS (
            SELECT greatest((SELECT max(end_s) FROM requests), (SELECT max(t_s) FROM series)) AS now_s
        )
        SELECT count(*) AS rows, any_value(now_s) AS now_s, count_if(end_s > now_s - {RECENT_S}) AS recent,
            count_if(end_s > now_s - {RECENT_S} AND label IN ('{names.LATE}', '{names.WRONG}', '{names.DROPPED}'))
                AS recent_bad
        FROM rows, clock
        """
    )[0]
    return found | {"per_s": found["recent"] / RECENT_S}


def gauges(run: Source) -> Rows:
    """The latest value of each gauge, per source: name, source, value, t_s."""
    wanted = ", ".join(f"'{name}'" for name in GAUGES)
    return run.ask(
        f"""
        SELECT name, source, arg_max(value, t_s) AS value, max(t_s) AS t_s FROM series
        WHERE name IN ({wanted}) GROUP BY name, source ORDER BY name, source
        """
    )
