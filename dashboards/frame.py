"""The frame around every page: the chosen run, links that keep it, and what is said where a run has no data.

Must always hold: a run that cannot be read is named with the remedy, and a page without data says what is missing and
how to get it, never an empty chart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import streamlit as st

from dashboards import kept, markup, words
from dashboards.facts import pairs
from dashboards.language import tr
from dashboards.source import Source
from dashboards.view import is_running, list_choices
from models.errors import UserError
from telemetry import names
from telemetry.bundle import runs_root

#: Where ``app`` leaves the folder of the run that the visitor chose.
CHOSEN: Final = "chosen run"
#: Beside a page's own values in an address: run, the run compared with, language.
BASE: Final = "base"


def show(draw: Callable[[Source], None]) -> None:
    """Draw a page for the chosen run."""
    path = Path(st.session_state[CHOSEN])
    try:
        run = kept.source(path)
        _head(run)
        draw(run)
    except UserError as error:
        refuse(error, path)


def refuse(error: UserError, path: Path) -> None:
    """Say why a run cannot be read, and what to do."""
    where = error.where or path
    st.error(tr("This run cannot be read.") + f" {markup.plain(where)}: {markup.plain(error.message)}")
    if error.remedy:
        st.markdown(f"{tr('Remedy')}: {markup.plain(error.remedy)}")


def _head(run: Source) -> None:
    manifest = run.bundle.manifest
    trace = str((manifest.get("trace") or {}).get("name", ""))
    simulated = manifest.get(names.SIMULATED_KEY)
    notes = [trace, f"SLO {run.policy.name}", f"SIMULATED: {simulated}" if simulated else ""]
    if is_running(run.bundle.path):
        notes.append(tr("still running"))
    st.html(markup.head(words.when(run.bundle.run_id), *notes))


def title(text: str, what: str) -> None:
    """The page's name and, in one line, what it answers."""
    st.html(markup.title(text, what))


def missing(what: str, how: str, command: str | None = None) -> None:
    """What this run has no data for, and how to get it."""
    st.info(f"{what} {how}")
    if command:
        st.code(command, language="bash")


def parameters(**own: object) -> dict[str, str]:
    """The address of another view of the same run."""
    found = {"run": Path(st.session_state[CHOSEN]).name}
    for kept_name in (BASE, "lang"):
        if (value := st.query_params.get(kept_name)) is not None:
            found[kept_name] = value
    return found | {name: str(value) for name, value in own.items() if value is not None}


def page_file(name: str) -> Path:
    """The script of a page."""
    return Path(__file__).parent / "pages" / f"{name}.py"


def link(page: str, label: str, /, **own: object) -> None:
    """A link to another page on the same run, with that page's values."""
    st.page_link(page_file(page), label=label, query_params=parameters(**own))


def base(run: Source) -> Source | None:
    """The run to compare with: the one in the address, else an earlier one of the same trace; None: there is none."""
    choices = list_choices(runs_root())
    asked = st.query_params.get(BASE)
    if asked in choices and asked != run.bundle.path.name:
        path: Path | None = choices[asked]
    else:
        path = pairs.earlier_run(run.bundle, list(choices.values()))
    try:
        return None if path is None else kept.source(path)
    except UserError:
        return None
