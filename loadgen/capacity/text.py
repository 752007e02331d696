"""A search and a frontier in words: the terminal and Markdown, from one list of lines and tables.

Owns the wording only; every figure comes from ``answer`` and ``sweep``.  Must always hold: an assumption stands beside
the figure that rests on it; nothing depends on colour; 100 columns are enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.capacity import search
from loadgen.capacity.answer import Answer
from loadgen.capacity.plot import scatter
from loadgen.capacity.point import DESCENT, OVERLOAD, Point
from loadgen.capacity.sweep import Frontier
from models.wording import several
from telemetry.objective import BROKEN, HELD
from telemetry.summary import format_seconds, format_share

_KINDS = {OVERLOAD: "overload", DESCENT: "way down"}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: header and rows of cells."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = str | Grid


def headline(found: Answer) -> str:
    """What was found, in one sentence."""
    note = "" if found.simulated is None else f" [SIMULATED: {found.simulated}]"
    return _found(found) + note


def _found(found: Answer) -> str:
    if found.ended == search.NONE_HOLDS:
        lowest = min((point.rate for point in found.points), default=0.0)
        return f"No rate holds {found.slo}: not even {lowest:.3g} requests/s"
    if found.ended == search.TOO_FEW:
        return f"No capacity: a run has fewer requests than {found.slo} asks for; give a longer --duration"
    if found.ended == search.INCOMPLETE:
        return f"No capacity: the last run was cut ({found.points[-1].why})"
    if found.ended == search.CLIENT_LIMITED:
        if found.at_least is None:
            return "No capacity: the load generator was the limit at every rate (CLIENT_LIMITED)"
        return (
            f"At least {found.at_least:.4g} requests/s hold {found.slo}; at {found.client_ceiling:.4g} the load "
            "generator was the limit (CLIENT_LIMITED), so the server's capacity is not known: give more --workers"
        )
    assert found.rate is not None
    if found.ended == search.UNBOUNDED:
        return f"At least {found.rate:.4g} requests/s hold {found.slo}: no rate that was tried broke it"
    assert found.low is not None and found.high is not None
    rough = "" if found.ended == search.FOUND else f"; the {found.runs} runs were too few for the precision asked for"
    return (
        f"Capacity {found.rate:.4g} requests/s of {found.load} under {found.slo} "
        f"(90 %: {found.low:.4g} to {found.high:.4g}), {several(found.runs, 'run')} of {found.window_s:.0f} s{rough}"
    )


def blocks(found: Answer) -> Iterator[Block]:
    """Everything that is said, in order."""
    yield headline(found)
    yield Grid(
        ("", "requests/s", "SLO", "again", "good", "TTFT p95", "TPOT p95", "n", "run"),
        tuple(_row(point) for point in found.points),
    )
    rows = tuple(_figures(found))
    if rows:
        yield Grid(("figure", "value", "rests on"), rows)
    if found.binding is not None:
        yield f"In the {_seen_in(found)}, {found.binding.words}."
    if found.breaks is not None:
        yield f"What breaks first: {found.breaks}."
    if found.descent is not None:
        yield _descent(found)
    elif found.ended in (search.FOUND, search.ROUGH):
        yield "The way down was not played: no run was left for it, so nothing is known of hysteresis."


def _row(point: Point) -> tuple[str, ...]:
    def p95(measure: str) -> str:
        value = (point.latency_s.get(measure) or [None, None])[1]
        return "–" if value is None else format_seconds(value)

    judged = point.verdict in (HELD, BROKEN)
    good = "" if point.good_share is None else format_share(point.good_share)
    ended = ", cut" if point.stopped else ""
    return (
        _KINDS.get(point.kind, ""), f"{point.rate:.4g}", point.verdict + ended,
        f"{100 * point.chance:.0f} %" if judged else "", good, p95("ttft"), p95("tpot"), str(point.requests),
        point.run,
    )  # fmt: skip


def _figures(found: Answer) -> Iterator[tuple[str, str, str]]:
    if found.rate is None or found.goodput is None or found.tokens is None or found.all_tokens is None:
        return
    per = "" if found.replicas == 1 else f" (of {found.replicas})"
    terms = found.terms
    yield (
        f"goodput per replica{per}", f"{found.goodput:.4g} good requests/s",
        f"{format_share(found.good_share or 0.0)} good at {found.at_least:.4g}/s",
    )  # fmt: skip
    yield "", f"{found.tokens:,.0f} output token/s, {found.all_tokens:,.0f} with prompts", "tokens of good requests"
    if found.users is not None:
        yield (
            "users per device", f"{found.users:,.0f} active at once",
            f"assumed: {terms.user_requests:g} requests an hour each (--user-requests)",
        )  # fmt: skip
    if (bound := found.binding) is not None:
        kv = "" if bound.kv_mean is None else f", KV pool {100 * bound.kv_mean:.0f} %"
        yield (
            "utilisation", f"a step runs in {100 * bound.busy:.0f} % of the time{kv}",
            f"batch mean {bound.batch_mean:.0f}, peak {bound.batch_peak}; {_seen_in(found)}",
        )  # fmt: skip
    if (theory := found.theory) is not None:
        law, peak = theory.iron_law, theory.peak
        yield (
            "iron law's bound", f"{law.rate:.4g} requests/s; reached: {100 * theory.reached:.0f} %",
            f"{law.residents:.0f} in a step of {format_seconds(law.step_s)} at {100 * theory.utilisation:.0f} % of "
            f"the peak; {law.binds} ends it",
        )  # fmt: skip
        yield "  with all of the peak", f"{peak.rate:.4g} requests/s", f"{peak.binds} ends it"
    for name, share in found.efficiency.items():
        alone = "" if name.endswith(" steps") else ", each request as if alone"
        yield f"floor / time, {name}", f"{100 * share:.0f} %", f"best run{alone}"
    if found.cost_output is not None and found.cost_all is not None:
        yield (
            "cost per million tokens", f"{found.cost_output:.4g} of output, {found.cost_all:.4g} with prompts",
            f"{terms.price:g} a device-hour x {terms.devices}, good requests only",
        )  # fmt: skip
    if (size := found.sizing) is not None:
        price = "" if size.price_per_hour is None else f", {size.price_per_hour:.4g} an hour"
        yield (
            f"for a peak of {size.peak:g}/s",
            f"{several(size.replicas, 'replica')}, {several(size.devices, 'device')}{price}",
            f"the low end, {(found.low or found.rate) / found.replicas:.4g}/s each; {size.with_spare} with one spare",
        )  # fmt: skip
    if (one := found.millisecond) is not None:
        price = "" if one.price_per_day is None else f", {one.price_per_day:.4g} a day"
        yield (
            "a millisecond per request", f"{one.machine_days:.4g} machine-days a day{price}",
            f"{one.volume:,.0f} requests a day; of device time, of which a request takes {one.device_ms:.4g} ms",
        )  # fmt: skip


def _seen_in(found: Answer) -> str:
    return "best run" if found.breaks is None else "first run that broke"


def _descent(found: Answer) -> str:
    down = found.descent
    assert down is not None
    if down.held and down.tries == 1:
        return f"Hysteresis: none seen; {down.rate:.4g}/s held straight after an overload."
    if down.held:
        return f"Hysteresis: after an overload only {down.rate:.4g}/s held, at try {down.tries}: size for that."
    tries = "one try" if down.tries == 1 else f"{down.tries} tries"
    return f"Hysteresis: straight after an overload {down.rate:.4g}/s did not hold ({tries}); look whether it recovers."


def frontier_blocks(found: Frontier) -> Iterator[Block]:
    """The frontier: a table, what binds, and a plot."""
    yield f"Latency and cost over {found.sweep.knob}, each at its own capacity"
    yield Grid(
        (found.sweep.knob, "requests/s", "TTFT p95", "TPOT p95", "device-s per M tokens", "binds", "breaks", ""),
        tuple(
            (
                str(one.value), "–" if one.rate is None else f"{one.rate:.4g}", _time(one.latency_s),
                _time(one.token_s), "–" if one.cost is None else f"{one.cost:.4g}", one.binds or "–",
                one.breaks or "–", "frontier" if one.efficient else "",
            )
            for one in found.corners
        ),
    )  # fmt: skip
    best = max((one for one in found.corners if one.rate is not None), key=lambda one: one.rate or 0, default=None)
    if best is not None:
        yield f"Cheapest at {found.sweep.knob} {best.value}: there {best.binds or 'an unknown limit'} binds."


def frontier_plot(found: Frontier) -> str:
    """Time per token against cost."""
    points = [
        (one.cost, 1e3 * one.token_s, str(one.value))
        for one in found.corners
        if one.cost is not None and one.token_s is not None
    ]
    return scatter(points, "device-seconds per million output tokens", "TPOT p95, ms")


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def render(parts: Sequence[Block]) -> RenderableType:
    """For the terminal."""
    shown: list[RenderableType] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            shown.append(Text(part, style="bold" if place == 0 else ""))
            continue
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in part.header:
            table.add_column(column, overflow="fold")
        for row in part.rows:
            table.add_row(*(Text(cell) for cell in row))
        shown += [Text(), table, Text()]
    return Group(*shown)


def markdown(parts: Sequence[Block]) -> str:
    """For a pull request or a document."""
    lines: list[str] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            lines += [("### " if place == 0 else "") + _cell(part), ""]
            continue
        lines += ["| " + " | ".join(map(_cell, part.header)) + " |", "|" + "---|" * len(part.header)]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in part.rows] + [""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|")
