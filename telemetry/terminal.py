"""A run in the terminal: what a tired person needs, in the order in which it is needed.

Owns the layout only; every number comes from ``telemetry.summary``.  Must always hold: the first line says whether the
run itself can be believed, the second is the verdict; nothing depends on colour; 100 columns are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from models.wording import several
from telemetry import burn_rate, layer_text, names
from telemetry.judged import Judged, mark_of
from telemetry.objective import BROKEN, HELD, UNDECIDED
from telemetry.phases import Split
from telemetry.stats import Percentile, needed_to_certify
from telemetry.summary import (
    Latency,
    Request,
    Summary,
    format_seconds,
    format_share,
    format_value,
)

LABEL_STYLES: Final = {
    names.GOOD: "green",
    names.LATE: "yellow",
    names.WRONG: "magenta",
    names.DROPPED: "red",
    names.INVALID: "dim",
}
BAR_WIDTH: Final = 20
ALERTS_SHOWN: Final = 3
_TITLES: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def render(summary: Summary) -> RenderableType:
    """The whole report as one renderable."""
    blocks: list[RenderableType] = [_validity(summary), _verdict(summary), Text(), _labels(summary)]
    if any(row.scheduled[0].n for row in summary.latencies):
        blocks += [Text(), _latencies(summary.latencies), *_footnotes(summary.latencies)]
    if summary.phases:
        blocks += [Text(), _phases(summary.phases)]
    blocks += [Text(one.sentence()) for one in summary.servers]
    if summary.usage.disagreeing:
        rows = ", ".join(map(str, summary.usage.examples))
        blocks.append(
            Text(
                f"usage is off by more than 10 % from our own count in {summary.usage.disagreeing} of "
                f"{summary.usage.compared} answers (first: {rows})",
                style="yellow",
            )
        )
    if summary.usage.estimated:
        blocks.append(Text(f"{several(summary.usage.estimated, 'answer')} came without usage: tokens counted by us"))
    if summary.retries is not None:
        blocks.append(Text(summary.retries.sentence()))
    if not summary.open_loop:
        blocks.append(Text("Not open loop: a limit in flight held requests back; times count from the schedule"))
    if summary.overload:
        blocks.append(Text(summary.overload, style="bold"))
    blocks += [Text(), _objectives(summary.objectives), *_beside(summary), *_where(summary)]
    if summary.worst:
        blocks += [Text(), _worst(summary.worst)]
    blocks += [Text(), _closing(summary)]
    return Group(*blocks)


def show(renderable: RenderableType) -> None:
    """Print on stdout; into a file or a pipe 100 columns wide, since rich would take 80 there and cut the tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 100))
    console.print(renderable)


def render_list(rows: Sequence[tuple[str, Summary | str]]) -> RenderableType:
    """Runs, newest first: (run id, its summary or why it cannot be read)."""
    table = _table("run", "status", "trace", "n", "good", "run is", "SLO")
    problems: list[RenderableType] = []
    for run_id, summary in rows:
        if isinstance(summary, str):
            table.add_row(run_id, "unreadable")
            problems.append(Text(f"{run_id}: {summary}", style="red"))
            continue
        good = "" if summary.goodput is None else format_share(summary.goodput)
        slo = f"{summary.slo} {summary.decision}"
        table.add_row(
            run_id, summary.status, summary.trace, str(summary.attempted), good, summary.validity.verdict, slo
        )
    return Group(table, *problems)


def _validity(summary: Summary) -> Text:
    run = summary.validity
    figures = run.figures
    lag = figures["lag_p99_s"]
    line = Text()
    line.append(f"Run {run.verdict}", style="bold green" if run.verdict == names.VALID else "bold red")
    line.append(f": sent {figures['sent']} of {figures['scheduled']}")
    if figures["attempted"] != figures["sent"]:
        line.append(f" ({figures['attempted']} attempted)")
    if lag is not None:
        line.append(
            f", lag p99 {format_seconds(float(lag))} (bound {format_seconds(float(figures['lag_bound_s'] or 0))})"
        )
    if (cpu := figures["cpu_ratio"]) is not None:
        line.append(f", sender CPU {100 * float(cpu):.0f} %")
    for reason in run.reasons:
        line.append(f"\n  {reason}", style="red")
    return line


def _verdict(summary: Summary) -> Text:
    trusted = summary.validity.verdict == names.VALID
    style = "bold green" if summary.held else "bold red"
    note = "" if trusted else "  [the run is not valid: do not judge the server by it]"
    return Text(summary.sentence, style=style if trusted else "bold") + Text(note, style="red")


def _labels(summary: Summary) -> Table:
    table = _table(title=f"Outcomes of {several(summary.attempted, 'request')}", columns=("label", "n", "share", "why"))
    for label in names.LABELS:
        count = summary.labels[label]
        if count == 0 and label == names.INVALID:
            continue
        shown = label
        if label == names.GOOD and count:
            shown = f"good ({summary.verified} verified)" if summary.verified else "good (unverified)"
        why = ", ".join(f"{name} {n}" for name, n in summary.reasons[label].items())
        share = format_share(count / summary.attempted) if summary.attempted else ""
        table.add_row(Text(shown, style=LABEL_STYLES[label]), str(count), share, why)
    return table


def _latencies(rows: Sequence[Latency]) -> Table:
    table = _table(
        title="Latency from the intended send (95 % band)",
        columns=("", *(f"p{one.p:g}" for one in rows[0].scheduled), "n"),
    )
    for row in rows:
        unit = _Unit.of(row)
        title = f"{_TITLES.get(row.measure, row.measure)}, {unit.name}"
        table.add_row(title, *(unit.band(one) for one in row.scheduled), str(row.scheduled[0].n))
        if row.from_send:
            table.add_row("  from the send", *(unit.value(one) for one in row.from_send), "", style="dim")
        if row.scheduled[0].dropped:
            count = str(row.survivors[0].n)
            table.add_row("  answered only", *(unit.value(one) for one in row.survivors), count, style="dim")
    return table


@dataclass(frozen=True, slots=True)
class _Unit:
    """One unit and one number of decimals for a measure, so that its figures can be compared at a glance."""

    name: str
    factor: float
    decimals: int

    @classmethod
    def of(cls, row: Latency) -> _Unit:
        largest = max((one.value for one in (*row.scheduled, *row.survivors) if one.value is not None), default=0.0)
        if largest >= 10:
            return cls("s", 1.0, 1)
        return cls("ms", 1e3, 0 if largest >= 0.1 else 1 if largest >= 0.01 else 2)

    def show(self, seconds: float) -> str:
        return f"{seconds * self.factor:.{self.decimals}f}"

    def value(self, one: Percentile) -> str:
        if one.value is None:
            return "unbounded" if one.unbounded else "–"
        return self.show(one.value)

    def band(self, one: Percentile) -> str:
        if one.n == 0:
            return "–"
        mark = "" if one.certified else "*"
        low = "?" if one.low is None else self.show(one.low)
        high = "?" if one.high is None else self.show(one.high)
        return f"{self.value(one)}{mark} ({low}–{high})"


def _footnotes(rows: Sequence[Latency]) -> list[Text]:
    notes = []
    weak = [one for row in rows for one in row.scheduled if one.n and not one.certified]
    if weak:
        ps = sorted({one.p for one in weak})
        shown, needed = ", ".join(f"p{p:g}" for p in ps), ", ".join(str(needed_to_certify(p)) for p in ps)
        notes.append(Text(f"* cannot certify {shown}: n = {min(one.n for one in weak)}, {needed} needed", style="dim"))
    dropped = rows[-1].scheduled[0].dropped
    if dropped:
        notes.append(Text(f"{dropped} dropped requests count as infinitely slow", style="dim"))
    undefined = next((row.undefined for row in rows if row.measure == "tpot"), 0)
    if undefined:
        notes.append(Text(f"TPOT is undefined for {several(undefined, 'answer')} of one chunk or token", style="dim"))
    return notes


def _phases(splits: Sequence[Split]) -> Table:
    title = "Where the time goes: end to end"
    if not splits[0].from_server:
        title += " (the server gives no account of its phases)"
    table = _table(title=title, columns=("phase", *(f"p{split.p:g}" for split in splits), f"p{splits[-1].p:g}"))
    small = [name for name in splits[0].parts if all(s.parts[name] < 0.01 * s.total_s for s in splits)]
    for name in splits[0].parts:
        if name not in small:
            table.add_row(
                name, *(_part(split, split.parts[name]) for split in splits), _bar(splits[-1], splits[-1].parts[name])
            )
    if small:
        sums = [sum(split.parts[name] for name in small) for split in splits]
        label = Text(f"{len(small)} others", style="dim")
        table.add_row(label, *(_part(split, value) for split, value in zip(splits, sums, strict=True)), "")
    table.add_row("total", *(format_seconds(split.total_s) for split in splits), f"n = {splits[0].n}", style="bold")
    return table


def _part(split: Split, seconds: float) -> str:
    share = seconds / split.total_s if split.total_s > 0 else 0.0
    return f"{format_seconds(seconds)} {100 * share:3.0f} %"


def _bar(split: Split, seconds: float) -> str:
    share = seconds / split.total_s if split.total_s > 0 else 0.0
    return "█" * max(0, round(BAR_WIDTH * share))


_MARKS: Final = {HELD: ("pass", "green"), BROKEN: ("FAIL", "bold red"), UNDECIDED: ("open", "yellow")}


def _objectives(objectives: Sequence[Judged]) -> Table:
    table = _table(title="Objectives", columns=("", "objective", "measured", "95 % band", "n", "budget spent"))
    for one in objectives:
        show = format_share if one.objective.is_fraction else format_seconds
        band = ""
        if one.low is not None or one.high is not None:
            low, high = ("?" if end is None else show(end) for end in (one.low, one.high))
            band = f"{low} – {high}"
        measured = format_value(one) + ("" if one.certified else " *")
        mark = Text(*_MARKS[mark_of(one)])
        spent = "" if one.budget_spent is None else f"{100 * one.budget_spent:.0f} %"
        table.add_row(mark, one.objective.sentence, measured, band, str(one.n), spent)
    return table


def _beside(summary: Summary) -> list[Text]:
    """What stands below the objectives: how they are joined, alerts, fluidity, and what canaries saw."""
    lines = []
    if " OR " in summary.rule:
        lines.append(Text(f"joined as: {summary.rule}", style="dim"))
    strongest = burn_rate.strongest(summary.alerts)
    for one in strongest[:ALERTS_SHOWN]:
        lines.append(
            Text(
                f"alert   {one.severity}: {one.objective} burns its budget {one.worst:.1f}x over {_window(one.long_s)} "
                f"(fires above {one.factor:g}x), from {one.first_s:.0f} s on",
                style="yellow",
            )
        )
    if len(strongest) > ALERTS_SHOWN:
        lines.append(Text(f"        and {len(strongest) - ALERTS_SHOWN} more burn-rate alerts", style="yellow"))
    if summary.fluidity is not None:
        p5, p50 = (format_share(summary.fluidity[key]) for key in ("p5", "p50"))
        lines.append(Text(f"fluidity p5 {p5}, p50 {p50} of the token deadlines met, n = {summary.fluidity['n']:.0f}"))
    if (seen := summary.canaries) is not None:
        band = f"{format_share(seen.low)} – {format_share(seen.high)}"
        text = f"checked {several(seen.checked, 'answer')}: {seen.wrong} wrong, {band}"
        if seen.could_see is not None:
            text += f"; could have seen {format_share(seen.could_see)} wrong (3 or more, with 95 %)"
        lines.append(Text(text))
    if (report := summary.canary_report) is not None:
        style = "" if report.exit_code == names.EXIT_OK else "bold red" if report.verdict == BROKEN else "yellow"
        lines.append(Text(f"canaries: {report.verdict}", style=style))
        lines += [Text(f"        {sentence}") for sentence in report.sentences]
    wrong = summary.labels[names.WRONG]
    if (looks := layer_text.unsaid(summary.where, summary.decision, wrong, summary.wrong_cause)) is not None:
        lines.append(Text(f"wrong   looks like: {looks.kind}. Look at {looks.layer}", style="bold"))
        lines.append(Text(f"        {looks.evidence}"))
    return lines


def _where(summary: Summary) -> list[Text]:
    """Which layer to look at."""
    if not layer_text.worth_saying(summary.where, summary.decision, summary.labels[names.WRONG]):
        return []
    lines = [Text(), Text("Where to look", style="bold")]
    for pointer, head in layer_text.heads(summary.where):
        lines.append(Text(head))
        lines += [Text(f"  seen    {one}") for one in pointer.evidence]
        lines.append(Text(f"  check   {pointer.check}"))
    if said := layer_text.rest(summary.where):
        lines.append(Text(said, style="dim"))
    return lines


def _window(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds < 86_400 else f"{seconds / 86_400:g} d"


def _worst(requests: Sequence[Request]) -> Table:
    table = _table(title="The worst requests", columns=("index", "at", "label", "TTFT", "end to end", "most of it in"))
    for one in requests:
        label = one.label if one.reason is None else f"{one.label} ({one.reason})"
        most = one.detail or ""
        if one.parts and one.e2e_s:
            largest = max(one.parts, key=lambda name: one.parts[name])
            most = f"{largest} {format_seconds(one.parts[largest])}"
        table.add_row(
            str(one.index),
            f"{one.intended_s:.1f} s",
            Text(label, style=LABEL_STYLES[one.label]),
            "–" if one.ttft_s is None else format_seconds(one.ttft_s),
            "–" if one.e2e_s is None or one.label == names.DROPPED else format_seconds(one.e2e_s),
            most,
        )
    return table


def _closing(summary: Summary) -> Text:
    text = Text()
    if summary.torn_bytes:
        text.append(f"{summary.torn_bytes} bytes of an unfinished write were left out\n", style="yellow")
    text.append(f"bundle  {summary.path}\n")
    return text.append("next    " + "   or   ".join(summary.next))


def _table(*headers: str, title: str | None = None, columns: Sequence[str] = ()) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    for place, header in enumerate((*headers, *columns)):
        right = (header.startswith("p") and header[1:2].isdigit()) or header in (
            "n",
            "share",
            "index",
            "at",
            "budget spent",
        )
        table.add_column(header, justify="right" if right else "left", no_wrap=place < 2)
    return table
