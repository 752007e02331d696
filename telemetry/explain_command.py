"""``tailspan explain``: options, and where the result goes.  The answer is ``telemetry.explain``'s.

The engine's twin comes from ``tailspan.py``, which alone knows the engine; it is loaded only when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from models.errors import UserError
from telemetry.compare_command import Root, SideA, SideB, SloName, Windows, sides_of_windows, write_text

if TYPE_CHECKING:
    from telemetry.twin import Twin


def explain_with(load_twin: Callable[[], Twin]) -> Callable[..., None]:
    """The command, with what loads the engine's twin."""

    def explain_command(
        a: SideA,
        b: SideB = None,
        root: Root = None,
        slo: SloName = None,
        window: Windows = None,
        figure: Annotated[
            str | None, typer.Option(help="What to explain: 'e2e p99' … [default: what got worse most]")
        ] = None,
        requests: Annotated[
            str | None, typer.Option(metavar="I,J,K-L", help="These requests of B alone, by index")
        ] = None,
        warm_up: Annotated[float, typer.Option(help="Share of each run that is left out at its start")] = 0.1,
        twin: Annotated[
            bool, typer.Option("--twin", help="Replay what-ifs through the engine's own scheduler (slower)")
        ] = False,
        out: Annotated[Path | None, typer.Option("--markdown", help="Write Markdown to this file")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    ) -> None:
        """Why did it change: which phase, which cause, for whom; or unknown."""
        from telemetry.compare import resolve_sides
        from telemetry.compare.replays import check_options
        from telemetry.explain import explain
        from telemetry.explain.text import markdown, render
        from telemetry.slo import load
        from telemetry.terminal import show

        check_options(warm_up)
        spans = None
        if window is not None:
            one, two = sides_of_windows(a, b, window, root)
            sides, spans = ([one[0]], [two[0]]), (one[1:], two[1:])
        else:
            sides = resolve_sides(a, b, root, command="tailspan explain")
        found = explain(
            *sides, slo=load(slo) if slo else None, twin=load_twin() if twin else None, windows=spans,
            chosen=chosen_of(requests) if requests is not None else None, figure=figure, warm_up=warm_up,
        )  # fmt: skip
        if out is not None:
            write_text(out, markdown(found), "--markdown")
        if as_json:
            typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            show(render(found))

    return explain_command


def chosen_of(text: str) -> list[int]:
    """Indices of ``3,7,10-20``.  UserError for what is none."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            low, high = 1, 0
        if not 0 <= low <= high or high - low > 10_000_000:
            raise UserError(f"{part!r} is no index", where="--requests", remedy="write 3,7,10-20")
        found.extend(range(low, high + 1))
    return found
