"""What the triage page says, line by line, made from a summary and a few counts: plain text, no Streamlit.

Must always hold: each line carries its numbers; what one run cannot show (is it a change?) is not claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboards.facts.who import Group, interval
from dashboards.language import tr
from dashboards.markup import Tile
from dashboards.palette import PHASE_WORDS
from dashboards.words import outcome, tiles
from telemetry import names
from telemetry.stats import needed_to_certify
from telemetry.summary import Summary, format_seconds, format_share

_BAD: Final = (names.LATE, names.WRONG, names.DROPPED)
_DIMENSION_WORDS: Final = {
    "class": "class {name}",
    "replica": "replica {name}",
    "prompt": "prompts of {low} to {name} tokens",
    "answer": "answers of {low} to {name} tokens",
    "cached": "{name} of the prompt from the cache",
    "attempts": "{name} attempts",
}


@dataclass(frozen=True, slots=True)
class NextCheck:
    """What to look at next: a sentence, the page to open and a command that goes as deep."""

    text: str
    page: str
    link: str
    command: str


def budget_tiles(summary: Summary) -> Iterator[Tile]:
    """The tiles of the labels, each with the share of its budget that it burns, where the SLO sets one.

    A budget is what an objective allows: ``dropped <= 1 %`` allows 1 % dropped, ``goodput >= 90 %`` 10 % not good.
    """
    whole = [
        o for o in (one.objective for one in summary.objectives) if o.traffic_class is None and o.percentile is None
    ]
    budgets = {o.measure: o.bound for o in whole if o.op == "<="}
    goodput = next((o.bound for o in whole if o.op == ">="), None)  # goodput is the only share that should be large
    for tile in tiles(summary):
        allowed = budgets.get(tile.label)
        share = summary.labels[tile.label] / summary.judged if summary.judged else 0.0
        if tile.label == names.GOOD and goodput is not None:
            allowed, share = 1 - goodput, 1 - share
        if tile.label == names.INVALID and not tile.count:
            continue
        said = tile.why
        if allowed and summary.judged and tile.label != names.INVALID:
            burnt = tr("burns {x} of its budget ({allowed})", x=_times(share / allowed), allowed=format_share(allowed))
            said = f"{burnt} · {said}" if said else burnt
        yield Tile(tile.label, tile.name, tile.count, tile.share, tile.colour, said)


def _times(factor: float) -> str:
    return f"{100 * factor:.0f} %" if factor < 10 else f"{factor:.0f}×"


def since_line(summary: Summary, moments: Iterable[Mapping[str, Any]]) -> str:
    """Since when requests are bad, and how sure their share is."""
    bad = sum(summary.labels[label] for label in _BAD)
    if not summary.judged:
        return tr("No request can be judged.")
    low, high = interval(bad, summary.judged)
    sure = tr(
        "Not good: {share} of {n} requests, 95 % interval {low} – {high}.",
        share=format_share(bad / summary.judged),
        n=f"{summary.judged:,}",
        low=format_share(low),
        high=format_share(high),
    )
    when = [
        tr(
            "{label}: from {first} s on, half of them by {half} s, the last at {last} s",
            label=tr(moment["label"]),
            first=f"{moment['first_s']:.1f}",
            half=f"{moment['half_s']:.1f}",
            last=f"{moment['last_s']:.1f}",
        )
        for moment in moments
    ]
    return " ".join([sure, *([tr("Since when") + " – " + "; ".join(when) + "."] if when else [])])


def real_lines(summary: Summary, compared: str | None) -> list[str]:
    """Was the generator sound, and can the percentiles be believed at this n."""
    figures = summary.validity.figures
    lines = []
    lag, bound, cpu = (figures.get(name) for name in ("lag_p99_s", "lag_bound_s", "cpu_ratio"))
    if lag is not None and bound is not None:
        lines.append(
            tr("Client {verdict}: lag p99 {lag} of {bound}", verdict=summary.validity.verdict,
               lag=format_seconds(lag), bound=format_seconds(bound))
            + ("" if cpu is None else tr(", CPU {cpu} of a core", cpu=f"{cpu:.0%}"))
        )  # fmt: skip
    else:
        lines.append(tr("Client {verdict}", verdict=summary.validity.verdict))
    lines += summary.validity.reasons[:2]
    weak = sorted({v.p for latency in summary.latencies for v in latency.scheduled if v.n and not v.certified})
    if weak:
        lines.append(
            tr(
                "Too few requests to certify {which}: {n} there, {needed} needed",
                which=", ".join(f"p{p:g}" for p in weak),
                n=f"{summary.judged:,}",
                needed=f"{needed_to_certify(weak[-1]):,}",
            )
        )
    else:
        lines.append(tr("Enough requests for every percentile shown (n = {n})", n=f"{summary.judged:,}"))
    lines.append(
        tr("One run alone shows no change: repeat it, and compare.")
        if compared is None
        else tr("Beside run {run}: one pair of runs cannot tell a change from noise.", run=compared)
    )
    return lines


def who_lines(groups: Sequence[Group], summary: Summary) -> list[str]:
    """The groups that are hit harder than the run as a whole."""
    bad = sum(summary.labels[label] for label in _BAD)
    if not bad:
        return [tr("Nobody: every judged request was good.")]
    if not groups:
        return [tr("No group of 30 requests or more stands out: classes, replicas, lengths, cache and attempts alike.")]
    return [
        tr(
            "{group}: {share} of {n} (95 %: {low} – {high})",
            group=group_words(group),
            share=format_share(group.share),
            n=f"{group.n:,}",
            low=format_share(group.low),
            high=format_share(group.high),
        )
        for group in groups
    ]


def group_words(group: Group) -> str:
    """A group as people say it."""
    name = group.name
    low = f"{int(name) // 2 + 1:,}" if group.dimension in ("prompt", "answer") else ""
    shown = f"{int(name):,}" if low else tr(name)
    return tr(_DIMENSION_WORDS[group.dimension], name=shown, low=low)


def change_lines(changes: Sequence[tuple[str, str, str]], compared: str | None, most: int = 3) -> list[str]:
    """What was run differently from the run compared with."""
    if compared is None:
        return [tr("No earlier run of this trace to compare with.")]
    if not changes:
        return [tr("Nothing in the manifests: same plan, versions and hashes as {run}.", run=compared)]
    lines = [f"{name}: {_short(old)} → {_short(new)}" for name, old, new in changes[:most]]
    if len(changes) > most:
        lines.append(tr("and {n} more: see Compare", n=len(changes) - most))
    return lines


def _short(text: str) -> str:
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):  # a hash: its start tells it apart
        return text[:8]
    return (text if len(text) <= 34 else text[:33] + "…") or "–"


def example_line(request: Mapping[str, Any]) -> str:
    """One request (index, label, reason, phase, e2e_s), for a link."""
    parts = [f"#{request['index']}", outcome(request["label"], request["reason"])]
    if request["e2e_s"] is not None:
        parts.append(format_seconds(request["e2e_s"]))
    if request["phase"]:
        parts.append(tr("mostly {phase}", phase=tr(PHASE_WORDS[request["phase"]])))
    return " · ".join(parts)


def next_check(summary: Summary, late_phase: str | None) -> NextCheck:
    """Where to look next, by what is worst: the client, drops, wrong answers, late ones, or nothing.

    late_phase: where late requests spent most of their time, where the server says so.
    """
    run = summary.run_id
    checked = f"tailspan runs check {run}"
    if summary.validity.verdict != names.VALID:
        return NextCheck(tr("The run itself is not sound: check the bundle first."), "run", tr("Open the run"), checked)
    worst = max(_BAD, key=lambda label: summary.labels[label])
    if not summary.labels[worst]:
        return NextCheck(
            tr("Nothing is bad. How close are the deadlines?"),
            "slo",
            tr("Move the deadlines"),
            f"tailspan runs show {run}",
        )  # fmt: skip
    if worst == names.DROPPED:
        return NextCheck(
            tr("Requests were dropped: look at the reasons beside the queue."), "dropped", tr("Open dropped"), checked
        )
    if worst == names.WRONG:
        return NextCheck(tr("Answers are wrong: see which check failed."), "quality", tr("Open quality"), checked)
    if late_phase == names.QUEUE:
        return NextCheck(
            tr("The queue is rarely the cause: see what ran ahead in it."),
            "requests",
            tr("Open the requests"),
            f"tailspan floor --run {run}",
        )
    return NextCheck(
        tr(
            "Late in {phase}: compare the steps with their floor.",
            phase=tr(PHASE_WORDS[late_phase]) if late_phase else "–",
        ),
        "engine",
        tr("Open the engine"),
        f"tailspan floor --run {run}",
    )
