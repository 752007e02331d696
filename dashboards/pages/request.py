"""Request: one request through application, engine, model and device: what each saw, its time, its evidence."""

from __future__ import annotations

import streamlit as st

from dashboards import address, charts, frame, kept, markup, palette, words
from dashboards.facts import one_request, timeline
from dashboards.figures import timeline as figures
from dashboards.language import tr
from dashboards.source import Source
from telemetry import names
from telemetry.summary import format_seconds

_STRIP = ("running", "prefill_tokens", "kv_share")


def draw(run: Source) -> None:
    frame.title(tr("Request"), tr("One request through application, engine, model and device."))
    low, high = kept.ask(one_request.extent, run)
    worst = kept.summary(run).worst
    if not kept.ask(Source.has, run, "requests"):
        frame.missing(tr("No request has ended yet."), tr("Open Live while the run goes."))
        return
    default = worst[0].index if worst else low
    index = address.whole(tr("Request (its place in the schedule)"), "request", default, low, high)
    row = kept.ask(one_request.find, run, index)
    if row is None:
        st.warning(tr("Request {n} left no row: it was never sent, or its worker was lost.", n=index))
        return
    steps = kept.ask(one_request.steps_of, run, row) if kept.ask(Source.has, run, "steps") else []
    st.html(
        markup.verdict(
            f"#{index}: {words.outcome(row['label'], row['reason'])}",
            _says(row),
            palette.LABEL_COLOURS[row["label"]],
        )
    )
    parts = timeline.parts_of(row)
    if sum(parts.values()) > 0:
        st.html(words.phase_legend([parts]))
        bar = charts.phase_stacks(charts.stack_rows(f"#{index}", parts), [f"#{index}"])
        st.altair_chart(bar.properties(height=104), width="stretch")  # one bar alone would be a thread
    _layers(run, row)
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown(f"**{tr('The answer as it came')}**")
        chart = figures.tokens_over_time(row)
        if chart is None:
            frame.missing(tr("No token came, so nothing was drawn."), tr("The reason is in the table above."))
        else:
            st.altair_chart(chart, width="stretch")
    with right:
        st.markdown(f"**{tr('The engine while it had this request')}**")
        if steps:
            span = (0.0, max(step["end_s"] for step in steps))
            st.altair_chart(figures.strip(steps, span, _STRIP), width="stretch")
            st.caption(tr("Seconds after the start of its first step."))
        else:
            frame.missing(
                tr("No step of the engine is known for it."),
                tr("The bundled engine logs its steps; other servers do not."),
            )
    _spans(run, row)
    if row["text"]:
        with st.expander(tr("The text that was kept")):
            st.text(row["text"])
    frame.link("requests", tr("What was in flight beside it"), at=f"{max(0.0, row['intended_s'] - 1):.1f}")


def _says(row: dict[str, object]) -> str:
    first, whole = row["ttft_s"], row["e2e_s"]
    said = []
    if isinstance(first, float):
        said.append(tr("first token after {t}", t=format_seconds(first)))
    if isinstance(whole, float):
        said.append(tr("whole answer after {t}", t=format_seconds(whole)))
    if row["phase"]:
        said.append(tr("mostly {phase}", phase=tr(palette.PHASE_WORDS[str(row["phase"])])))
    return " · ".join(said)


def _layers(run: Source, row: dict[str, object]) -> None:
    seen = one_request.layers(row, kept.ask(one_request.device_of, run, row), run.policy)
    accounts = [
        (layer, [(tr(s.what), s.value, s.evidence) for s in seen if s.layer == layer]) for layer in one_request.LAYERS
    ]
    st.html(markup.side_by_side(markup.layer(tr(layer), rows) for layer, rows in accounts if rows))
    silent = [tr(layer) for layer, rows in accounts if not rows]
    if silent:
        st.caption(
            tr("No account from: {layers}. The bundled engine gives one; other servers only through their metrics.",
               layers=", ".join(silent))
        )  # fmt: skip


def _spans(run: Source, row: dict[str, object]) -> None:
    found = kept.ask(one_request.spans_of, run, row)
    if not found:
        if row["trace_id"] is not None:
            ratio = run.bundle.manifest.get("sampling_ratio")
            shown = "–" if ratio is None else f"{ratio:.0%}"
            st.caption(tr("No spans of it were kept: {share} of the requests are sampled.", share=shown))
        return
    with st.expander(tr("Its {n} spans", n=len(found))):
        header = (tr("service"), tr("span"), tr("starts after"), tr("takes"), tr("status"))
        st.html(
            markup.table(
                header,
                [
                    (s["service"], s["name"], format_seconds(s["from_s"]), format_seconds(s["seconds"]), s["status"])
                    for s in found
                ],
            )
        )
        replica = next((s["attributes"].get(names.ATTR_REPLICA) for s in found), None)
        st.caption(
            tr("Trace {id}", id=markup.plain(row["trace_id"])) + (f" · {markup.plain(replica)}" if replica else "")
        )


if __name__ == "__main__":
    frame.show(draw)
