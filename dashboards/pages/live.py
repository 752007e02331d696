"""Live: a run while it goes, read again every two seconds; nothing here is a verdict yet."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import charts, frame, kept, language, markup, palette, words
from dashboards.facts import under_way
from dashboards.language import tr
from dashboards.source import Source
from dashboards.view import is_running, list_choices
from models.errors import UserError
from telemetry import names
from telemetry.bundle import runs_root

_REFRESH_S = 2.0
_LOOKED_AT = 20  # newest runs among which one that goes is looked for


def draw(run: Source) -> None:
    frame.title(tr("Live"), tr("A run while it goes, read again every two seconds."))
    going = _going(run.bundle.path)
    if going is None:
        frame.missing(
            tr("No run is going here."),
            tr("Start one in a terminal; this page finds it:"),
            "tailspan run --trace azure-2023-conv --duration 60 --target http://HOST:PORT --slo chat",
        )
        frame.link("triage", tr("The triage of the chosen run"))
        if st.button(tr("Look again")):
            st.rerun()
        return
    st.fragment(_follow, run_every=_REFRESH_S)(going)


def _going(chosen: Path) -> Path | None:
    """The chosen run if it goes, else the newest that does."""
    newest = list(list_choices(runs_root()).values())[:_LOOKED_AT]
    return next((path for path in (chosen, *newest) if is_running(path)), None)


def _follow(path: Path) -> None:
    language.use(st.session_state["spoken"])
    if not is_running(path):
        st.rerun(scope="app")
    try:
        _now(path)
    except UserError as error:
        frame.refuse(error, path)


def _now(path: Path) -> None:
    view = kept.view(path)
    run = kept.source(path)
    summary = view.summary
    scheduled = int(summary.validity.figures["scheduled"] or 0)
    st.markdown(f"**{markup.plain(words.when(run.bundle.run_id))}**")
    st.progress(min(1.0, view.rows_so_far / scheduled) if scheduled else 0.0, text=words.validity(view))
    found = kept.ask(under_way.progress, run)
    st.html(markup.tiles(words.tiles(summary)))
    if found["now_s"] is not None:
        st.markdown(
            tr("At {now} s: {n} requests ended in the last {w} s ({rate} a second), {bad} of them not good.",
               now=f"{found['now_s']:.0f}", n=f"{found['recent']:,}", w=f"{under_way.RECENT_S:g}",
               rate=f"{found['per_s']:.1f}", bad=f"{found['recent_bad']:,}")
        )  # fmt: skip
    gauges = kept.ask(under_way.gauges, run)
    if gauges:
        header = (tr("right now"), tr("source"), tr("value"), tr("at"))
        rows = [(tr(under_way.GAUGES[g["name"]]), g["source"], _value(g), f"{g['t_s']:.0f} s") for g in gauges]
        st.html(markup.table(header, rows, words=True))
    else:
        st.caption(tr("No gauge was scraped yet."))
    if view.rows_so_far:
        present = [label for label in names.LABELS if summary.labels[label]]
        st.html(markup.legend({tr(label): palette.LABEL_COLOURS[label] for label in present}))
        st.altair_chart(charts.outcomes_over_load(view.outcomes, view.load, view.bin_s), width="stretch")


def _value(gauge: dict[str, object]) -> str:
    value = gauge["value"]
    if not isinstance(value, float):
        return "–"
    return f"{value:.0%}" if gauge["name"] == names.M_KV_USAGE else f"{value:,.0f}"


if __name__ == "__main__":
    frame.show(draw)
