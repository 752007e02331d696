"""The dashboards as they are checked in, and what must stand around them: folder and data sources.

Needs nothing but the standard library: the JSON was made by ``dashboards.grafana.make``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "json"
FOLDER_UID: Final = "tailspan"
FOLDER_TITLE: Final = "tailspan"
PROMETHEUS_UID: Final = "tailspan-prometheus"
TEMPO_UID: Final = "tailspan-tempo"


def dashboards() -> list[dict[str, Any]]:
    """Every dashboard as plain data, in the order of their uids."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]


def datasources(prometheus: str, tempo: str | None) -> list[dict[str, Any]]:
    """Data sources at these URLs, as Grafana's API and its provisioning take them; without Tempo no trace is linked."""
    links = [{"name": "trace_id", "datasourceUid": TEMPO_UID}] if tempo else []
    found: list[dict[str, Any]] = [
        {
            "name": "tailspan Prometheus",
            "uid": PROMETHEUS_UID,
            "type": "prometheus",
            "access": "proxy",
            "url": prometheus,
            "isDefault": False,
            "jsonData": {"httpMethod": "POST", "timeInterval": "5s", "exemplarTraceIdDestinations": links},
        }
    ]
    if tempo:
        found.append(
            {
                "name": "tailspan Tempo",
                "uid": TEMPO_UID,
                "type": "tempo",
                "access": "proxy",
                "url": tempo,
                "isDefault": False,
                "jsonData": {"nodeGraph": {"enabled": True}},
            }
        )
    return found


def expressions(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """(where, PromQL) of every panel, annotation and variable of a dashboard; Grafana's variables are still in it."""
    found = []
    for panel in dashboard["panels"]:
        found += [(f"panel {panel['title']!r}", target["expr"]) for target in panel.get("targets", ())]
    for note in dashboard["annotations"]["list"]:
        if "expr" in note:
            found.append((f"annotation {note['name']!r}", note["expr"]))
    return found
