"""What is kept between reruns of a page, so that each question is asked of a bundle once.

Keys hold the bundle's stamp (``view.stamp``), which changes when a part or the manifest does, and the hash of the SLO.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import streamlit as st

from dashboards.source import Source, open_source
from dashboards.view import View, load, stamp
from telemetry import slo
from telemetry.summary import Summary, summarize

T = TypeVar("T")
P = ParamSpec("P")
Mark = tuple[int, int]


def source(path: Path, policy: slo.Slo | None = None) -> Source:
    """The run at ``path``, under ``policy`` or its own SLO; its verdicts are read once."""
    return _source(str(path), stamp(path), None if policy is None else policy.hash, policy)


def summary(run: Source) -> Summary:
    """What the command line says of the run."""
    return _summary(str(run.bundle.path), stamp(run.bundle.path), run.policy.hash, run)


def view(path: Path) -> View:
    """What the run page shows; its summary is the one that the other pages show."""
    mark = stamp(path)
    run = _source(str(path), mark, None, None)
    return _view(str(path), mark, _summary(str(path), mark, run.policy.hash, run))


def ask(question: Callable[Concatenate[Source, P], T], run: Source, *args: P.args, **asked: P.kwargs) -> T:
    """``question(run, ...)``, asked once per run, SLO and arguments."""
    name = f"{question.__module__}.{question.__qualname__}"
    mark = stamp(run.bundle.path)
    found: T = _answer(name, str(run.bundle.path), mark, run.policy.hash, args, asked, question, run)
    return found


@st.cache_resource(max_entries=4, show_spinner=False)
def _source(path: str, mark: Mark, slo_hash: str | None, _policy: slo.Slo | None) -> Source:
    return open_source(Path(path), _policy)


@st.cache_data(max_entries=16, show_spinner=False)
def _summary(path: str, mark: Mark, slo_hash: str, _run: Source) -> Summary:
    return summarize(_run.bundle, _run.policy)


@st.cache_data(max_entries=6, show_spinner=False)
def _view(path: str, mark: Mark, _known: Summary) -> View:
    return load(Path(path), known=_known)


@st.cache_data(max_entries=256, show_spinner=False)
def _answer(
    name: str,
    path: str,
    mark: Mark,
    slo_hash: str,
    args: tuple[Any, ...],
    asked: dict[str, Any],
    _question: Callable[..., Any],
    _run: Source,
) -> Any:
    return _question(_run, *args, **asked)
