"""Time by latency on a log scale, one rectangle a cell: colour says what, strength how many."""

from __future__ import annotations

import math
from typing import Final

import altair as alt

from dashboards.charts import Rows, label_scale, marks, phase_scale
from dashboards.language import tr
from dashboards.palette import PHASE_WORDS, UNACCOUNTED
from telemetry.summary import format_seconds

#: Name of the selection by dragging; its fields are ``from_s`` and ``low_s``.
BRUSH: Final = "brush"


def heatmap(cells: Rows, by: str, measure: str) -> alt.Chart:
    """cells: from_s, to_s, low_s, high_s, n, of, name (a label, a phase, or null: no account).  by: outcome, phase."""
    most = max((cell["n"] for cell in cells), default=1)
    data = []
    for cell in cells:
        name = cell["name"] or UNACCOUNTED
        data.append(
            {
                **cell,
                "name": name,
                "word": tr(PHASE_WORDS[name]) if by == "phase" else tr(name),
                # One request must still be seen: half the ink of the fullest cell, on a log scale from there.
                "ink": 0.45 + 0.55 * math.log1p(cell["n"] - 1) / math.log1p(most - 1) if most > 1 else 1.0,
                "when": f"{cell['from_s']:g} – {cell['to_s']:g} s",
                "long": f"{format_seconds(cell['low_s'])} – {format_seconds(cell['high_s'])}",
                "share": cell["of"] / cell["n"] if cell["of"] else None,
            }
        )
    low = min((cell["low_s"] for cell in cells), default=0.001)
    high = max((cell["high_s"] for cell in cells), default=1.0)
    first = min((cell["from_s"] for cell in cells), default=0.0)
    last = max((cell["to_s"] for cell in cells), default=1.0)
    scale = phase_scale() if by == "phase" else label_scale()
    chart: alt.Chart = (
        alt.Chart(marks(data))
        .mark_rect(stroke=None)
        .encode(
            x=alt.X("from_s:Q", title=tr("seconds into the run (intended send)")).scale(
                domain=(first, last), nice=False
            ),
            x2="to_s:Q",
            y=alt.Y("low_s:Q", title=_title(measure))
            .scale(type="log", domain=(low, high), nice=False)
            .axis(values=[10**k * m for k in range(-4, 5) for m in (1, 3)], format="~g", grid=True),
            y2="high_s:Q",
            color=alt.Color("name:N", scale=scale, legend=None),
            opacity=alt.Opacity("ink:Q", scale=None),
            tooltip=[
                alt.Tooltip("when:N", title=tr("sent")),
                alt.Tooltip("long:N", title=tr("took")),
                alt.Tooltip("n:Q", title=tr("requests"), format=","),
                alt.Tooltip("word:N", title=tr("most of them")),
                alt.Tooltip("share:Q", title=tr("share"), format=".0%"),
            ],
        )
        .add_params(alt.selection_interval(name=BRUSH, encodings=["x", "y"]))
        .properties(height=360)
    )
    return chart


def _title(measure: str) -> str:
    return tr("time to first token, s") if measure == "ttft" else tr("whole answer, s")
