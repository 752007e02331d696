"""Which run is looked at, in which language, and the list of pages.  ``streamlit run dashboards/entry/app.py``.

Shows the newest run, or the one named by ``?run=ID``, under $TAILSPAN_RUNS or ./runs.  Each page is a file in
``dashboards/pages/``; this one only chooses among them, and tells an empty installation how to make a first run.  It
stands in a folder of its own, because Streamlit would run the files of a folder ``pages`` beside it by itself, and
would put its folder first on the path of every import.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import frame, language, markup, words
from dashboards.language import LANGUAGES, tr
from dashboards.view import list_choices
from telemetry.bundle import runs_root

_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="6" fill="#20242c"/>'
    '<path d="M5 8h14v4H5z" fill="#3A97D4"/><path d="M5 14h19v4H5z" fill="#EBB400"/>'
    '<path d="M5 20h23v4H5z" fill="#D55E00"/></svg>'
)


def main() -> None:
    st.set_page_config(page_title="tailspan", page_icon=_ICON, layout="wide", initial_sidebar_state="auto")
    st.html(markup.STYLE)
    _speak()
    page = st.navigation(_pages(), expanded=True)
    root = runs_root()
    choices = list_choices(root)
    if choices:
        st.session_state[frame.CHOSEN] = str(_choose(choices))
    _choose_language()
    if choices:
        page.run()
    else:
        _first_run(root)


def _pages() -> dict[str, list[st.Page]]:
    def page(name: str, title: str) -> st.Page:
        return st.Page(frame.page_file(name), title=title, url_path=name, default=name == "triage")

    return {
        tr("On call"): [page("triage", tr("Triage")), page("live", tr("Live")), page("run", tr("Run"))],
        tr("Look closer"): [
            page("requests", tr("Requests")),
            page("request", tr("Request")),
            page("heatmap", tr("Heatmap")),
            page("engine", tr("Engine")),
            page("dropped", tr("Dropped")),
            page("quality", tr("Quality")),
        ],
        tr("Decide"): [
            page("slo", tr("SLO")),
            page("compare", tr("Compare")),
            page("explain", tr("Explain")),
            page("traces", tr("Traces")),
            page("share", tr("Share")),
        ],
    }


def _speak() -> None:
    """The language of the address, else the one chosen before, else the browser's."""
    asked = st.query_params.get("lang")
    if asked in LANGUAGES:
        st.session_state["spoken"] = asked
    elif "spoken" not in st.session_state:
        st.session_state["spoken"] = language.guess(st.context.locale)
    language.use(st.session_state["spoken"])


def _choose_language() -> None:
    spoken = st.session_state["spoken"]
    st.session_state["language"] = spoken

    def change() -> None:
        chosen = st.session_state["language"] or spoken
        st.session_state["spoken"] = chosen
        st.query_params["lang"] = chosen

    with st.sidebar:
        st.segmented_control(
            tr("Language"), list(LANGUAGES), key="language", format_func=LANGUAGES.__getitem__, on_change=change
        )


def _choose(choices: dict[str, Path]) -> Path:
    """The run asked for in the address, else the newest; the choice in the sidebar goes into the address."""
    asked = st.query_params.get("run")
    ids = list(choices)
    if asked is not None and asked not in choices:
        st.warning(tr("There is no run {asked!r} here; this is the newest one.", asked=asked))
        asked = None
    if asked is not None and asked != st.session_state.get("asked run"):  # a link was followed
        st.session_state["run"] = asked
    if st.session_state.get("run") not in choices:
        st.session_state["run"] = ids[0]
    with st.sidebar:
        picked: str = st.selectbox(tr("Run"), ids, key="run", format_func=words.when)
        st.caption(tr("{n} runs in {folder}", n=len(ids), folder=runs_root()))
    if asked != picked and (asked is not None or picked != ids[0]):
        st.query_params["run"] = picked
        asked = picked
    st.session_state["asked run"] = asked
    return choices[picked]


def _first_run(root: Path) -> None:
    """An empty installation says how to make a first run."""
    st.title(tr("No run yet"))
    st.markdown(
        tr(
            "tailspan looked for runs in `{folder}` and found none. Make the first one in a terminal:",
            folder=root.resolve(),
        )
    )
    st.code("tailspan demo     # in a fresh clone: make demo", language="bash")
    st.markdown(
        tr(
            "It downloads a small model (93 MB, once), starts an LLM server with it on this machine, replays a minute "
            "of a real arrival trace against it, and gives every request one verdict: good, late, wrong or dropped. "
            "It takes a few minutes. For a server of your own:"
        )
    )
    st.code("tailspan run --trace azure-2023-conv --target http://HOST:PORT --slo chat", language="bash")
    st.markdown(tr("Runs kept elsewhere? Set `TAILSPAN_RUNS` to their folder and start the page again."))
    st.button(tr("Look again"))


if __name__ == "__main__":
    main()
