"""Plain bars: counts through the run, lengths, attempts by outcome, and a gauge beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import altair as alt

from dashboards.charts import INK, Rows, label_scale, marks
from dashboards.language import tr
from dashboards.palette import LABEL_COLOURS, PHASE_COLOURS, reason_words
from telemetry import names

_LEFT: Final = 44
#: Reasons of a drop, told apart by lightness too; what is beyond their number shares the last.
_REASON_COLOURS: Final = ("#D55E00", "#5A5560", "#E58FC0", "#94318A", "#B8B8B8", "#7A5230")
GAUGE_COLOURS: Final = {"waiting": PHASE_COLOURS[names.QUEUE], "running": PHASE_COLOURS[names.DECODE]}


def reason_colours(reasons: Sequence[str]) -> dict[str, str]:
    """A colour for each reason, in the order given."""
    last = len(_REASON_COLOURS) - 1
    return {tr(reason_words(reason)): _REASON_COLOURS[min(place, last)] for place, reason in enumerate(reasons)}


def reasons_over_time(rows: Rows, reasons: Sequence[str], last_s: float) -> alt.Chart:
    """rows: start_s, end_s, reason, n; stacked per bin."""
    colours = reason_colours(reasons)
    stacked: dict[float, int] = {}
    data = []
    for row in sorted(rows, key=lambda r: (r["start_s"], list(reasons).index(r["reason"]))):
        low = stacked.get(row["start_s"], 0)
        stacked[row["start_s"]] = low + row["n"]
        data.append({**row, "low": low, "high": low + row["n"], "word": tr(reason_words(row["reason"]))})
    chart: alt.Chart = (
        alt.Chart(marks(data))
        .mark_rect()
        .encode(
            x=alt.X("start_s:Q", title=None).scale(domain=(0, last_s), nice=False),
            x2="end_s:Q",
            y=alt.Y("low:Q", title=tr("dropped")).axis(minExtent=_LEFT, maxExtent=_LEFT, tickMinStep=1, format="d"),
            y2="high:Q",
            color=alt.Color("word:N", legend=None).scale(domain=list(colours), range=list(colours.values())),
            tooltip=[
                alt.Tooltip("word:N", title=tr("reason")),
                alt.Tooltip("n:Q", title=tr("requests")),
                alt.Tooltip("start_s:Q", title=tr("from second"), format=".1f"),
            ],
        )
        .properties(height=150)
    )
    return chart


def gauges(rows: Rows, last_s: float) -> alt.Chart:
    """rows: start_s, end_s, what (waiting, running), value; lines."""
    data = [{**row, "at": (row["start_s"] + row["end_s"]) / 2, "word": tr(row["what"])} for row in rows]
    colours = {tr(what): colour for what, colour in GAUGE_COLOURS.items()}
    chart: alt.Chart = (
        alt.Chart(marks(data))
        .mark_line(point={"size": 10}, interpolate="step")
        .encode(
            x=alt.X("at:Q", title=tr("seconds into the run")).scale(domain=(0, last_s), nice=False),
            y=alt.Y("value:Q", title=tr("requests")).axis(minExtent=_LEFT, maxExtent=_LEFT),
            color=alt.Color("word:N", legend=None).scale(domain=list(colours), range=list(colours.values())),
            tooltip=[
                alt.Tooltip("word:N", title=" "),
                alt.Tooltip("value:Q", title=tr("requests"), format=",.0f"),
                alt.Tooltip("start_s:Q", title=tr("from second"), format=".1f"),
            ],
        )
        .properties(height=130)
    )
    return chart


def lengths(rows: Rows, colour: str) -> alt.Chart:
    """rows: low, high, n: how many requests by number of tokens, on a log axis."""
    data = [{**row, "range": f"{row['low']:.0f} – {row['high']:.0f}", "zero": 0} for row in rows]
    chart: alt.Chart = (
        alt.Chart(marks(data))
        .mark_rect(color=colour, stroke="#80808080", strokeWidth=0.6)
        .encode(
            x=alt.X("low:Q", title=tr("tokens"))
            .scale(type="log", nice=False)
            .axis(values=[2**k for k in range(18)], format="~s"),
            x2="high:Q",
            y=alt.Y("n:Q", title=tr("requests")).axis(minExtent=_LEFT, maxExtent=_LEFT, format="~s"),
            y2="zero:Q",
            tooltip=[
                alt.Tooltip("range:N", title=tr("tokens")),
                alt.Tooltip("n:Q", title=tr("requests"), format=","),
            ],
        )
        .properties(height=180)
    )
    return chart


def arrivals(rows: Rows, bin_s: float) -> alt.Chart:
    """rows: start_s, end_s, requests, per_s."""
    chart: alt.Chart = (
        alt.Chart(marks(rows))
        .mark_bar(binSpacing=1.5, color=INK)
        .encode(
            x=alt.X("start_s:Q", bin="binned", title=tr("seconds into the run (intended send)")),
            x2="end_s:Q",
            y=alt.Y("requests:Q", title=tr("requests in {width} s", width=f"{bin_s:g}")).axis(
                format="~s", minExtent=_LEFT, maxExtent=_LEFT
            ),
            tooltip=[
                alt.Tooltip("requests:Q", title=tr("requests"), format=","),
                alt.Tooltip("per_s:Q", title=tr("requests/s"), format=".2f"),
                alt.Tooltip("start_s:Q", title=tr("from second"), format=".1f"),
            ],
        )
        .properties(height=170)
    )
    return chart


def labels_before_after(before: Mapping[str, int], after: Mapping[str, int]) -> alt.Chart:
    """Two stacked bars of requests by label."""
    data = []
    rows = (tr("as the run was judged"), before), (tr("with these deadlines"), after)
    for name, counts in rows:
        at = 0
        for label in names.LABELS:
            if n := counts.get(label, 0):
                data.append({"name": name, "label": label, "word": tr(label), "from": at, "to": at + n, "n": n})
                at += n
    chart: alt.Chart = (
        alt.Chart(marks(data))
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X("from:Q", title=tr("requests")).scale(nice=False).axis(format="~s"),
            x2="to:Q",
            y=alt.Y("name:N", sort=[row[0] for row in rows], title=None).axis(labelLimit=220, ticks=False),
            color=alt.Color("label:N", scale=label_scale(), legend=None),
            tooltip=[
                alt.Tooltip("word:N", title=tr("outcome")),
                alt.Tooltip("n:Q", title=tr("requests"), format=","),
            ],
        )
        .properties(height=120)
    )
    return chart


def label_legend(counts: Mapping[str, int]) -> dict[str, str]:
    """Words and colours of the labels that occur."""
    return {tr(label): LABEL_COLOURS[label] for label in names.LABELS if counts.get(label)}
