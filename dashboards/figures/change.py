"""How figures changed, as a forest of intervals; how each request changed, as a scatter; which cause made how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt

from dashboards.charts import INK, band_height, marks, unit_of
from dashboards.language import tr
from dashboards.palette import LABEL_COLOURS
from telemetry import names
from telemetry.compare import Effect
from telemetry.compare.result import BETTER, WORSE
from telemetry.explain.result import CauseShare
from telemetry.summary import format_seconds

COLOURS: Final = {WORSE: LABEL_COLOURS[names.DROPPED], BETTER: LABEL_COLOURS[names.GOOD]}
_GREY: Final = "#8C8C8C"


def forest(effects: Sequence[Effect]) -> alt.LayerChart:
    """Change of each time in per cent, with its interval; vermilion: worse, blue: better, grey: within noise."""
    data = [
        {
            "figure": one.figure,
            "change": 100 * (one.change or 0.0),
            "low": None if one.low is None else 100 * one.low,
            "high": None if one.high is None else 100 * one.high,
            "colour": COLOURS.get(one.verdict, _GREY),
            "verdict": one.verdict,
        }
        for one in effects
        if one.relative and one.change is not None
    ]
    y = alt.Y("figure:N", sort=[str(row["figure"]) for row in data], title=None).axis(ticks=False, labelOverlap=False)
    tips = [
        alt.Tooltip("figure:N", title=" "),
        alt.Tooltip("change:Q", title=tr("change, %"), format="+.1f"),
        alt.Tooltip("low:Q", title=tr("from, %"), format="+.1f"),
        alt.Tooltip("high:Q", title=tr("to, %"), format="+.1f"),
        alt.Tooltip("verdict:N", title=" "),
    ]
    colour = alt.Color("colour:N", scale=None, legend=None)
    base = alt.Chart(marks(data))
    zero = alt.Chart(marks([{"at": 0.0}])).mark_rule(color=INK, strokeDash=[3, 3]).encode(x="at:Q")
    lines = (
        base.transform_filter("isValid(datum.low) && isValid(datum.high)")
        .mark_rule(strokeWidth=2.5)
        .encode(y=y, x=alt.X("low:Q", title=tr("change from A to B, %")), x2="high:Q", color=colour, tooltip=tips)
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(y=y, x="change:Q", color=colour, tooltip=tips)
    chart: alt.LayerChart = alt.LayerChart(layer=[zero, lines, points]).properties(height=band_height(24, len(data)))
    return chart


def scatter(points: Sequence[Mapping[str, Any]]) -> alt.LayerChart:
    """Each request in A and in B, both axes logarithmic; above the line: slower in B."""
    most = max((max(row["a_s"], row["b_s"]) for row in points), default=1.0)
    least = min((min(row["a_s"], row["b_s"]) for row in points), default=0.001)
    factor, unit = unit_of(most)
    data = [
        {
            "index": row["index"],
            "a": row["a_s"] * factor,
            "b": row["b_s"] * factor,
            "slower": tr("slower in B") if row["b_s"] > row["a_s"] else tr("faster in B"),
            "colour": COLOURS[WORSE] if row["b_s"] > row["a_s"] else COLOURS[BETTER],
        }
        for row in points
    ]
    scale = alt.Scale(type="log", domain=(0.9 * least * factor, 1.1 * most * factor), nice=False)
    ends = [{"a": least * factor, "b": least * factor}, {"a": most * factor, "b": most * factor}]
    line = alt.Chart(marks(ends)).mark_line(color=INK, strokeDash=[3, 3]).encode(
        x=alt.X("a:Q", scale=scale), y=alt.Y("b:Q", scale=scale)
    )  # fmt: skip
    dots = (
        alt.Chart(marks(data))
        .mark_point(size=14, opacity=0.55)
        .encode(
            x=alt.X("a:Q", scale=scale, title=f"A, {tr(unit)}"),
            y=alt.Y("b:Q", scale=scale, title=f"B, {tr(unit)}"),
            color=alt.Color("colour:N", scale=None, legend=None),
            tooltip=[
                alt.Tooltip("index:Q", title=tr("request")),
                alt.Tooltip("a:Q", title="A", format=".3~f"),
                alt.Tooltip("b:Q", title="B", format=".3~f"),
                alt.Tooltip("slower:N", title=" "),
            ],
        )
    )
    chart: alt.LayerChart = alt.LayerChart(layer=[line, dots]).properties(height=340)
    return chart


def causes(shares: Sequence[CauseShare]) -> alt.LayerChart:
    """What each factor makes of the change; vermilion: longer, blue: shorter."""
    factor, unit = unit_of(max((abs(one.change_s) for one in shares), default=0.0))
    data = [
        {
            "factor": one.factor.replace("_", " "),
            "change": one.change_s * factor,
            "text": f"{'+' if one.change_s >= 0 else '−'}{format_seconds(abs(one.change_s))}",
            "evidence": one.evidence,
            "colour": COLOURS[WORSE] if one.change_s >= 0 else COLOURS[BETTER],
        }
        for one in shares
    ]
    y = alt.Y("factor:N", sort=[str(row["factor"]) for row in data], title=None)
    y = y.axis(ticks=False, labelLimit=140, labelOverlap=False)
    bars = (
        alt.Chart(marks(data))
        .mark_bar(height={"band": 0.7})
        .encode(
            y=y,
            x=alt.X("change:Q", title=tr(unit)).axis(tickCount=8),
            color=alt.Color("colour:N", scale=None, legend=None),
            tooltip=[
                alt.Tooltip("factor:N", title=" "),
                alt.Tooltip("text:N", title=" "),
                alt.Tooltip("evidence:N", title=" "),
            ],
        )
    )
    text = alt.Chart(marks(data)).mark_text(dx=6, align="left", color=INK).encode(y=y, x="change:Q", text="text:N")
    chart: alt.LayerChart = alt.LayerChart(layer=[bars, text]).properties(height=band_height(26, len(data)))
    return chart
