"""An explanation for the terminal and as Markdown: the hypotheses first, then the layers that they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from telemetry.compare.result import Effect
from telemetry.explain.causes import DROPPED, INVALID, LATE, NO_CHANGE, NOTHING, UNKNOWN, WRONG
from telemetry.explain.result import Causes, Explanation, Hypothesis, Partition, Phases
from telemetry.summary import format_seconds, format_share

SHOWN_CELLS: Final = 4
SHOWN_PARTITIONS: Final = 3
Rows = list[list[str]]


def headline(found: Explanation) -> str:
    """One sentence: what changed, and why."""
    first = found.hypotheses[0]
    why = "the cause is unknown" if first.cause == UNKNOWN else first.words
    if found.label == INVALID:
        return f"The run is not to be trusted: {first.words}"
    if found.label == NOTHING:
        return first.words[:1].upper() + first.words[1:]
    if found.label in (DROPPED, WRONG):
        effect = _effect(found, found.label)
        moved = "" if effect is None else f" ({_share(effect.a)} -> {_share(effect.b)})"
        return f"More requests are {found.label}{moved}: {why}"
    effect = _effect(found, found.figure)
    moved = "" if effect is None else f" {_seconds(effect.a)} -> {_seconds(effect.b)}"
    return f"{found.figure}{moved}: {why}"


def render(found: Explanation) -> RenderableType:
    """For the terminal."""
    parts: list[RenderableType] = [Text(headline(found), style="bold" if found.label == NOTHING else "bold red")]
    for place, one in enumerate(found.hypotheses, 1):
        parts.append(Text("\n".join(hypothesis_lines(place, one))))
    for title, header, rows in tables(found):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_edge=False)
        for at, name in enumerate(header):
            table.add_column(name, justify="right" if at else "left")
        for row in rows:
            table.add_row(*row)
        parts += [Text(""), table]
    parts += [Text(f"Limit: {one}") for one in found.limits]
    return Group(*parts)


def markdown(found: Explanation) -> str:
    """For a ticket."""
    lines = [f"**{headline(found)}**", ""]
    for place, one in enumerate(found.hypotheses, 1):
        first, *rest = hypothesis_lines(place, one)
        lines += [first, *(f"   * {line.strip()}" for line in rest), ""]
    for title, header, rows in tables(found):
        lines += [title, "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("")
    lines += [f"* Limit: {one}" for one in found.limits]
    return "\n".join(lines) + "\n"


def hypothesis_lines(place: int, one: Hypothesis) -> list[str]:
    """The cause, its evidence, whom to ask, what would disprove it, where to look."""
    share = "" if one.share is None else f" ({100 * one.share:.0f} % of the change)"
    lines = [f"{place}. {one.words}{share}"]
    lines += [f"   {said}" for said in one.evidence]
    if one.layer:
        lines.append(f"   go to: {one.layer}")
    if one.disprove and one.cause != NO_CHANGE:
        lines.append(f"   check: {one.disprove}")
    if one.requests:
        lines.append(f"   requests: {', '.join(map(str, one.requests))}")
    if one.steps:
        lines.append(f"   engine steps: {', '.join(map(str, one.steps))}")
    return lines


def tables(found: Explanation) -> list[tuple[str, Sequence[str], Rows]]:
    """Title, header and rows of each layer that there is."""
    made: list[tuple[str, Sequence[str], Rows]] = []
    if found.phases:
        made.append(_phases(found.phases[0]))
    if found.causes is not None and found.label == LATE:
        made.append(_causes(found.causes))
    shown = [one for one in found.partitions if one.found] or list(found.partitions)
    made += [_partition(one) for one in shown[:SHOWN_PARTITIONS]]
    return made


def _phases(one: Phases) -> tuple[str, Sequence[str], Rows]:
    rows = [
        [part.phase.replace("_", " "), format_seconds(part.a_s), format_seconds(part.b_s), _signed(part.change_s),
         _interval(part.low_s, part.high_s)]
        for part in sorted(one.parts, key=lambda part: -abs(part.change_s))
        if max(part.a_s, part.b_s) > 0.001 * max(one.a_s, one.b_s)
    ]  # fmt: skip
    rows.append(["whole", format_seconds(one.a_s), format_seconds(one.b_s), _signed(one.change_s), ""])
    return f"Where: phases of {one.measure} p{one.p:g}", ("phase", "A", "B", "change", "95 % interval"), rows


def _causes(one: Causes) -> tuple[str, Sequence[str], Rows]:
    rows = [
        [share.factor.replace("_", " "), _signed(share.change_s), _interval(share.low_s, share.high_s), share.evidence]
        for share in one.shares
    ]  # fmt: skip
    rows.append(["modelled", _signed(one.modelled_s), "", f"measured {_signed(one.observed_s)}"])
    title = (
        f"Why: {one.figure} replayed {one.replays} times through the {one.through}, {one.sample} requests each; it "
        f"misses A by {100 * one.error:.0f} %"
    )
    return title, ("exchanged", "change", "95 % interval", "A -> B"), rows


def _partition(one: Partition) -> tuple[str, Sequence[str], Rows]:
    cells = sorted(one.cells, key=lambda cell: -abs(cell.mix + cell.within))[:SHOWN_CELLS]
    rows = [
        [cell.name, f"{cell.n_a:,}", f"{cell.n_b:,}", format_share(cell.exceed_a) if cell.n_a else "–",
         format_share(cell.exceed_b) if cell.n_b else "–", _points(cell.mix), _points(cell.within)]
        for cell in cells
    ]  # fmt: skip
    rows.append(["all", "", "", "", "", _points(one.mix), _points(one.within)])
    said = "" if one.found else " (no more than chance)"
    by = " and ".join(one.attributes)
    title = f"Who: beyond A's percentile, by {by}; p {one.p_mix:.3f} mix, {one.p_within:.3f} within"
    return title + said, ("group", "n A", "n B", "beyond A", "beyond B", "mix", "within"), rows


def _effect(found: Explanation, figure: str) -> Effect | None:
    return next((one for one in found.comparison.effects if one.figure == figure), None)


def _seconds(value: float | None) -> str:
    return "unbounded" if value is None else format_seconds(value)


def _share(value: float | None) -> str:
    return "?" if value is None else format_share(value)


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{_signed(low)} … {_signed(high)}"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
