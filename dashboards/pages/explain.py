"""Explain: why it changed, with evidence and what would disprove it; then which phases made the difference.

The hypotheses are ``telemetry.explain``'s; the phases alone say where the time went, not why: a longer queue is most
often the symptom of slower or longer work ahead of it.
"""

from __future__ import annotations

import streamlit as st

from dashboards import address, frame, kept, markup, palette, sides
from dashboards.facts import changed, pairs
from dashboards.facts.chosen import Chosen, counted
from dashboards.figures import change
from dashboards.figures.waterfall import COLOURS, step_word, waterfall
from dashboards.language import tr
from dashboards.source import Source
from telemetry import names
from telemetry.explain import Explanation
from telemetry.explain.text import headline, hypothesis_lines, tables
from telemetry.phases import Split
from telemetry.summary import PHASE_PERCENTILES, format_seconds

_RUNS, _WITHIN = "runs", "within"


def draw(run: Source) -> None:
    frame.title(tr("Explain"), tr("Why it changed, in which phases, and for whom."))
    left, right = st.columns(2)
    with left:
        how = address.choice(
            tr("Compare"), (_RUNS, _WITHIN), "how",
            {_RUNS: tr("two runs"), _WITHIN: tr("first third with last third of this run")},
        )  # fmt: skip
    if how == _WITHIN:
        growth = kept.summary(run).growth
        if growth is None:
            frame.missing(
                tr("Fewer than 30 answered requests: too few to divide the run in thirds."),
                tr("Make a longer run."),
                "tailspan run --help",
            )
            return
        title = tr("Time to first token, p{p}", p=f"{growth.p:g}")
        _difference(growth.first, growth.last, title, tr("first third"), tr("last third"))
        return
    with right:
        ps = [f"{p:g}" for p in PHASE_PERCENTILES]
        asked = address.choice(tr("Percentile"), ps, "p", default="90")
    base = sides.choose_base(run)
    if base is None:
        return
    paths = changed.sides(run, base)
    _why(run, paths)
    st.markdown("#### " + tr("Phases"))
    a, b = kept.summary(base), kept.summary(run)
    for title, of_a, of_b in (
        (tr("Whole answer, end to end"), a.phases, b.phases),
        (tr("Time to first token"), a.ttft_phases, b.ttft_phases),
    ):
        one, two = (pairs.find_split(splits, float(asked)) for splits in (of_a, of_b))
        if one is None or two is None:
            frame.missing(tr("One of them answered no request, so there is no time to divide."), "")
            return
        _difference(one, two, f"{title}, p{asked}", "A", "B")
    sides.tell_limits(base, run, len(paths[0]))


def _why(run: Source, paths: changed.Paths) -> None:
    if kept.ask(changed.size, run, paths) > changed.AT_ONCE and not st.toggle(
        tr("Explain these large runs (up to a minute)")
    ):
        return
    chosen = Chosen.of_address(st.query_params)
    if not chosen.empty:
        n = sum(kept.ask(counted, run, chosen).values())
        st.info(tr("Why for the {n} requests that were chosen on the heatmap; the phases below are of the whole runs.",
                   n=f"{n:,}"))  # fmt: skip
        frame.link("explain", tr("Explain the whole run"))
        if not n:
            return
    with st.spinner(tr("Replaying what-ifs …")):
        found: Explanation = kept.ask(changed.explained, run, paths, chosen)
    calm = found.label == "none"
    st.html(markup.verdict(headline(found), "; ".join(found.limits), "#8C8C8C" if calm else change.COLOURS["worse"]))
    boxes = []
    for place, one in enumerate(found.hypotheses, 1):
        first, *rest = hypothesis_lines(place, one)
        boxes.append((first, [line.strip() for line in rest]))
    if not calm:  # else the headline has said it
        st.html(markup.cards(boxes))
    for index in found.hypotheses[0].requests[:3]:
        frame.link("request", tr("request {index}", index=index), request=index)
    if found.causes is not None and not calm:
        st.markdown("#### " + tr("What each cause makes of it"))
        st.altair_chart(change.causes(found.causes.shares), width="stretch")
    for title, header, rows in tables(found):
        st.markdown(f"**{markup.plain(title)}**")
        st.html(markup.table(header, rows))


def _difference(a: Split, b: Split, title: str, name_a: str, name_b: str) -> None:
    st.markdown(f"#### {title}")
    if a.from_server != b.from_server:
        st.info(tr("Only one of the two servers gives an account of its phases: they are not of one kind."))
        return
    steps = pairs.waterfall(a, b)
    st.markdown(_sentence(steps, a, b, name_a, name_b))
    st.html(markup.legend({tr("more time"): COLOURS["more"], tr("less time"): COLOURS["less"]}))
    st.altair_chart(waterfall(pairs.worth_showing(steps, 7)), width="stretch")
    rows = [
        (step_word(step), format_seconds(a.parts.get(step.name, 0.0)), format_seconds(b.parts.get(step.name, 0.0)),
         f"{'+' if step.change_s >= 0 else '−'}{format_seconds(abs(step.change_s))}")
        for step in steps
        if not step.whole and max(a.parts.get(step.name, 0.0), b.parts.get(step.name, 0.0)) > 0
    ]  # fmt: skip
    rows.append((tr("whole"), format_seconds(a.total_s), format_seconds(b.total_s),
                 f"{'+' if b.total_s >= a.total_s else '−'}{format_seconds(abs(b.total_s - a.total_s))}"))  # fmt: skip
    st.html(markup.table((tr("phase"), name_a, name_b, tr("change")), rows))


def _sentence(steps: list[pairs.Step], a: Split, b: Split, name_a: str, name_b: str) -> str:
    change = b.total_s - a.total_s
    largest = max((step for step in steps if not step.whole), key=lambda step: abs(step.change_s))
    said = tr(
        "From {a} ({name_a}) to {b} ({name_b}); the largest part of it: {phase}, {sign}{t}.",
        a=format_seconds(a.total_s),
        b=format_seconds(b.total_s),
        name_a=name_a,
        name_b=name_b,
        phase=tr(palette.PHASE_WORDS[largest.name]),
        sign="+" if largest.change_s >= 0 else "−",
        t=format_seconds(abs(largest.change_s)),
    )
    if largest.name == names.QUEUE and change > 0:
        said += " " + tr(
            "A queue grows when work arrives faster than it is done: look at load, lengths and steps next."
        )
    return said


if __name__ == "__main__":
    frame.show(draw)
