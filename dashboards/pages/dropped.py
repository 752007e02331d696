"""Dropped: why requests got no complete answer, after how many attempts, and how full the queue was meanwhile."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboards import frame, kept, markup
from dashboards.facts import drops
from dashboards.figures import bars
from dashboards.language import tr
from dashboards.palette import reason_words
from dashboards.source import Source
from telemetry import names
from telemetry.summary import format_seconds


def draw(run: Source) -> None:
    frame.title(tr("Dropped"), tr("Requests without a complete answer: why, when, and what retries did."))
    reasons = kept.ask(drops.reasons, run)
    if not reasons:
        st.success(tr("No request was dropped."))
    else:
        _reasons(reasons)
        _over_time(run, reasons)
    _attempts(run)


def _reasons(rows: list[dict[str, Any]]) -> None:
    colours = bars.reason_colours([row["reason"] for row in rows])
    st.html(markup.legend(colours))
    header = tuple(map(tr, ("reason", "requests", "given up after (median)", "first at", "last at", "HTTP status")))
    st.html(
        markup.table(
            header,
            [
                (
                    tr(reason_words(row["reason"])),
                    f"{row['n']:,}",
                    "–" if row["after_s"] is None else format_seconds(row["after_s"]),
                    "–" if row["first_s"] is None else f"{row['first_s']:.1f} s",
                    "–" if row["last_s"] is None else f"{row['last_s']:.1f} s",
                    ", ".join(str(status) for status in row["statuses"] or () if status is not None) or "–",
                )
                for row in rows
            ],
        )
    )
    without = sum(row["n"] - row["with_row"] for row in rows)
    if without:
        st.caption(tr("{n} of them left no row and have no place in time.", n=f"{without:,}"))


def _over_time(run: Source, reasons: list[dict[str, Any]]) -> None:
    rows = kept.ask(drops.over_time, run)
    if not rows:
        return
    queue = kept.ask(drops.queue_over_time, run)
    last = max(row["end_s"] for row in [*rows, *queue])
    st.markdown("#### " + tr("Drops against the queue"))
    st.altair_chart(bars.reasons_over_time(rows, [row["reason"] for row in reasons], last), width="stretch")
    if not queue:
        frame.missing(
            tr("No queue length was scraped from the server."),
            tr("It needs /metrics with vLLM's names; the bundled engine has them."),
        )
        return
    st.html(markup.legend({tr(what): colour for what, colour in bars.GAUGE_COLOURS.items()}))
    st.altair_chart(bars.gauges(queue, last), width="stretch")


def _attempts(run: Source) -> None:
    st.markdown("#### " + tr("Attempts and outcome"))
    rows = kept.ask(drops.attempts, run)
    if not rows:
        frame.missing(tr("No request has ended yet."), tr("Open Live while the run goes."))
        return
    found = kept.ask(drops.amplification, run)
    factor = "–" if found["factor"] is None else f"{found['factor']:.2f}"
    st.markdown(
        tr("**{factor} attempts a request**: {attempts} attempts of {requests} requests; {again} tried more than once.",
           factor=factor, attempts=f"{found['attempts'] or 0:,}", requests=f"{found['requests']:,}",
           again=f"{found['again']:,}")
    )  # fmt: skip
    present = [label for label in names.LABELS if any(row["label"] == label for row in rows)]
    counts = {(row["attempts"], row["label"]): row["n"] for row in rows}
    header = (tr("attempts"), *map(tr, present), tr("all"))
    body = []
    for attempts in sorted({row["attempts"] for row in rows}):
        own = [counts.get((attempts, label), 0) for label in present]
        name = tr("{n} (never sent)", n=0) if attempts == 0 else str(attempts)
        body.append((name, *(f"{n:,}" for n in own), f"{sum(own):,}"))
    st.html(markup.table(header, body))


if __name__ == "__main__":
    frame.show(draw)
