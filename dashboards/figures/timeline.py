"""Requests as bars on the run's time axis, their phases in order, above what the engine did at the same moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt

from dashboards.charts import INK, Rows, label_scale, marks, phase_colour
from dashboards.language import tr
from dashboards.palette import PHASE_COLOURS, PHASE_WORDS
from telemetry import names
from telemetry.summary import format_seconds

_STRIP: Final = {
    "running": ("requests in the batch", PHASE_COLOURS[names.DECODE]),
    "waiting": ("requests waiting", PHASE_COLOURS[names.QUEUE]),
    "prefill_tokens": ("prefill tokens", PHASE_COLOURS[names.PREFILL]),
    "kv_share": ("KV memory used", PHASE_COLOURS[names.SEND]),
}
_LEFT: Final = 52  # px for labels, the same above and below so that the axes stand in line


def requests(bars: Rows, order: Sequence[int], labels: Mapping[int, str], span: tuple[float, float]) -> alt.LayerChart:
    """bars: index, label, phase, start_s, end_s, seconds.  order: indexes from top to bottom.  span: seconds shown."""
    data = [
        {
            **bar,
            "name": f"#{bar['index']}",
            # Bars are cut at the edges here: what Vega clips, it still lets reach over the axis in some browsers.
            "from": max(bar["start_s"], span[0]),
            "to": min(bar["end_s"], span[1]),
            "word": tr(PHASE_WORDS[bar["phase"]]),
            "took": format_seconds(bar["seconds"]),
        }
        for bar in bars
        if bar["end_s"] > span[0] and bar["start_s"] < span[1]
    ]
    dots = [{"name": f"#{index}", "label": labels[index], "word": tr(labels[index]), "at": span[1]} for index in order]
    y = alt.Y("name:N", sort=[f"#{index}" for index in order], title=None).axis(
        ticks=False, domain=False, labelOverlap=False, labelFontSize=9, minExtent=_LEFT, maxExtent=_LEFT
    )
    x = alt.X("from:Q", title=None).scale(domain=span, nice=False).axis(orient="top", tickCount=8)
    drawn = (
        alt.Chart(marks(data))
        .mark_bar(height={"band": 0.78})
        .encode(
            x=x,
            x2="to:Q",
            y=y,
            color=phase_colour(),
            tooltip=[
                alt.Tooltip("name:N", title=tr("request")),
                alt.Tooltip("word:N", title=tr("phase")),
                alt.Tooltip("took:N", title=tr("takes")),
                alt.Tooltip("start_s:Q", title=tr("from second"), format=".3f"),
            ],
        )
    )
    ends = (
        alt.Chart(marks(dots))
        .mark_point(filled=True, size=46, opacity=1, shape="circle", xOffset=8)
        .encode(
            x="at:Q",
            y=y,
            color=alt.Color("label:N", scale=label_scale(), legend=None),
            tooltip=[alt.Tooltip("name:N", title=tr("request")), alt.Tooltip("word:N", title=tr("outcome"))],
        )
    )
    chart: alt.LayerChart = (
        alt.LayerChart(layer=[drawn, ends])
        .resolve_scale(color="independent")
        .properties(height=max(90, 11 * len(order) + 30))
    )
    return chart


def strip(steps: Rows, span: tuple[float, float], columns: Sequence[str] = tuple(_STRIP)) -> alt.VConcatChart:
    """steps: start_s, end_s and the columns asked for (running, waiting, prefill_tokens, kv_share)."""
    parts = [_band(steps, span, column, last=column == columns[-1]) for column in columns]
    chart: alt.VConcatChart = alt.vconcat(*parts, spacing=4).resolve_scale(x="shared")
    return chart


def _band(steps: Rows, span: tuple[float, float], column: str, *, last: bool) -> alt.Chart:
    word, colour = _STRIP[column]
    data = [
        {"start_s": step["start_s"], "end_s": step["end_s"], "value": step[column] or 0, "steps": step["steps"]}
        for step in steps
    ]
    most = max((row["value"] for row in data), default=0)
    share = column == "kv_share"
    axis = alt.Axis(labels=last, ticks=last)
    drawn: alt.Chart = (
        alt.Chart(marks(data))
        .mark_rect(color=colour, stroke=colour, strokeWidth=0.6)  # neighbours touch without a seam
        .encode(
            x=alt.X("start_s:Q", title=tr("seconds into the run") if last else None, axis=axis).scale(
                domain=span, nice=False
            ),
            x2="end_s:Q",
            y=alt.Y("value:Q", title=None)
            .scale(domain=(0, 1 if share else max(1, most)), nice=False)
            .axis(tickCount=2, minExtent=_LEFT, maxExtent=_LEFT, format="%" if share else "~s"),
            y2=alt.datum(0),
            tooltip=[
                alt.Tooltip("value:Q", title=tr(word), format=".0%" if share else ",.0f"),
                alt.Tooltip("start_s:Q", title=tr("from second"), format=".3f"),
                alt.Tooltip("steps:Q", title=tr("engine steps")),
            ],
        )
        .properties(
            height=34, title=alt.Title(tr(word), anchor="start", offset=2, fontSize=11, fontWeight="normal", color=INK)
        )
    )
    return drawn


def colours() -> dict[str, str]:
    """The words and colours of the strip, for a legend."""
    return {tr(word): colour for word, colour in _STRIP.values()}


def tokens_over_time(row: Mapping[str, Any]) -> alt.Chart | None:
    """The answer growing: tokens received by seconds after the intended send; None when no chunk's time was kept."""
    times, counts = row["chunk_s"], row["chunk_tokens"]
    if not times or not counts:
        return None
    every = max(1, -(-len(times) // 800))
    at, data = 0, []
    for place, (when, tokens) in enumerate(zip(times, counts, strict=False)):
        at += tokens
        if place % every == 0 or place == len(times) - 1:
            data.append({"at": float(when), "tokens": at})
    chart: alt.Chart = (
        alt.Chart(marks(data))
        .mark_line(interpolate="step-after", point={"size": 14}, color=PHASE_COLOURS[names.DECODE])
        .encode(
            x=alt.X("at:Q", title=tr("seconds after the intended send")).scale(domainMin=0),
            y=alt.Y("tokens:Q", title=tr("answer tokens")),
            tooltip=[alt.Tooltip("tokens:Q", title=tr("answer tokens")), alt.Tooltip("at:Q", format=".3f")],
        )
        .properties(height=200)
    )
    return chart
