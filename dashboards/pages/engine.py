"""Engine: what its steps cost by batch and by context, beside the least time the same work could take."""

from __future__ import annotations

import streamlit as st

from dashboards import address, frame, kept, markup
from dashboards.facts import engine_steps, timeline
from dashboards.figures import steps as figures
from dashboards.figures.timeline import strip
from dashboards.language import tr
from dashboards.source import Source
from models.errors import UserError
from telemetry.floor import RunFloor, StepsFloor, floor_of_run


def draw(run: Source) -> None:
    frame.title(tr("Engine"), tr("Step time against batch and context, beside the floor: the least time of that work."))
    if not kept.ask(Source.has, run, "steps"):
        frame.missing(
            tr("There is no step log, so the engine's steps are not known."),
            tr("The bundled engine sends one with every run. For another server, name its device instead:"),
            f"tailspan floor --run {run.bundle.run_id} --model MODEL --device DEVICE",
        )
        return
    clocks = kept.ask(timeline.clocks, run)
    clock: timeline.Clock | None = None
    if clocks:
        replicas = [one.replica for one in clocks]
        chosen = address.picked(tr("Replica"), replicas, "replica") if len(replicas) > 1 else replicas[0]
        clock = next(one for one in clocks if one.replica == chosen)
    by_batch = kept.ask(engine_steps.by_batch, run, clock)
    present = {row["kind"] for row in by_batch}
    st.html(markup.legend({tr(kind): colour for kind, colour in figures.KIND_COLOURS.items() if kind in present}))
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown(f"**{tr('By batch')}**")
        title = tr("sequences in the step")
        st.altair_chart(figures.against(by_batch, "batch", title), width="stretch")
    with right:
        st.markdown(f"**{tr('By context')}**")
        by_context = kept.ask(engine_steps.by_context, run, clock)
        if by_context:
            title = tr("tokens whose keys and values are held")
            st.altair_chart(figures.against(by_context, "context", title), width="stretch")
        else:
            frame.missing(tr("The step log does not say how much context the steps held."), "")
    st.caption(tr("Dot: median step; bar: 10th to 90th percentile; grey dash: median floor of the same steps."))
    _floor(run)
    _through(run, clock)


def _floor(run: Source) -> None:
    st.markdown("#### " + tr("How far from the device's limit"))
    try:
        found = kept.ask(_floor_of, run)
    except UserError as error:
        frame.missing(tr("No floor is known for this run."), markup.plain(f"{error.message}. {error.remedy or ''}"))
        return
    header = tuple(
        map(tr, ("steps", "number", "time in them", "floor", "of the floor reached", "bound by", "bandwidth"))
    )
    rows = [_row(tr(group.group), group) for group in found.kinds]
    rows += [_row(tr("decode, batch {n}", n=group.group), group) for group in found.batches]
    st.html(markup.table(header, rows))
    for premise in found.premises:
        mark = "✗" if premise.holds is False else "✓" if premise.holds else "?"
        st.caption(f"{mark} {premise.statement}: {markup.plain(premise.found)}")
    if found.faster:
        st.warning(tr("{n} steps were faster than their floor: the device's figures are wrong.", n=f"{found.faster:,}"))


def _floor_of(run: Source) -> RunFloor:
    return floor_of_run(run.bundle)


def _row(name: str, group: StepsFloor) -> tuple[str, ...]:
    return (
        name,
        f"{group.steps:,}",
        f"{group.time_s:.2f} s",
        f"{group.floor_s:.2f} s",
        f"{group.efficiency:.0%}",
        tr(group.wall),
        f"{group.bytes_per_s / 1e9:.1f} GB/s",
    )


def _through(run: Source, clock: timeline.Clock | None) -> None:
    st.markdown("#### " + tr("Through the run"))
    if clock is None:
        frame.missing(
            tr("No request can be joined with a step, so the log has no place in the run."),
            tr("Steps and requests are joined by replica and step number."),
        )
        return
    rows = kept.ask(engine_steps.through_run, run, clock)
    if not rows:
        st.caption(tr("The engine ran no step in this window."))
        return
    span = (0.0, max(row["end_s"] for row in rows))
    st.altair_chart(figures.durations(rows), width="stretch")
    st.altair_chart(strip(rows, span), width="stretch")


if __name__ == "__main__":
    frame.show(draw)
