"""A comparison as a table for the terminal, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from telemetry.compare.change_points import ChangePoint
from telemetry.compare.result import BETTER, BLOCKS, PAIRED, STUDENT, UNTESTED, WORSE, Comparison, Effect
from telemetry.summary import format_seconds, format_share

METHODS: Final = {
    PAIRED: "sign flips of {k} pairs, exact, all figures together (max-T)",
    STUDENT: "Student's t of {k} pairs with Bonferroni's correction",
    BLOCKS: "block bootstrap, approximate",
}
_STYLES: Final = {WORSE: "bold red", BETTER: "green", UNTESTED: "dim"}
HEADERS: Final = ("figure", "A", "B", "change", "95 % interval", "p", "verdict")


def render(found: Comparison) -> RenderableType:
    """For the terminal."""
    style = "bold red" if found.worse or found.refused else "bold"
    parts: list[RenderableType] = [Text(found.sentence, style=style)]
    if found.effects:
        table = Table(title=title(found), title_justify="left", box=None, pad_edge=False, show_edge=False)
        for place, header in enumerate(headers(found)):
            table.add_column(header, justify="left" if place in (0, 6) else "right")
        for one in found.effects:
            table.add_row(*cells(one), style=_STYLES.get(one.verdict, ""))
        parts.append(table)
    parts += [Text(line) for line in closing(found)]
    return Group(*parts)


def markdown(found: Comparison) -> str:
    """For a pull request or a chat."""
    lines = [f"**{found.sentence}**", ""]
    if found.effects:
        lines += [title(found), "", "| " + " | ".join(headers(found)) + " |", "|---" * len(HEADERS) + "|"]
        lines += ["| " + " | ".join(cells(one)) + " |" for one in found.effects]
        lines.append("")
    lines += [f"* {line}" for line in closing(found)]
    return "\n".join(lines) + "\n"


def title(found: Comparison) -> str:
    """What was compared, and how."""
    method = METHODS.get(found.method, found.method).format(k=len(found.a))
    warm = f"; the first {100 * found.warm_up:.0f} % of each run left out" if found.warm_up else ""
    return f"B against A: {method}; level {100 * found.alpha:g} %{warm}"


def headers(found: Comparison) -> list[str]:
    """Of the table."""
    return [name if name != "95 % interval" else f"{100 * (1 - found.alpha):g} % interval" for name in HEADERS]


def cells(one: Effect) -> list[str]:
    """One row of the table."""
    level = format_seconds if one.relative else format_share
    values = [
        "unbounded" if value is None and one.relative and one.n else "–" if value is None else level(value)
        for value in (one.a, one.b)
    ]
    interval = "–" if one.low is None or one.high is None else f"{amount(one.low, one)} … {amount(one.high, one)}"
    if one.bound_from is not None:
        interval = f"–, too few pairs for an interval ({one.bound_from} needed)"
    p = "–" if one.p is None else f"{one.p:.3f}" if one.p >= 0.001 else "< 0.001"
    verdict = one.verdict if one.verdict != UNTESTED else f"{one.verdict}: {one.note}"
    return [one.figure, *values, change_words(one), interval, p, verdict]


def change_words(one: Effect) -> str:
    """The change as a person writes it: +12.3 %, or +0.40 points."""
    if one.change is None:
        if one.verdict == WORSE:
            return "now unbounded" if one.b is None and one.a is not None else "longer"
        return "no longer unbounded" if one.verdict == BETTER else "–"
    return amount(one.change, one)


def amount(value: float, one: Effect) -> str:
    """A change in its unit."""
    return f"{100 * value:+.1f} %" if one.relative else f"{100 * value:+.2f} points"


def closing(found: Comparison) -> list[str]:
    """What stands below the table: refusals with their remedies, notes, the pairs needed."""
    lines = [f"{one.message}. Needed: {one.remedy}" for one in found.refusals]
    lines += found.notes
    if found.needed is not None and found.effects:
        said = f"To find a change of {100 * found.effect:.0f} % with {100 * found.power:.0f} %: "
        each = {name: k for name, k in found.details.get("needed", {}).items() if k is not None}
        least, most = min(each.values()), max(each.values())
        where = ", ".join(name for name, k in each.items() if k == most)
        lines.append(said + (f"{most} pairs" if least == most else f"{least} to {most} pairs (most for {where})"))
    return lines


def render_history(found: Sequence[ChangePoint], runs: int) -> str:
    """Change points in sentences."""
    if not found:
        return f"No change of level in {runs} runs"
    lines = []
    for one in found:
        seconds = one.figure.partition(" p")[2] != ""
        level = format_seconds if seconds else format_share
        change = f"{100 * one.change:+.1f} %" if seconds else f"{100 * one.change:+.2f} points"
        others = f"; also {', '.join(one.figures[1:])}" if len(one.figures) > 1 else ""
        lines.append(
            f"since run {one.run} (number {one.place + 1} of {runs}): {one.figure} {level(one.before)} -> "
            f"{level(one.after)} ({change}), p = {one.p:.3f}{others}"
        )
    return "\n".join(lines)
