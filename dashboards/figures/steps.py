"""The engine's steps: time against batch and context beside their floor, and the load through the run."""

from __future__ import annotations

from typing import Final

import altair as alt

from dashboards.charts import INK, Rows, marks
from dashboards.language import tr
from dashboards.palette import PHASE_COLOURS
from telemetry import names

#: Kinds of step with their colours: those of the phases that they serve, so that both read alike.
KIND_COLOURS: Final = {
    "decode": PHASE_COLOURS[names.DECODE],
    "prefill": PHASE_COLOURS[names.PREFILL],
    "mixed": PHASE_COLOURS[names.RECOMPUTE],
}


def against(rows: Rows, x: str, title: str) -> alt.LayerChart:
    """rows: kind, x, n, low_ms, mid_ms, high_ms, floor_ms.  Bar p10 to p90, dot the median, grey dash the floor."""
    scale = alt.Scale(domain=list(KIND_COLOURS), range=list(KIND_COLOURS.values()))
    colour = alt.Color("kind:N", scale=scale, legend=None)
    data = [{**row, "x": row[x], "word": tr(row["kind"])} for row in rows]
    place = alt.X("x:Q", title=title).scale(domainMin=0, nice=True)
    tips = [
        alt.Tooltip("word:N", title=tr("kind of step")),
        alt.Tooltip("x:Q", title=title, format=",.0f"),
        alt.Tooltip("n:Q", title=tr("steps"), format=","),
        alt.Tooltip("low_ms:Q", title="p10, ms", format=".2f"),
        alt.Tooltip("mid_ms:Q", title="p50, ms", format=".2f"),
        alt.Tooltip("high_ms:Q", title="p90, ms", format=".2f"),
        alt.Tooltip("floor_ms:Q", title=tr("floor, ms"), format=".2f"),
    ]
    base = alt.Chart(marks(data))
    spread = base.mark_rule(strokeWidth=3, opacity=0.4).encode(
        x=place, y=alt.Y("low_ms:Q", title=tr("milliseconds a step")), y2="high_ms:Q", color=colour, tooltip=tips
    )
    middle = base.mark_point(filled=True, size=42, opacity=1).encode(x=place, y="mid_ms:Q", color=colour, tooltip=tips)
    known = [row for row in data if row["floor_ms"] is not None]
    floor = (
        alt.Chart(marks(known))
        .mark_tick(orient="horizontal", thickness=2, bandSize=13, color=INK)
        .encode(x=place, y="floor_ms:Q", tooltip=tips)
    )
    chart: alt.LayerChart = alt.LayerChart(layer=[spread, floor, middle]).properties(height=260)
    return chart


def durations(rows: Rows) -> alt.LayerChart:
    """rows: start_s, end_s, mid_ms, high_ms: median and p99 of a step through the run."""
    data = [{**row, "at": (row["start_s"] + row["end_s"]) / 2} for row in rows]
    x = alt.X("at:Q", title=tr("seconds into the run"))
    tips = [
        alt.Tooltip("start_s:Q", title=tr("from second"), format=".1f"),
        alt.Tooltip("steps:Q", title=tr("steps"), format=","),
        alt.Tooltip("mid_ms:Q", title="p50, ms", format=".2f"),
        alt.Tooltip("high_ms:Q", title="p99, ms", format=".2f"),
        alt.Tooltip("gap_ms:Q", title=tr("waited with work, ms"), format=".1f"),
    ]
    base = alt.Chart(marks(data))
    spread = base.mark_area(opacity=0.35, color=KIND_COLOURS["decode"]).encode(
        x=x, y=alt.Y("mid_ms:Q", title=tr("milliseconds a step")), y2="high_ms:Q", tooltip=tips
    )
    middle = base.mark_line(color=KIND_COLOURS["prefill"], point={"size": 12}).encode(x=x, y="mid_ms:Q", tooltip=tips)
    chart: alt.LayerChart = alt.LayerChart(layer=[spread, middle]).properties(height=170)
    return chart
