"""Triage: one screen for somebody on call.  Is it bad, is it real, who is hit, what changed, where to look next."""

from __future__ import annotations

import streamlit as st

from dashboards import frame, kept, markup, oncall, words
from dashboards.facts import heat, pairs, who
from dashboards.facts.chosen import Chosen
from dashboards.figures.waterfall import waterfall
from dashboards.language import tr
from dashboards.palette import LABEL_COLOURS
from dashboards.source import Source
from telemetry import names, outcomes
from telemetry.summary import Summary

_PHASES_SHOWN = 5
_P = 90.0
_MANY = 100_000  # requests from which on the counts are shown first
_QUIET = LABEL_COLOURS[names.INVALID]


def draw(run: Source) -> None:
    said, counts = st.empty(), st.empty()
    if run.verdicts.num_rows >= _MANY:  # the counts are there long before the percentiles of so many requests
        said.html(markup.verdict(tr("Reading {n} requests …", n=f"{run.verdicts.num_rows:,}"), "", _QUIET))
        counts.html(markup.tiles(words.counted_tiles(kept.ask(_labels, run))))
    summary = kept.summary(run)
    if not summary.attempted:
        frame.missing(tr("This run holds no request."), tr("Open Live while it goes, or choose another run."))
        return
    said.html(_verdict(run, summary))
    counts.html(markup.tiles(oncall.budget_tiles(summary)))
    base = frame.base(run)
    left, right = st.columns([1.1, 1], gap="medium")
    with left:
        _where(summary, None if base is None else kept.summary(base))
    with right:
        compared = None if base is None else base.bundle.run_id
        changes = [] if base is None else pairs.differences(base.bundle.manifest, run.bundle.manifest)
        st.html(
            markup.cards(
                [
                    (tr("Is it real?"), oncall.real_lines(summary, compared)),
                    (tr("Who is hit?"), oncall.who_lines(kept.ask(who.hit, run), summary)),
                    (tr("What changed?"), oncall.change_lines(changes, compared)),
                ]
            )
        )
    left, right = st.columns([1.1, 1], gap="medium")
    with left:
        st.markdown(f"**{tr('Three examples')}**")
        bad = kept.ask(who.examples, run)
        for request in bad or kept.ask(heat.slowest, run, Chosen())[:3]:
            frame.link("request", oncall.example_line(request), request=request["index"])
    with right:
        check = oncall.next_check(summary, kept.ask(who.late_phase, run))
        st.markdown(f"**{tr('Next check')}** – {check.text}")
        frame.link(check.page, check.link)
        st.code(check.command, language="bash")


def _labels(run: Source) -> dict[str, int]:
    return outcomes.counts(run.verdicts)


def _verdict(run: Source, summary: Summary) -> str:
    said, sound = summary.sentence, words.soundness(summary)
    if summary.validity.verdict != names.VALID:
        said, sound = sound, tr("Of those requests alone: {sentence}", sentence=summary.sentence)
    since = oncall.since_line(summary, kept.ask(who.since, run))
    return markup.verdict(said, f"{since} {sound}", words.verdict_colour(summary))


def _where(summary: Summary, other: Summary | None) -> None:
    """The phases of A against B: the run before against this one, else the first third of this run against its last."""
    if other is not None:
        a, b = (pairs.find_split(one.phases, _P) for one in (other, summary))
        heading = tr("Whole answer p90: from run {a} (A) to this one (B)", a=other.run_id[-4:])
    elif summary.growth is not None:
        a, b = summary.growth.first, summary.growth.last
        heading = tr("Time to first token p90: from the first third of the run (A) to its last (B)")
    else:
        a = b = None
        heading = tr("Where the time went")
    st.markdown(f"**{heading}**")
    if a is None or b is None or a.from_server != b.from_server:
        frame.missing(
            tr("There is no second side to compare the phases with."),
            tr("Replay the same trace again, or 30 requests in one run:"),
            "tailspan run --help",
        )
        return
    st.altair_chart(waterfall(pairs.worth_showing(pairs.waterfall(a, b), _PHASES_SHOWN), height=216), width="stretch")


if __name__ == "__main__":
    frame.show(draw)
