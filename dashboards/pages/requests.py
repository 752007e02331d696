"""Requests: what was in flight together, as bars of phases, above what the engine did at the same moments.

Here head-of-line blocking is seen at a glance: long prefill below a row of queues.
"""

from __future__ import annotations

import streamlit as st

from dashboards import address, frame, kept, markup, picking, words
from dashboards.facts import heat, timeline
from dashboards.facts.chosen import Chosen
from dashboards.figures import timeline as figures
from dashboards.language import tr
from dashboards.source import Source
from telemetry.summary import format_seconds

_LENGTHS = (2.0, 5.0, 10.0, 30.0, 60.0)
_CLOCK_GOOD_S = 0.1  # beyond this the strip would be put beneath the wrong requests


def draw(run: Source) -> None:
    frame.title(tr("Requests"), tr("What was in flight together, and what the engine did meanwhile."))
    last = kept.ask(heat.bounds, run, "e2e")["last_s"]
    if last is None:
        frame.missing(tr("No request has ended yet."), tr("Open Live while the run goes."))
        return
    left, middle, right = st.columns([2, 0.7, 1])
    with left:
        chosen = picking.kinds_of_requests(run)
    with right:
        lengths = [f"{seconds:g}" for seconds in _LENGTHS]
        length = float(address.choice(tr("Window, s"), lengths, "length", default="10"))
    with middle:
        start = kept.ask(timeline.busiest, run, length)
        at = address.number(tr("From second"), "at", start, 0.0, max(float(last), 0.0) + 1.0, max(1.0, length / 2))
    rows = kept.ask(timeline.in_flight, run, chosen, at, length)
    if not rows:
        st.info(tr("None of them was in flight in this window. The busiest one begins at {s} s.", s=f"{start:g}"))
        return
    span = (at, at + length)
    st.html(words.phase_legend([timeline.parts_of(row) for row in rows]))
    labels = {row["index"]: row["label"] for row in rows}
    bars = timeline.bars(rows)
    st.altair_chart(figures.requests(bars, list(labels), labels, span), width="stretch")
    total = kept.ask(timeline.how_many, run, chosen, at, length)
    if total > len(rows):
        st.caption(
            tr(
                "{shown} of {total} in this window, evenly chosen; choose fewer above, or a shorter one.",
                shown=len(rows),
                total=f"{total:,}",
            )
        )
    _strip(run, chosen, span)
    st.markdown(f"**{tr('Open one of them')}**")
    slow = sorted(rows, key=lambda row: -(row["end_s"] or 0) + row["intended_s"])[:4]
    for place, row in zip(st.columns(len(slow)), slow, strict=True):
        took = "" if row["end_s"] is None else f" · {format_seconds(row['end_s'] - row['intended_s'])}"
        with place:
            frame.link("request", f"#{row['index']} · {tr(row['label'])}{took}", request=row["index"])


def _strip(run: Source, chosen: Chosen, span: tuple[float, float]) -> None:
    if not kept.ask(Source.has, run, "steps"):
        frame.missing(
            tr("There is no step log: the engine's batch, prefill and KV memory are not known."),
            tr("The bundled engine sends one with every run:"),
            "tailspan run --target http://HOST:PORT   # a server started by: tailspan serve",
        )
        return
    clocks = kept.ask(timeline.clocks, run)
    clock = next((c for c in clocks if chosen.replica in (None, c.replica)), None)
    if clock is None or clock.uncertainty_s > _CLOCK_GOOD_S:
        off = "–" if clock is None else format_seconds(clock.uncertainty_s)
        st.info(tr("The step log cannot be put on this time axis: the clocks agree only within {off}.", off=off))
        return
    steps = kept.ask(timeline.strip, run, clock, *span)
    if not steps:
        st.caption(tr("The engine ran no step in this window."))
        return
    st.altair_chart(figures.strip(steps, span), width="stretch")
    st.caption(
        tr(
            "Engine steps of {replica}, put on the generator's clock by {n} requests, right within {off}.",
            replica=markup.plain(clock.replica),
            n=f"{clock.requests:,}",
            off=format_seconds(clock.uncertainty_s),
        )
    )


if __name__ == "__main__":
    frame.show(draw)
