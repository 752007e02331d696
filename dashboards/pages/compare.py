"""Compare: did a figure really move? Then the two runs side by side: labels, phases, percentiles, what was different.

The verdict is ``telemetry.compare``'s, over all pairs of the run's group where it has one; the page only draws.
"""

from __future__ import annotations

import streamlit as st

from dashboards import charts, frame, kept, markup, sides, words
from dashboards.facts import changed, pairs
from dashboards.figures import change
from dashboards.language import tr
from dashboards.source import Source
from telemetry import names
from telemetry.compare import text as compared_text
from telemetry.stats import Percentile
from telemetry.summary import Summary, format_seconds, format_share


def draw(run: Source) -> None:
    frame.title(tr("Compare"), tr("Two runs side by side: A is compared with, B is the run chosen at the left."))
    base = sides.choose_base(run)
    if base is None:
        return
    a, b = kept.summary(base), kept.summary(run)
    for side, summary in (("A", a), ("B", b)):
        said = f"{side}: {summary.sentence}"
        st.html(markup.verdict(said, words.soundness(summary), words.verdict_colour(summary)))
    paths = changed.sides(run, base)
    sides.tell_limits(base, run, len(paths[0]))
    _moved(run, paths)
    _labels(a, b)
    _phases(a, b)
    _percentiles(a, b)
    _changes(base, run)


def _moved(run: Source, paths: changed.Paths) -> None:
    st.markdown("#### " + tr("Did it really move?"))
    with st.spinner(tr("Comparing …")):
        found = kept.ask(changed.compared, run, paths)
    colour = change.COLOURS["worse"] if found.worse or found.refused else "#8C8C8C"
    st.html(markup.verdict(found.sentence, compared_text.title(found) if found.effects else "", colour))
    if any(one.relative and one.change is not None for one in found.effects):
        left, right = st.columns(2)
        with left:
            st.markdown("**" + tr("Changes, with intervals that hold for all at once") + "**")
            st.altair_chart(change.forest(found.effects), width="stretch")
        with right:
            st.markdown("**" + tr("Each request in A and in B, end to end") + "**")
            points = kept.ask(changed.scatter, run, paths, "e2e")
            if points:
                st.altair_chart(change.scatter(points), width="stretch")
            else:
                frame.missing(tr("No request was answered on both sides."), "")
    if found.effects:
        st.html(markup.table(compared_text.headers(found), [compared_text.cells(one) for one in found.effects]))
    for line in compared_text.closing(found):
        st.caption(markup.plain(line))


def _labels(a: Summary, b: Summary) -> None:
    rows = []
    for label in names.LABELS:
        if a.labels[label] or b.labels[label]:
            shares = [s.labels[label] / s.attempted if s.attempted else 0.0 for s in (a, b)]
            rows.append(
                (tr(label), f"{a.labels[label]:,}", format_share(shares[0]), f"{b.labels[label]:,}",
                 format_share(shares[1]), f"{100 * (shares[1] - shares[0]):+.1f}")
            )  # fmt: skip
    header = (tr("outcome"), "A", tr("share"), "B", tr("share"), tr("points"))
    st.html(markup.table(header, rows))


def _phases(a: Summary, b: Summary) -> None:
    st.markdown("#### " + tr("Phases side by side"))
    if not a.phases or not b.phases:
        frame.missing(tr("One of them answered no request, so there is no time to divide."), "")
        return
    if a.phases[0].from_server != b.phases[0].from_server:
        st.info(tr("Only one of the two servers gives an account of its phases: they are not of one kind."))
    st.html(words.phase_legend([split.parts for split in (*a.phases, *b.phases)]))
    for column, (title, splits) in zip(
        st.columns(2),
        (("Whole answer, end to end", (a.phases, b.phases)), ("Time to first token", (a.ttft_phases, b.ttft_phases))),
        strict=True,
    ):
        rows, order = [], []
        for one, two in zip(*splits, strict=True):
            for side, split in (("A", one), ("B", two)):
                name = f"p{split.p:g} {side}"
                order.append(name)
                rows += charts.stack_rows(name, split.parts)
        with column:
            st.markdown(f"**{tr(title)}**")
            st.altair_chart(charts.phase_stacks(rows, order), width="stretch")


def _percentiles(a: Summary, b: Summary) -> None:
    st.markdown("#### " + tr("Percentiles"))
    rows = []
    for name, one, two in pairs.paired_percentiles(a, b):
        apart = _apart(one, two)
        rows.append((name, _value(one), words.band(one), _value(two), words.band(two), _change(one, two), apart))
    header = ("", "A", tr("95 % band"), "B", tr("95 % band"), tr("change"), tr("bands"))
    st.html(markup.table(header, rows))
    st.caption(
        tr("From the intended send; a request without an answer counts as infinitely slow. Bands that do not meet are "
           "no proof: they take requests for independent, which a queue makes them not.")
    )  # fmt: skip


def _value(value: Percentile) -> str:
    if value.unbounded:
        return tr("unbounded")
    return "–" if value.value is None else format_seconds(value.value)


def _change(one: Percentile, two: Percentile) -> str:
    if one.value is None or two.value is None or one.value <= 0:
        return "–"
    return f"{100 * (two.value / one.value - 1):+.0f} %"


def _apart(one: Percentile, two: Percentile) -> str:
    if None in (one.low, one.high, two.low, two.high):
        return "–"
    meet = one.low <= two.high and two.low <= one.high  # type: ignore[operator]
    return tr("meet") if meet else tr("apart")


def _changes(base: Source, run: Source) -> None:
    st.markdown("#### " + tr("What was run differently"))
    changes = pairs.differences(base.bundle.manifest, run.bundle.manifest)
    if not changes:
        st.caption(tr("Nothing in the manifests: same plan, versions and hashes."))
        return
    st.html(markup.table((tr("what"), "A", "B"), changes, words=True))


if __name__ == "__main__":
    frame.show(draw)
