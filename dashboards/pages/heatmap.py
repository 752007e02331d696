"""Heatmap: when requests were slow, and what they were; drag over a region, or give its edges, to see what is in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from dashboards import address, frame, kept, markup, palette, picking, words
from dashboards.facts import heat
from dashboards.facts.chosen import Chosen, counted
from dashboards.figures import bars
from dashboards.figures.heat import BRUSH, heatmap
from dashboards.language import tr
from dashboards.source import Source
from telemetry import names
from telemetry.summary import format_seconds

_CHART = "heat"
_EDGES = ("from", "to", "low", "high")


def draw(run: Source) -> None:
    frame.title(tr("Heatmap"), tr("Each cell: requests by when they were meant to be sent and how long they took."))
    left, right = st.columns(2)
    with left:
        measure = picking.measure()
    with right:
        by = address.choice(tr("Colour"), ("outcome", "phase"), "colour",
                            {"outcome": tr("outcome"), "phase": tr("dominant phase")})  # fmt: skip
    chosen = replace(picking.kinds_of_requests(run), measure=measure)
    bounds = kept.ask(heat.bounds, run, measure)
    if bounds["last_s"] is None:
        frame.missing(tr("No request has got that far."), tr("Choose the other time, or another run."))
        return
    cells = kept.ask(heat.cells, run, chosen, by)
    if not cells:
        st.info(tr("None of the requests chosen above has this time."))
        return
    if by == "phase" and not any(cell["name"] for cell in cells):
        frame.missing(
            tr("The server gave no account of its phases, so nothing dominates."),
            tr("The bundled engine gives one. Colour by outcome, or run against it:"),
            "tailspan serve",
        )
        return
    _legend(cells, by)
    st.altair_chart(
        heatmap(cells, by, measure), width="stretch", key=_CHART, on_select=_take_region, selection_mode=BRUSH
    )
    region = _region(chosen, bounds)
    _inside(run, region, whole=region == chosen)


def _legend(cells: list[dict[str, Any]], by: str) -> None:
    present = {cell["name"] or palette.UNACCOUNTED for cell in cells}
    if by == "outcome":
        st.html(markup.legend(bars.label_legend(dict.fromkeys(present, 1))))
    else:
        shown = [phase for phase in palette.PHASE_COLOURS if phase in present]
        st.html(markup.legend({tr(palette.PHASE_WORDS[phase]): palette.PHASE_COLOURS[phase] for phase in shown}))


def _take_region() -> None:
    """The region dragged over, as edges; they, not the brush, are what the page shows and the address keeps."""
    dragged = st.session_state[_CHART].selection.get(BRUSH) or {}
    times, latencies = dragged.get("from_s"), dragged.get("low_s")
    if times and latencies:
        edges = (*sorted(times), *sorted(latencies))
        for name, value in zip(_EDGES, edges, strict=True):
            st.session_state[name] = round(float(value), 3)


def _region(chosen: Chosen, bounds: dict[str, Any]) -> Chosen:
    """The edges, with the whole map as the default: then nothing is left out."""
    last, longest = float(bounds["last_s"]) + 0.001, float(bounds["high_s"]) + 0.001
    most = (last, last, longest, longest)
    whole = (0.0, last, 0.0, longest)
    words = (tr("From second"), tr("To second"), tr("Took at least, s"), tr("Took less than, s"))
    said = []
    for place, word, name, default, high in zip(st.columns(4), words, _EDGES, whole, most, strict=True):
        with place:
            said.append(address.number(word, name, round(default, 3), 0.0, round(high, 3), 1.0))
    edges = [None if value == round(default, 3) else value for value, default in zip(said, whole, strict=True)]
    return replace(chosen, from_s=edges[0], to_s=edges[1], low_s=edges[2], high_s=edges[3])


def _inside(run: Source, region: Chosen, *, whole: bool) -> None:
    counts = kept.ask(counted, run, region)
    total = sum(counts.values())
    named = ", ".join(f"{tr(label)} {n:,}" for label in names.LABELS if (n := counts.get(label)))
    place = tr("In the whole map") if whole else tr("In the region")
    st.markdown(f"**{place}: {total:,}** {tr('requests')}" + (f" · {named}" if named else ""))
    if not total:
        return
    if not whole:
        frame.link("explain", tr("Explain these requests"), **region.address)
    header = tuple(map(tr, ("request", "outcome", "whole", "first token", "most of it", "prompt", "answer", "replica")))
    rows = kept.ask(heat.slowest, run, region)
    st.html(markup.table(header, [_row(row) for row in rows]))
    for column, row in zip(st.columns(5), rows[:5], strict=False):
        with column:
            frame.link("request", tr("Open #{n}", n=row["index"]), request=row["index"])


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    def time(value: float | None) -> str:
        return "–" if value is None else format_seconds(value)

    return (
        f"#{row['index']}",
        words.outcome(row["label"], row["reason"]),
        time(row["e2e_s"]),
        time(row["ttft_s"]),
        tr(palette.PHASE_WORDS[row["phase"]]) if row["phase"] else "–",
        "–" if row["input_tokens"] is None else f"{row['input_tokens']:,}",
        "–" if row["output_tokens"] is None else f"{row['output_tokens']:,}",
        row["replica"] or "–",
    )


if __name__ == "__main__":
    frame.show(draw)
