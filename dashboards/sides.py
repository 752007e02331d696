"""The two sides of a comparison, as the pages Compare and Explain choose and describe them."""

from __future__ import annotations

import streamlit as st

from dashboards import frame, kept, markup, words
from dashboards.language import tr
from dashboards.source import Source
from dashboards.view import list_choices
from telemetry.bundle import runs_root


def choose_base(run: Source) -> Source | None:
    """A list of the other runs, the automatic choice first; says what is missing when there is none."""
    others = [name for name in list_choices(runs_root()) if name != run.bundle.path.name]
    if not others:
        frame.missing(
            tr("There is only one run here."),
            tr("Make another, of the same trace, and come back:"),
            str(run.bundle.manifest.get("command") or "tailspan run --help"),
        )
        return None
    found = frame.base(run)
    at = others.index(found.bundle.path.name) if found is not None and found.bundle.path.name in others else 0

    def change() -> None:
        st.query_params[frame.BASE] = st.session_state["compared with"]

    st.session_state["compared with"] = others[at]  # the address leads, so that a link to another base is followed
    st.selectbox(tr("Compared with (A)"), others, key="compared with", format_func=words.when, on_change=change)
    if found is None:  # no earlier run of the same trace: then the one that the list shows
        st.caption(tr("No earlier run of the same trace: A is another load, so the difference is not the server's."))
        return kept.source(list_choices(runs_root())[others[at]])
    return found


def tell_limits(a: Source, b: Source, pairs: int) -> None:
    """How many pairs stand behind the verdict, and what one pair of runs cannot say."""
    trace = [(side.bundle.manifest.get("trace") or {}).get("name") for side in (a, b)]
    if trace[0] != trace[1]:
        st.warning(tr("A replayed {a} and B replayed {b}: other loads, so no phase is the server's fault by itself.",
                      a=markup.plain(trace[0]), b=markup.plain(trace[1])))  # fmt: skip
    if pairs > 1:
        st.caption(tr("{n} pairs of replays stand behind this; phases and labels are those of these two.", n=pairs))
        return
    st.caption(
        tr(
            "Two runs are one pair: queueing alone moves a p99 from run to run. Repeat both sides in turns (A B A B), "
            "five times each, before you believe a difference."
        )
    )
