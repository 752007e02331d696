"""``tailspan compare``: options, and where the result goes.  The answer is ``telemetry.compare``'s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from models.errors import UserError

if TYPE_CHECKING:
    from telemetry.bundle import Bundle

Root = Annotated[Path | None, typer.Option("--root", help="Folder of run bundles")]
SideA = Annotated[str, typer.Argument(help="Side A: a run, runs with commas between, a baseline; or a group of pairs")]
SideB = Annotated[str | None, typer.Argument(help="Side B; left out where A is a group")]
SloName = Annotated[str | None, typer.Option("--slo", help="Judge both by this SLO, not by the runs' own")]
Windows = Annotated[
    str | None,
    typer.Option("--window", metavar="A:B,C:D", help="Two windows in seconds, without replay: approximate"),
]


def compare_command(
    a: SideA,
    b: SideB = None,
    root: Root = None,
    slo: SloName = None,
    window: Windows = None,
    history: Annotated[
        bool, typer.Option("--history", help="A is a baseline: since when did its level change?")
    ] = False,
    warm_up: Annotated[float, typer.Option(help="Share of each run that is left out at its start")] = 0.1,
    alpha: Annotated[float, typer.Option(help="Level: false alarms over all figures together")] = 0.05,
    tolerance: Annotated[float, typer.Option(help="A change below is never one, however certain")] = 0.02,
    effect: Annotated[float, typer.Option(help="The change that the pairs needed are stated for")] = 0.1,
    power: Annotated[float, typer.Option(help="The power that the pairs needed are stated for")] = 0.95,
    any_load: Annotated[bool, typer.Option("--any-load", help="Compare even where the loads differ")] = False,
    out: Annotated[Path | None, typer.Option("--markdown", help="Write Markdown to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Did a percentile really move?  0: nothing got worse, 2: a regression, 3: a run is not valid."""
    from telemetry.compare import Comparison, Window, compare, compare_windows, resolve_sides
    from telemetry.compare import history as changes
    from telemetry.compare.replays import check_options
    from telemetry.compare.sides import resolve_side
    from telemetry.compare.text import markdown, render, render_history
    from telemetry.slo import load
    from telemetry.terminal import show

    check_options(warm_up, alpha, effect, power, tolerance)
    policy = load(slo) if slo else None
    if history:
        if b is not None or window is not None:
            raise UserError("looks at one row of runs", where="--history", remedy="name one baseline alone")
        runs = resolve_side(a, root)
        points = changes(runs, policy, warm_up)
        typer.echo(
            json.dumps([one.to_dict() for one in points], indent=2) if as_json else render_history(points, len(runs))
        )
        return
    found: Comparison
    if window is not None:
        one, two = sides_of_windows(a, b, window, root)
        found = compare_windows(
            Window(*one), Window(*two), slo=policy, alpha=alpha, effect=effect, power=power, tolerance=tolerance
        )
    else:
        of_a, of_b = resolve_sides(a, b, root)
        found = compare(
            of_a, of_b, slo=policy, warm_up=warm_up, alpha=alpha, effect=effect, power=power, tolerance=tolerance,
            same_load=not any_load,
        )  # fmt: skip
    if out is not None:
        write_text(out, markdown(found), "--markdown")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(render(found))
    raise typer.Exit(found.exit_code)


Side = tuple["Bundle", float, float]


def sides_of_windows(a: str, b: str | None, window: str, root: Path | None) -> tuple[Side, Side]:
    """The bundles and windows of ``--window A:B,C:D``; b None: both windows are of one bundle.  UserError."""
    from telemetry.bundle import Bundle

    parts = window.split(",")
    try:
        spans = [tuple(float(end) for end in part.split(":")) for part in parts]
    except ValueError:
        spans = []
    if len(spans) != 2 or any(len(span) != 2 for span in spans):
        raise UserError(f"{window!r} is not two windows", where="--window", remedy="write seconds as 0:60,60:120")
    first = Bundle.open(a, root)
    second = first if b is None else Bundle.open(b, root)
    (x, y), (u, v) = spans[0][:2], spans[1][:2]
    return (first, x, y), (second, u, v)


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file that was asked for.  UserError where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UserError(
            f"cannot be written: {problem.strerror}",
            where=f"{option} {path}",
            remedy="name a path in a folder that exists",
        ) from problem
