"""The widgets by which a page lets the visitor choose among requests; each stands in the address (``address``)."""

from __future__ import annotations

import streamlit as st

from dashboards import address, kept, words
from dashboards.facts.chosen import Chosen, kinds
from dashboards.language import tr
from dashboards.palette import PHASE_WORDS
from dashboards.source import Source

_ANY = ""


def kinds_of_requests(run: Source) -> Chosen:
    """Outcome, dominant phase, class and replica; the ones that occur only once in a run are not asked for."""
    columns = {"label": tr("Outcome"), "phase": tr("Most time in"), "class": tr("Class"), "replica": tr("Replica")}
    found = {column: kept.ask(kinds, run, column) for column in columns}
    shown = {column: title for column, title in columns.items() if len(found[column]) > 1}
    said: dict[str, str | None] = dict.fromkeys(columns)
    for place, (column, title) in zip(st.columns(max(1, len(shown))), shown.items(), strict=False):
        names = {_ANY: tr("all")} | {kind: _word(column, kind) for kind in found[column]}
        with place:
            said[column] = address.picked(title, list(names), column, names) or None
    return Chosen(label=said["label"], phase=said["phase"], traffic_class=said["class"], replica=said["replica"])


def measure() -> str:
    """``e2e`` or ``ttft``."""
    return address.choice(tr("Time"), ("e2e", "ttft"), "by", {name: tr(word) for name, word in words.MEASURES.items()})


def _word(column: str, kind: str) -> str:
    if column == "label":
        return tr(kind)
    return tr(PHASE_WORDS.get(kind, kind)) if column == "phase" else kind
