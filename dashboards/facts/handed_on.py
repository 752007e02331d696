"""What leaves the house with a run: the figures as text for a ticket, and what the bundle's folder holds.

Must always hold: the figures are those of ``telemetry.summary``; texts of answers are counted, never shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from dashboards.source import Source
from telemetry.schema import TABLES
from telemetry.summary import Summary, format_value


def as_json(summary: Summary) -> str:
    """What ``tailspan runs show --json`` prints."""
    return json.dumps(summary.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)


def as_text(summary: Summary, link: str) -> str:
    """A few lines of Markdown for a ticket or a chat."""
    lines = [
        f"**{summary.sentence}**",
        f"- run {summary.run_id} ({summary.validity.verdict}), trace {summary.trace or '–'}, SLO {summary.slo}",
        "- " + ", ".join(f"{label} {n:,}" for label, n in summary.labels.items()) + f" of {summary.attempted:,}",
    ]
    lines += [
        f"- {'✓' if one.holds else '✗'} {one.objective.text}: {format_value(one)} (n = {one.n:,})"
        for one in summary.objectives
    ]
    return "\n".join([*lines, f"- {link}", f"- `tailspan runs show {summary.run_id}`"])


def holdings(run: Source) -> Iterator[tuple[str, int, int]]:
    """Name, rows and bytes of each table that is there."""
    for name in TABLES:
        folder = run.bundle.path / name
        if folder.is_dir():
            size = sum(file.stat().st_size for file in folder.glob("[!.]*") if file.is_file())
            yield name, run.ask(f"SELECT count(*) AS n FROM {name}")[0]["n"], size


def texts_kept(run: Source) -> int:
    """Answers whose text is in the bundle."""
    return int(run.ask("SELECT count(text) AS n FROM requests")[0]["n"])
