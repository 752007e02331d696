"""Traces: the traffic as it was replayed: arrivals, lengths, classes, and what was done to the trace before."""

from __future__ import annotations

import streamlit as st

from dashboards import frame, kept, markup, queries
from dashboards.facts import traffic
from dashboards.figures import bars
from dashboards.language import tr
from dashboards.palette import PHASE_COLOURS
from dashboards.source import Rows, Source
from telemetry import names


def draw(run: Source) -> None:
    frame.title(tr("Traces"), tr("The traffic as it was replayed: when requests came, and how long they were."))
    totals = kept.ask(traffic.totals, run)
    if not totals["n"]:
        frame.missing(tr("No request has ended yet."), tr("Open Live while the run goes."))
        return
    seconds = totals["last_s"] - totals["first_s"]
    rate = f"{totals['n'] / seconds:.2f}" if seconds > 0 else "–"
    spread = "–" if totals["cv"] is None else f"{totals['cv']:.2f}"
    st.markdown(
        tr("**{n} requests, {rate} a second.** Spread of the gaps between them {cv} (1: Poisson; more: bursts).",
           n=f"{totals['n']:,}", rate=rate, cv=spread)
    )  # fmt: skip
    width = queries.bin_width(totals["last_s"], totals["n"])
    st.altair_chart(bars.arrivals(kept.ask(_load, run, width), width), width="stretch")
    _lengths(run, totals)
    _classes(run)
    _made_of(run)


def _load(run: Source, bin_s: float) -> Rows:
    return run.ask(queries.LOAD_OVER_TIME, bin_s=bin_s)


def _lengths(run: Source, totals: dict[str, object]) -> None:
    rows = kept.ask(traffic.lengths, run)
    colours = {"prompt": PHASE_COLOURS[names.PREFILL], "answer": PHASE_COLOURS[names.DECODE]}
    facts = {"prompt": ("input_mean", "input_p99"), "answer": ("output_mean", "output_p99")}
    titles = {"prompt": tr("Prompts"), "answer": tr("Answers asked for")}
    for column, (kind, title) in zip(st.columns(2, gap="medium"), titles.items(), strict=True):
        own = [row for row in rows if row["kind"] == kind]
        with column:
            st.markdown(f"**{title}**")
            if not own:
                frame.missing(tr("Their lengths are not known."), "")
                continue
            mean, most = (totals[name] for name in facts[kind])
            st.altair_chart(bars.lengths(own, colours[kind]), width="stretch")
            st.caption(tr("mean {mean}, p99 {p99} tokens", mean=f"{mean:,.0f}", p99=f"{most:,}"))


def _classes(run: Source) -> None:
    rows = kept.ask(traffic.classes, run)
    if len(rows) < 2:
        return
    header = tuple(map(tr, ("class", "requests", "prompt tokens, mean", "answer tokens, mean")))
    shown = [(r["name"] or "–", f"{r['n']:,}", _mean(r["input_mean"]), _mean(r["output_mean"])) for r in rows]
    st.html(markup.table(header, shown))


def _mean(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _made_of(run: Source) -> None:
    st.markdown("#### " + tr("Where it comes from"))
    manifest = run.bundle.manifest
    trace = manifest.get("trace") or {}
    rows = [(tr(name), str(trace[key])) for key, name in _FACTS.items() if trace.get(key) not in (None, "", [], {})]
    dropped = {reason: n for reason, n in (trace.get("rows_dropped") or {}).items() if n}
    rows += [(tr("left out: {reason}", reason=reason), f"{n:,}") for reason, n in dropped.items()]
    for change in manifest.get("transforms") or ():
        rows.append((tr("change"), _change(change)))
    if not rows:
        frame.missing(tr("The manifest does not say."), "")
        return
    st.html(markup.table((tr("what"), tr("value")), rows, words=True))
    st.caption(tr("Traces that can be replayed:"))
    st.code("tailspan traces list", language="bash")


_FACTS = {
    "name": "trace", "format": "format", "source": "source", "synthetic": "synthetic", "rows_read": "rows read",
    "rows_kept": "rows kept", "inversions": "rows out of order",
}  # fmt: skip


def _change(change: object) -> str:
    if not isinstance(change, dict):
        return str(change)
    rest = ", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                     for key, value in change.items() if key != "name")  # fmt: skip
    return f"{change.get('name', '')}: {rest}"


if __name__ == "__main__":
    frame.show(draw)
