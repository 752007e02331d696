"""Two windows of production, or of one run, without replay: an approximate comparison, marked as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.errors import UserError
from telemetry.bundle import Bundle
from telemetry.compare.blocks import compare_blocks
from telemetry.compare.facts import Facts
from telemetry.compare.figures import FIGURES, Figure
from telemetry.compare.refusals import NOT_VALID, Refusal
from telemetry.compare.replays import ALPHA, EFFECT, POWER, TOLERANCE
from telemetry.compare.result import NONE, Comparison
from telemetry.slo import Slo


@dataclass(frozen=True, slots=True)
class Window:
    """The requests of a bundle that were meant to be sent in [start, end), seconds after its zero."""

    bundle: Bundle
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        return f"{self.bundle.run_id} {self.start_s:g}:{self.end_s:g} s"


def compare_windows(
    a: Window,
    b: Window,
    *,
    slo: Slo | None = None,
    alpha: float = ALPHA,
    effect: float = EFFECT,
    power: float = POWER,
    tolerance: float = TOLERANCE,
    figures: Sequence[Figure] = FIGURES,
) -> Comparison:
    """Compare two windows.  UserError: a window that ends before it begins, or two of one run that overlap."""
    for one in (a, b):
        if not one.start_s < one.end_s:
            raise UserError(
                f"the window {one.start_s:g}:{one.end_s:g} ends before it begins", where="--window",
                remedy="write seconds as START:END,START:END",
            )  # fmt: skip
    if a.bundle.path == b.bundle.path and a.start_s < b.end_s and b.start_s < a.end_s:
        raise UserError("the windows overlap", where="--window", remedy="give two that do not share a moment")
    whole = Facts.of(a.bundle, slo), Facts.of(b.bundle, slo)
    sides = [facts.between(one.start_s, one.end_s) for facts, one in zip(whole, (a, b), strict=True)]
    not_valid = tuple(
        Refusal(
            NOT_VALID,
            f"run {one.run} is not to be trusted: {'; '.join(one.reasons) or 'no reason given'}",
            "take windows of a run whose generator kept up",
        )
        for one in ({facts.run: facts for facts in whole}).values()
        if not one.valid
    )
    if not_valid:
        return Comparison((a.name,), (b.name,), NONE, alpha, (), not_valid, (), effect, power, None, 0.0, False)
    found = compare_blocks(
        sides[0], sides[1], paired=False, alpha=alpha, tolerance=tolerance, figures=figures, effect=effect, power=power
    )
    notes = (*found.notes, "two windows had different requests: a change may be the load's")
    return Comparison(
        (a.name,), (b.name,), found.method, alpha, found.effects, found.refusals, notes, effect, power, None, 0.0,
        False, found.details,
    )  # fmt: skip
