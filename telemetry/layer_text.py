"""Where a verdict points, in lines of plain text: for the terminal, Markdown and the report alike.

Owns the wording only.  Must always hold: each pointer is one line of layer, count and what is so, then its evidence and
the check that would disprove it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from telemetry import names
from telemetry.layer import Pointer, Where
from telemetry.objective import HELD
from telemetry.wrong_cause import NONE, WrongCause

SHOWN: Final = 4
FULL: Final = 0.95  # share of answers with full telemetry below which it is said


def worth_saying(where: Where, decision: str, wrong: int) -> bool:
    """A run that held its SLO without a wrong answer needs no pointer."""
    return bool(where.pointers) and (decision != HELD or wrong > 0)


def heads(where: Where) -> Iterator[tuple[Pointer, str]]:
    """The pointers that are shown, with their first line."""
    for one in where.pointers[:SHOWN]:
        count = f"{one.requests} {one.label}" if one.label else f"{one.requests} bad requests"
        yield one, f"{one.layer} ({count}): {one.words}"


def unsaid(where: Where, decision: str, wrong: int, looks: WrongCause) -> WrongCause | None:
    """What the wrong answers look like, where no pointer that is shown says it; None: nothing is left to say."""
    shown = where.pointers[:SHOWN] if worth_saying(where, decision, wrong) else ()
    return None if looks.kind == NONE or any(one.label == names.WRONG for one in shown) else looks


def rest(where: Where) -> str:
    """What was left out, and how much of the account there is; empty where nothing is to be said."""
    parts = []
    if more := len(where.pointers) - SHOWN:
        parts = [f"and {more} more (--json)"] if more > 0 else []
    if where.telemetry is not None and where.telemetry < FULL:
        parts.append(f"only {100 * where.telemetry:.0f} % of the answers carry full telemetry")
    return "; ".join(parts)
