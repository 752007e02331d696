"""From a percentile of A to that of B, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import altair as alt

from dashboards.charts import INK, marks, unit_of
from dashboards.facts.pairs import Step
from dashboards.language import tr
from dashboards.palette import LABEL_COLOURS, PHASE_WORDS
from telemetry import names
from telemetry.summary import format_seconds

_MORE, _LESS, _WHOLE = LABEL_COLOURS[names.DROPPED], LABEL_COLOURS[names.GOOD], "#8C8C8C"
COLOURS: Final = {"more": _MORE, "less": _LESS}


def waterfall(steps: Sequence[Step], height: int = 210) -> alt.LayerChart:
    """Grey: the wholes of A and B; vermilion: what a phase added; blue: what it took away.  Signs stand beside them."""
    factor, unit = unit_of(max((max(step.start_s, step.end_s) for step in steps), default=0.0))
    data: list[dict[str, Any]] = []
    for step in steps:
        signed = "" if step.whole else "+" if step.change_s >= 0 else "−"
        data.append(
            {
                "name": step_word(step),
                "from": step.start_s * factor,
                "to": step.end_s * factor,
                "top": max(step.start_s, step.end_s) * factor,
                "colour": _WHOLE if step.whole else _MORE if step.change_s >= 0 else _LESS,
                "text": signed + format_seconds(abs(step.change_s)),
            }
        )
    x = alt.X("name:N", sort=[row["name"] for row in data], title=None).axis(
        labelAngle=0, labelLimit=92, labelOverlap=False, ticks=False
    )
    highest = max((row["top"] for row in data), default=1.0)
    y = alt.Y("from:Q", title=tr(unit)).scale(domain=(0, highest * 1.14), nice=False).axis(tickCount=4)
    bars = (
        alt.Chart(marks(data))
        .mark_bar(width={"band": 0.72})
        .encode(
            x=x,
            y=y,
            y2="to:Q",
            color=alt.Color("colour:N", scale=None, legend=None),
            tooltip=[alt.Tooltip("name:N", title=" "), alt.Tooltip("text:N", title=" ")],
        )
    )
    text = alt.Chart(marks(data)).mark_text(dy=-7, color=INK).encode(x=x, y="top:Q", text="text:N")
    chart: alt.LayerChart = alt.LayerChart(layer=[bars, text]).properties(height=height)
    return chart


def step_word(step: Step) -> str:
    """A step's name as people say it."""
    if step.whole:
        return step.name
    return tr("the rest") if step.name == "rest" else tr(PHASE_WORDS.get(step.name, step.name))
