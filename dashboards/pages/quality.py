"""Quality: which answers failed which check, canaries by replica, and what all this could have seen."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboards import frame, kept, markup
from dashboards.facts import checks
from dashboards.language import tr
from dashboards.palette import reason_words
from dashboards.source import Source
from telemetry.canary_report import BROKEN, NUMERIC, PLACES, SAME, CanaryReport
from telemetry.summary import format_share

_RATES = (0.05, 0.02, 0.01, 0.001)


def draw(run: Source) -> None:
    frame.title(
        tr("Quality"), tr("Wrong answers alarm no infrastructure metric: what was checked, and what was found.")
    )
    totals = kept.ask(checks.totals, run)
    if not totals["answered"]:
        frame.missing(
            tr("No request was answered, so there is no answer to check."), tr("See Dropped for the reasons.")
        )
        return
    st.markdown(
        tr("**{wrong} of {answered} answers failed a check.** {verified} were verified in depth; the rest passed what "
           "each answer is checked for: token counts, finish reason, loops, leaked or broken characters.",
           wrong=f"{totals['wrong']:,}", answered=f"{totals['answered']:,}", verified=f"{totals['verified']:,}")
    )  # fmt: skip
    _kinds(run)
    _canaries(run, totals)
    _engine(run)
    _seen(totals)


def _kinds(run: Source) -> None:
    rows = kept.ask(checks.kinds, run)
    if not rows:
        return
    st.markdown("#### " + tr("Failed checks"))
    header = tuple(map(tr, ("check", "answers", "late as well", "first at")))
    body = [(tr(reason_words(r["wrong_kind"])), f"{r['n']:,}", f"{r['late']:,}", f"{r['first_s']:.1f} s") for r in rows]
    st.html(markup.table(header, body))
    for row in rows[:3]:
        label = tr("An example: #{n}, {check}", n=row["example"], check=tr(reason_words(row["wrong_kind"])))
        frame.link("request", label, request=row["example"])


def _canaries(run: Source, totals: dict[str, Any]) -> None:
    st.markdown("#### " + tr("Canaries"))
    if not totals["canaries"]:
        frame.missing(
            tr("This run sent no canaries: questions whose right answer is known."),
            tr("Without them only faults that show in an answer by itself can be seen."),
        )
        return
    rows = kept.ask(checks.canaries, run)
    replicas = sorted({row["replica"] for row in rows})
    cells = {(row["canary_kind"], row["replica"]): row for row in rows}
    body = []
    for kind in dict.fromkeys(row["canary_kind"] for row in rows):
        own = [cells.get((kind, replica)) for replica in replicas]
        body.append((kind, *(_cell(cell) for cell in own)))
    st.html(markup.table((tr("kind"), *(replica or "–" for replica in replicas)), body))
    st.caption(tr("Wrong answers of all that were sent; in brackets those without an answer."))
    if (report := kept.summary(run).canary_report) is not None:
        _report(report)


def _report(report: CanaryReport) -> None:
    """The verdict on the canaries that were mixed into the load, its findings, and the sides of their pairs."""
    st.markdown("**" + tr("Verdict on them: {verdict}", verdict=tr(report.verdict)) + "**")
    findings = [(tr(verdict), kind, said) for verdict, kind, said in report.findings]
    st.html(markup.table((tr("verdict"), tr("kind"), tr("finding")), findings, words=True))
    if not report.counts:
        return
    header = (tr("goldens"), tr(SAME), tr(NUMERIC), tr(BROKEN))
    body = [
        (tr(PLACES.get(side, side)) if kind == "place" else side, *(f"{n:,}" for n in counted))
        for kind, side, counted in report.counts
    ]
    st.html(markup.table(header, body))
    st.caption(
        tr("Goldens by how they were asked, and by replica. A pair of which one side alone is broken says where to "
           "look: the prefix cache, the streaming, or a replica. Those that changed were asked again alone: see the "
           "findings.")
    )  # fmt: skip


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    mark = "✗" if row["wrong"] else "✓"
    return f"{mark} {row['wrong']} / {row['n']}" + (f" ({row['unanswered']})" if row["unanswered"] else "")


def _engine(run: Source) -> None:
    st.markdown("#### " + tr("What the engine found in itself"))
    rows = kept.ask(checks.counters, run)
    if not rows:
        frame.missing(
            tr("The server counts neither divergence nor values that are not finite."),
            tr("The bundled engine does; compare answers with themselves alone:"),
            "tailspan serve --help",
        )
        return
    body = [(tr(checks.COUNTERS[row["name"]]), row["source"], f"{row['gained']:,.0f}") for row in rows]
    st.html(markup.table((tr("during the run"), tr("server"), tr("count")), body, words=True))


def _seen(totals: dict[str, Any]) -> None:
    st.markdown("#### " + tr("What could have been seen"))
    checked = totals["verified"]
    rate = checks.unseen_rate(checked)
    if rate is None:
        st.markdown(
            tr("No answer was verified in depth: fluent nonsense, a wrong chat template or a broken kernel would not "
               "have been noticed here at any rate.")
        )  # fmt: skip
    else:
        st.markdown(
            tr("With {n} verified answers, a rate of wrong ones up to {rate} could have shown none (in 1 of 20 runs).",
               n=f"{checked:,}", rate=format_share(rate))
        )  # fmt: skip
    header = (tr("to see at least 3 wrong with 95 %, at a rate of"), tr("answers to verify"))
    st.html(markup.table(header, [(f"{100 * w:g} %", f"{checks.needed_to_see(w):,}") for w in _RATES]))


if __name__ == "__main__":
    frame.show(draw)
