"""Run: one run, from the verdict down to its slowest requests.

It only draws: every figure comes from ``view.load``, which asks the functions behind the command line.  A run that is
still going is read again every few seconds.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import address, charts, frame, kept, language, markup, palette, words
from dashboards.language import tr
from dashboards.source import Source
from dashboards.view import Slow, View, is_running, slowest, stamp
from models.errors import UserError
from telemetry import names
from telemetry.summary import Summary

_REFRESH_S = 3.0
_ANY = ""


def draw(run: Source) -> None:
    path = run.bundle.path
    if is_running(path):
        st.fragment(_run_so_far, run_every=_REFRESH_S)(path)
    else:
        _run(path)


def _run_so_far(path: Path) -> None:
    """A run that is going is read again on every refresh; when it ends the whole page is, once."""
    language.use(st.session_state["spoken"])
    if not is_running(path):
        st.rerun(scope="app")
    _run(path)


def _run(path: Path) -> None:
    try:
        view = kept.view(path)
    except UserError as error:
        frame.refuse(error, path)
        return
    _verdict(view)
    if view.rows_so_far == 0:
        st.info(tr("No request has ended yet.") if view.running else tr("This run holds no request."))
        return
    _over_time(view)
    _phases(view)
    _slowest(path, view)
    _percentiles(view.summary)
    _facts(view)


def _verdict(view: View) -> None:
    summary = view.summary
    trusted, whether = words.is_final(view), words.validity(view)
    first, second = (
        (summary.sentence, whether)
        if trusted
        else (whether, tr("Of those requests alone: {sentence}", sentence=summary.sentence))
    )
    st.html(markup.verdict(first, second, words.colour(view)))
    if view.running and not view.writer_alive:
        st.warning(tr("The process that wrote this run has gone. Bring back what it left and close the run:"))
        st.code(f"tailspan runs check {summary.run_id} --repair", language="bash")
    st.html(markup.tiles(words.tiles(summary)))
    st.html(markup.asks(words.asks(summary)))


def _over_time(view: View) -> None:
    st.markdown("#### " + tr("Outcomes over time, above the offered load"))
    present = [label for label in names.LABELS if view.summary.labels[label]]
    st.html(markup.legend({tr(label): palette.LABEL_COLOURS[label] for label in present}))
    st.altair_chart(charts.outcomes_over_load(view.outcomes, view.load, view.bin_s), width="stretch")
    absent = view.summary.attempted - view.rows_so_far
    if absent > 0:
        st.caption(tr("{n} requests left no row: they are counted above and have no place in time.", n=f"{absent:,}"))
    if view.summary.overload:
        st.info(view.summary.overload)


def _phases(view: View) -> None:
    st.markdown("#### " + tr("Where the time goes"))
    splits = [split for found in view.splits.values() for split in found]
    if not splits:
        st.caption(tr("No request was answered, so there is no time to divide."))
        return
    st.html(words.phase_legend([split.parts for split in splits]))
    for column, (measure, title) in zip(st.columns(2), words.MEASURES.items(), strict=True):
        found = view.splits[measure]
        if not found:
            continue
        rows = [row for split in found for row in charts.stack_rows(f"p{split.p:g}", split.parts)]
        with column:
            st.markdown(f"**{tr(title)}**")
            st.altair_chart(charts.phase_stacks(rows, [f"p{split.p:g}" for split in found]), width="stretch")
    st.caption(
        tr(
            "Mean phases of the requests ranked near each percentile, scaled to sum to it; {n} answered requests, "
            "from the intended send.",
            n=f"{splits[0].n:,}",
        )
        + ("" if splits[0].from_server else " " + tr("The server gives no account of its own: client's view."))
    )


def _slowest(path: Path, view: View) -> None:
    st.markdown("#### " + tr("The slowest requests"))
    left, right = st.columns(2)
    with left:
        by = address.choice(tr("Ranked by"), ("e2e", "ttft"), "by", {m: tr(t) for m, t in words.MEASURES.items()})
    with right:
        present = [label for label in names.LABELS if view.summary.labels[label]]
        shown = {_ANY: tr("all but invalid")} | {label: tr(label) for label in present}
        label = address.picked(tr("Outcome"), list(shown), "label", shown)
    found = _load_slowest(str(path), stamp(path), by, label or None)
    if not found:
        st.caption(tr("None of them got so far."))
        return
    rows = [row for slow in found for row in charts.stack_rows(f"#{slow.index}", slow.parts)]
    ends = [
        {
            "name": f"#{slow.index}",
            "total_s": slow.total_s,
            "verdict": words.outcome(slow.label, slow.reason),
            "label": slow.label,
            "first_token_s": slow.first_token_s,
        }
        for slow in found
    ]
    st.html(words.phase_legend([slow.parts for slow in found]))
    st.altair_chart(charts.worst_requests(rows, ends), width="stretch")
    st.caption(
        tr("The upright tick is the first token. Phases stand in their order; stalls lie inside prefill or decode.")
    )
    with st.expander(tr("The same as a table")):
        st.html(markup.table(map(tr, words.SLOW_HEADER), [words.slow_row(slow) for slow in found]))


def _percentiles(summary: Summary) -> None:
    st.markdown("#### " + tr("Percentiles"))
    st.html(markup.table(map(tr, words.PERCENTILE_HEADER), words.percentile_rows(summary)))
    if (note := words.uncertified(summary)) is not None:
        st.markdown(note.replace("*", r"\*"))
    st.caption(
        tr(
            "From the intended send. Requests without an answer count as infinitely slow, except under *answered only*."
            " The band holds the true percentile with 95 %. TPOT: time per output token after the first."
        )
    )


def _facts(view: View) -> None:
    with st.expander(tr("About this run")):
        st.html(markup.table((tr("what"), tr("value")), view.facts))
        st.code(f"tailspan runs show {view.summary.run_id}", language="bash")


@st.cache_data(max_entries=24, show_spinner=False)
def _load_slowest(path: str, mark: tuple[int, int], by: str, label: str | None) -> list[Slow]:
    return slowest(Path(path), by=by, label=label)


if __name__ == "__main__":
    frame.show(draw)
