"""The page: one run, from the verdict down to its slowest requests.  ``streamlit run dashboards/app.py``.

Shows the newest run, or the one named by ``?run=ID``, under $TAILSPAN_RUNS or ./runs.  It only draws: every figure
comes from ``view.load``, which asks the functions behind the command line.  A run that is still going is read again
every few seconds.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import charts, markup, palette, words
from dashboards.view import Slow, View, is_running, list_choices, load, slowest, stamp
from models.errors import UserError
from telemetry import names
from telemetry.bundle import runs_root
from telemetry.summary import Summary

_REFRESH_S = 3.0
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="6" fill="#20242c"/>'
    '<path d="M5 8h14v4H5z" fill="#3A97D4"/><path d="M5 14h19v4H5z" fill="#EBB400"/>'
    '<path d="M5 20h23v4H5z" fill="#D55E00"/></svg>'
)


def main() -> None:
    st.set_page_config(page_title="tailspan", page_icon=_ICON, layout="wide", initial_sidebar_state="auto")
    st.html(markup.STYLE)
    root = runs_root()
    choices = list_choices(root)
    if not choices:
        _first_run(root)
        return
    path = _choose(choices)
    if is_running(path):
        st.fragment(_run_so_far, run_every=_REFRESH_S)(path)
    else:
        _run(path)


def _first_run(root: Path) -> None:
    """An empty installation says how to make a first run."""
    st.title("No run yet")
    st.markdown(f"tailspan looked for runs in `{root.resolve()}` and found none. Make the first one in a terminal:")
    st.code("tailspan demo     # in a fresh clone: make demo", language="bash")
    st.markdown(
        "It downloads a small model (93 MB, once), starts an LLM server with it on this machine, replays a minute of a "
        "real arrival trace against it, and gives every request one verdict: good, late, wrong or dropped. "
        "It takes a few minutes. For a server of your own:"
    )
    st.code("tailspan run --trace azure-2023-conv --target http://HOST:PORT --slo chat", language="bash")
    st.markdown("Runs kept elsewhere? Set `TAILSPAN_RUNS` to their folder and start the page again.")
    st.button("Look again")


def _choose(choices: dict[str, Path]) -> Path:
    """The run asked for in the address, else the newest; the choice in the sidebar goes into the address."""
    asked = st.query_params.get("run")
    ids = list(choices)
    if asked is not None and asked not in choices:
        st.warning(f"There is no run {asked!r} here; this is the newest one.")
    if st.session_state.get("run") not in choices:
        st.session_state["run"] = asked if asked in choices else ids[0]
    with st.sidebar:
        st.header("tailspan")
        picked: str = st.selectbox("Run", ids, key="run", format_func=_when)
        st.caption(f"{len(ids)} run{'s' if len(ids) != 1 else ''} in {runs_root()}")
    if asked != picked and (asked is not None or picked != ids[0]):
        st.query_params["run"] = picked
    return choices[picked]


def _when(run_id: str) -> str:
    """``20260102-030405-ab12`` as ``2026-01-02 03:04:05 · ab12``."""
    day, _, rest = run_id.partition("-")
    clock, _, tag = rest.partition("-")
    if len(day) == 8 and len(clock) == 6 and (day + clock).isdigit():
        return f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}:{clock[4:]} · {tag}"
    return run_id


def _run_so_far(path: Path) -> None:
    """A run that is going is read again on every refresh; when it ends the whole page is, once."""
    if not is_running(path):
        st.rerun(scope="app")
    _run(path)


def _run(path: Path) -> None:
    try:
        view = _load(str(path), stamp(path))
    except UserError as error:
        st.error(f"This run cannot be read. {error.where or path}: {error.message}")
        if error.remedy:
            st.markdown(f"Remedy: {error.remedy}")
        return
    _verdict(view)
    if view.rows_so_far == 0:
        st.info("No request has ended yet." if view.running else "This run holds no request.")
        return
    _over_time(view)
    _phases(view)
    _slowest(path, view)
    _percentiles(view.summary)
    _facts(view)


def _verdict(view: View) -> None:
    summary = view.summary
    st.html(markup.head(_when(summary.run_id), summary.trace, f"SLO {summary.slo}"))
    trusted, whether = words.is_final(view), words.validity(view)
    first, second = (
        (summary.sentence, whether) if trusted else (whether, f"Of those requests alone: {summary.sentence}")
    )
    st.html(markup.verdict(first, second, words.colour(view)))
    if view.running and not view.writer_alive:
        st.warning("The process that wrote this run has gone. Bring back what it left and close the run:")
        st.code(f"tailspan runs check {summary.run_id} --repair", language="bash")
    st.html(markup.tiles(words.tiles(summary)))
    st.html(markup.asks(words.asks(summary)))


def _over_time(view: View) -> None:
    st.markdown("#### Outcomes over time, above the offered load")
    present = [label for label in names.LABELS if view.summary.labels[label]]
    st.html(markup.legend({label: palette.LABEL_COLOURS[label] for label in present}))
    st.altair_chart(charts.outcomes_over_load(view.outcomes, view.load, view.bin_s), width="stretch")
    absent = view.summary.attempted - view.rows_so_far
    if absent > 0:
        st.caption(f"{absent:,} requests left no row, so they are counted above and have no place in time.")
    if view.summary.overload:
        st.info(view.summary.overload)


def _phases(view: View) -> None:
    st.markdown("#### Where the time goes")
    splits = [split for found in view.splits.values() for split in found]
    if not splits:
        st.caption("No request was answered, so there is no time to divide.")
        return
    st.html(_phase_legend([split.parts for split in splits]))
    for column, (measure, title) in zip(st.columns(2), words.MEASURES.items(), strict=True):
        found = view.splits[measure]
        if not found:
            continue
        rows = [row for split in found for row in charts.stack_rows(f"p{split.p:g}", split.parts)]
        with column:
            st.markdown(f"**{title}**")
            st.altair_chart(charts.phase_stacks(rows, [f"p{split.p:g}" for split in found]), width="stretch")
    n, source = splits[0].n, "" if splits[0].from_server else " The server gives no account of its own: client's view."
    st.caption(
        f"Mean phases of the requests ranked near each percentile, scaled to sum to it; {n} answered requests, "
        f"from the intended send.{source}"
    )


def _slowest(path: Path, view: View) -> None:
    st.markdown("#### The slowest requests")
    left, right = st.columns(2)
    with left:
        by = st.segmented_control(
            "Ranked by", list(words.MEASURES), default="e2e", format_func=words.MEASURES.__getitem__, key="by"
        )
    with right:
        label = st.selectbox(
            "Outcome",
            [None, *(label for label in names.LABELS if view.summary.labels[label])],
            format_func=lambda label: label or "all but invalid",
            key="label",
        )
    found = _load_slowest(str(path), stamp(path), by or "e2e", label)
    if not found:
        st.caption("None of them got so far.")
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
    st.html(_phase_legend([slow.parts for slow in found]))
    st.altair_chart(charts.worst_requests(rows, ends), width="stretch")
    st.caption("The upright tick is the first token. Phases stand in their order; stalls lie inside prefill or decode.")
    with st.expander("The same as a table"):
        st.html(markup.table(words.SLOW_HEADER, [words.slow_row(slow) for slow in found]))


def _phase_legend(stacks: list[dict[str, float]]) -> str:
    """Only the phases that show: at least a hundredth of some stack."""
    shown = [
        phase
        for phase in palette.PHASE_COLOURS
        if any(parts.get(phase, 0.0) > 0.01 * sum(parts.values()) for parts in stacks)
    ]
    colours = {palette.PHASE_WORDS[phase]: palette.PHASE_COLOURS[phase] for phase in shown}
    return markup.legend(colours, {palette.PHASE_WORDS[phase]: palette.PHASE_MEANING[phase] for phase in shown})


def _percentiles(summary: Summary) -> None:
    st.markdown("#### Percentiles")
    st.html(markup.table(words.PERCENTILE_HEADER, words.percentile_rows(summary)))
    if (note := words.uncertified(summary)) is not None:
        st.markdown(note.replace("*", r"\*"))
    st.caption(
        "From the intended send. Requests without an answer count as infinitely slow, except under *answered only*. "
        "The band holds the true percentile with 95 %. TPOT: time per output token after the first."
    )


def _facts(view: View) -> None:
    with st.expander("About this run"):
        st.html(markup.table(("what", "value"), view.facts))
        st.code(f"tailspan runs show {view.summary.run_id}", language="bash")


@st.cache_data(max_entries=6, show_spinner="Reading the run ...")
def _load(path: str, mark: tuple[int, int]) -> View:
    """Cached by the bundle's files: ``mark`` changes when one of them does."""
    return load(Path(path))


@st.cache_data(max_entries=24, show_spinner=False)
def _load_slowest(path: str, mark: tuple[int, int], by: str, label: str | None) -> list[Slow]:
    return slowest(Path(path), by=by, label=label)


if __name__ == "__main__":
    main()
