"""Charts as plain functions: a small table in, an Altair chart out.  They draw and decide nothing.

What must always hold: no chart gets more than ``MAX_MARKS`` marks; every mark tells its numbers on hover; stacks and
legends follow the order of ``palette``.  Times in the tables are seconds; a chart shows milliseconds below one second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt

from dashboards.language import tr
from dashboards.palette import LABEL_COLOURS, PHASE_COLOURS, PHASE_WORDS
from telemetry.names import LABELS
from telemetry.summary import format_seconds

MAX_MARKS: Final = 3000
Rows = Sequence[Mapping[str, Any]]

_GAP: Final = 1.5  # px between touching bars, so that neighbours part without colour


def unit_of(seconds: float) -> tuple[float, str]:
    """Factor and unit in which durations up to ``seconds`` read best: milliseconds below one second."""
    return (1000.0, "milliseconds") if seconds < 1.0 else (1.0, "seconds")


def outcomes_over_load(outcomes: Rows, load: Rows, bin_s: float) -> alt.VConcatChart:
    """Share of each label per bin of intended send time, above the number of requests in it; one time axis.

    outcomes: start_s, end_s, label, requests, share_low, share_high.  load: start_s, end_s, requests, per_s.
    """
    span = (0.0, max((row["end_s"] for row in load), default=1.0))
    time_axis = alt.Scale(domain=span, nice=False)
    words = f"{bin_s:g} s"
    top = (
        alt.Chart(marks(outcomes))
        .mark_bar(binSpacing=_GAP)
        .encode(
            x=alt.X("start_s:Q", bin="binned", scale=time_axis, axis=alt.Axis(labels=False, ticks=False), title=None),
            x2="end_s:Q",
            y=alt.Y("share_low:Q", scale=alt.Scale(domain=(0, 1)), title=tr("share of outcomes")).axis(
                format="%", tickCount=4, minExtent=44, maxExtent=44
            ),
            y2="share_high:Q",
            color=label_colour(),
            tooltip=[
                alt.Tooltip("label:N", title=tr("outcome")),
                alt.Tooltip("requests:Q", title=tr("requests")),
                alt.Tooltip("of:Q", title=tr("of requests in {width}", width=words)),
                alt.Tooltip("start_s:Q", title=tr("from second"), format=".1f"),
            ],
        )
        .properties(height=170)
    )
    bottom = (
        alt.Chart(marks(load))
        .mark_bar(binSpacing=_GAP, color=INK)
        .encode(
            x=alt.X("start_s:Q", bin="binned", scale=time_axis, title=tr("seconds into the run (intended send)")),
            x2="end_s:Q",
            y=alt.Y("requests:Q", title=tr("offered / {width}", width=words)).axis(
                format="d", tickCount=3, tickMinStep=1, minExtent=44, maxExtent=44
            ),
            tooltip=[
                alt.Tooltip("requests:Q", title=tr("requests")),
                alt.Tooltip("per_s:Q", title=tr("requests/s"), format=".2f"),
                alt.Tooltip("start_s:Q", title=tr("from second"), format=".1f"),
            ],
        )
        .properties(height=90)
    )
    both: alt.VConcatChart = alt.vconcat(top, bottom, spacing=6).resolve_scale(x="shared", color="independent")
    return both


def phase_stacks(rows: Rows, order: Sequence[str]) -> alt.LayerChart:
    """One horizontal bar per percentile, its phases stacked so that they end at the percentile.

    rows: name, phase, start_s, end_s, seconds, share, total_s.  order: the names from top to bottom.
    """
    longest = max((row["end_s"] for row in rows), default=0.0)
    factor, unit = unit_of(longest)
    data = [{**row, "from": row["start_s"] * factor, "to": row["end_s"] * factor} for row in rows]
    totals = {row["name"]: row["total_s"] for row in rows}
    ends = [{"name": n, "to": total * factor, "text": format_seconds(total)} for n, total in totals.items()]
    y = alt.Y("name:N", sort=list(order), title=None).axis(
        ticks=False, domain=False, labelPadding=6, labelOverlap=False
    )
    x = alt.X("from:Q", title=tr(unit), scale=alt.Scale(domain=(0, longest * factor * 1.14), nice=False))
    bars = (
        alt.Chart(marks(data))
        .mark_bar(stroke=SEAM, strokeWidth=0.75, height={"band": 0.72})
        .encode(x=x, x2="to:Q", y=y, color=phase_colour(), tooltip=_phase_tooltip())
    )
    text = alt.Chart(marks(ends)).mark_text(align="left", dx=5, color=INK).encode(x="to:Q", y=y, text="text:N")
    chart: alt.LayerChart = alt.LayerChart(layer=[bars, text]).properties(height=band_height(30, len(order)))
    return chart


def worst_requests(rows: Rows, ends: Rows) -> alt.LayerChart:
    """One bar per request, from its intended send, phases in the order in which they happen.

    rows: name, phase, start_s, end_s, seconds, share, total_s.  ends: name, total_s, verdict, label, first_token_s.
    """
    order = [row["name"] for row in ends]
    longest = max((row["total_s"] for row in ends), default=0.0)
    factor, unit = unit_of(longest)
    data = [{**row, "from": row["start_s"] * factor, "to": row["end_s"] * factor} for row in rows]
    tips = [
        {
            "name": row["name"],
            "to": row["total_s"] * factor,
            "text": row["verdict"],
            "label": row["label"],
            "first": None if row["first_token_s"] is None else row["first_token_s"] * factor,
        }
        for row in ends
    ]
    y = _rows(order)
    x = alt.X("from:Q", title=tr("{unit} after the intended send", unit=tr(unit))).scale(
        domain=(0, longest * factor * 1.35), nice=False
    )
    bars = (
        alt.Chart(marks(data))
        .mark_bar(stroke=SEAM, strokeWidth=0.75, height={"band": 0.74})
        .encode(x=x, x2="to:Q", y=y, color=phase_colour(), tooltip=_phase_tooltip())
    )
    first = (
        alt.Chart(marks([tip for tip in tips if tip["first"] is not None]))
        .mark_tick(color=INK, thickness=2, bandSize=24)
        .encode(
            x="first:Q",
            y=y,
            tooltip=[alt.Tooltip("first:Q", title=tr("first token, {unit}", unit=tr(unit)), format=".1f")],
        )
    )
    dot = (
        alt.Chart(marks(tips))
        .mark_point(filled=True, size=70, opacity=1, xOffset=9, shape="circle")
        .encode(x="to:Q", y=y, color=alt.Color("label:N", scale=label_scale(), legend=None), tooltip=["text:N"])
    )
    text = alt.Chart(marks(tips)).mark_text(align="left", dx=18, color=INK).encode(x="to:Q", y=y, text="text:N")
    layers = alt.LayerChart(layer=[bars, first, dot, text]).resolve_scale(color="independent")
    chart: alt.LayerChart = layers.properties(height=band_height(24, len(order)))
    return chart


INK: Final = "#7d828c"  # readable on white and on Streamlit's dark ground (4.0 and 4.7 to 1)
SEAM: Final = "#80808080"


def band_height(row_px: int, rows: int) -> int:
    """Pixels of a chart of horizontal bands: the axis and its title are inside a chart's height."""
    return row_px * max(1, rows) + 56


def marks(rows: Rows) -> alt.InlineData:
    """Rows as a chart's data.  ValueError for more than a page can draw."""
    if len(rows) > MAX_MARKS:
        raise ValueError(f"{len(rows)} marks; aggregate to at most {MAX_MARKS} first")
    return alt.InlineData(values=[dict(row) for row in rows])


def _rows(order: Sequence[str]) -> alt.Y:
    axis = alt.Axis(ticks=False, domain=False, labelPadding=6, labelOverlap=False)
    return alt.Y("name:N", sort=list(order), title=None, axis=axis)


def label_scale() -> alt.Scale:
    """The colours of the labels."""
    return alt.Scale(domain=list(LABELS), range=[LABEL_COLOURS[label] for label in LABELS])


def label_colour() -> alt.Color:
    """Colour by the column ``label``."""
    return alt.Color("label:N", scale=label_scale(), legend=None)


def phase_scale() -> alt.Scale:
    """The colours of the phases."""
    return alt.Scale(domain=list(PHASE_COLOURS), range=list(PHASE_COLOURS.values()))


def phase_colour() -> alt.Color:
    """Colour by the column ``phase``."""
    return alt.Color("phase:N", scale=phase_scale(), legend=None)


def _phase_tooltip() -> list[alt.Tooltip]:
    return [
        alt.Tooltip("name:N", title=" "),
        alt.Tooltip("word:N", title=tr("phase")),
        alt.Tooltip("duration:N", title=tr("takes")),
        alt.Tooltip("share:Q", title=tr("share"), format=".1%"),
    ]


def stack_rows(name: str, phases: Mapping[str, float]) -> list[dict[str, Any]]:
    """The bars of one stack: each phase from where the one before ended.  Phases of no length get no bar."""
    rows: list[dict[str, Any]] = []
    total = sum(phases.values())
    at = 0.0
    for phase in PHASE_COLOURS:
        seconds = phases.get(phase, 0.0)
        if seconds <= 0.0:
            continue
        rows.append(
            {
                "name": name,
                "phase": phase,
                "word": tr(PHASE_WORDS[phase]),
                "start_s": at,
                "end_s": at + seconds,
                "seconds": seconds,
                "duration": format_seconds(seconds),
                "share": seconds / total,
                "total_s": total,
            }
        )
        at += seconds
    return rows
