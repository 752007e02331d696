"""SLO: the deadlines as numbers to change, and at once the labels and the verdict under them."""

from __future__ import annotations

import streamlit as st

from dashboards import address, frame, kept, markup, words
from dashboards.facts import judged_anew
from dashboards.figures import bars
from dashboards.language import tr
from dashboards.source import Source
from telemetry import names

_STEPS = {"ttft": 0.1, "per_input": 0.0005, "gap": 0.1, "per_output": 0.01}
_DECIMALS = {"ttft": "%.3f", "per_input": "%.4f", "gap": "%.3f", "per_output": "%.3f"}


def draw(run: Source) -> None:
    frame.title(tr("SLO"), tr("Change a deadline and see which labels move. The run's own rows are not touched."))
    own = judged_anew.figures(run.policy)
    if not any(own.values()):
        frame.missing(
            tr("This SLO sets no deadline, so nothing can be late."), tr("Add one: telemetry/slos/chat.yaml shows how.")
        )
        return
    wanted = {name: _figures(name, figures) for name, figures in own.items() if figures}
    changed = {name: {k: v for k, v in new.items() if v != own[name][k]} for name, new in wanted.items()}
    changed = {name: figures for name, figures in changed.items() if figures}
    if not changed:
        st.caption(tr("These are the deadlines that the run was judged by."))
        _objectives(run)
        _yaml(run)
        return
    policy = judged_anew.changed(run.policy, changed)
    after = kept.source(run.bundle.path, policy)
    moves = judged_anew.moves(run, after)
    st.html(markup.legend(bars.label_legend({k: moves.before[k] + moves.after[k] for k in names.LABELS})))
    st.altair_chart(bars.labels_before_after(moves.before, moves.after), width="stretch")
    st.markdown(
        tr(
            "**{n} of {all} requests** have another label.",
            n=f"{moves.changed:,}",
            all=f"{sum(moves.after.values()):,}",
        )
    )
    rows = [
        (tr(old), tr(new), f"{count:,}") for (old, new), count in moves.moves.items() if old != new
    ]  # fmt: skip
    if rows:
        st.html(markup.table((tr("was"), tr("is now"), tr("requests")), rows))
    _objectives(after)
    _yaml(after)


def _figures(name: str, own: dict[str, float]) -> dict[str, float]:
    titles = {
        "ttft": tr("First token within, s"),
        "per_input": tr("and per prompt token, s"),
        "gap": tr("Longest silence, s"),
        "per_output": tr("and per answer token, s"),
    }
    st.markdown(f"**{tr('Class')} {name}**")
    found = {}
    for place, (figure, value) in zip(st.columns(4), own.items(), strict=False):
        with place:
            low = 0.0 if figure == "per_input" else 0.001
            found[figure] = address.number(
                titles[figure], f"{name}.{figure}", value, low, 100_000.0, _STEPS[figure], _DECIMALS[figure]
            )
    return found


def _objectives(run: Source) -> None:
    summary = kept.summary(run)
    st.markdown("#### " + tr("The verdict under them"))
    st.html(markup.verdict(summary.sentence, words.soundness(summary), words.verdict_colour(summary)))
    st.html(markup.asks(words.asks(summary)))


def _yaml(run: Source) -> None:
    with st.expander(tr("The SLO file")):
        st.code(run.policy.text, language="yaml")
        st.caption(tr("Save it, and judge runs by it: tailspan runs show RUN --slo FILE"))


if __name__ == "__main__":
    frame.show(draw)
