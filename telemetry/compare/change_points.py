"""Since when?  In a row of runs of one load (a baseline's history), after which run did the level of a figure change?

Binary segmentation: the split of the row with the largest difference of means over its own noise, in any figure, is
kept when fewer than ALPHA of the reshuffled rows have one as large in any of theirs (a permutation test; the maximum
over figures and places controls both); then each side is looked at again.  Must always hold: a row of fewer than
LEAST_RUNS is refused, since no order of so few says anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.errors import UserError
from models.wording import several
from telemetry.bundle import Bundle
from telemetry.compare.facts import Facts
from telemetry.compare.figures import FIGURES, values
from telemetry.slo import Slo

LEAST_RUNS: Final = 8
LEAST_SEGMENT: Final = 3
SHUFFLES: Final = 999
ALPHA: Final = 0.05
SEED: Final = 20_240_504
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """The level of a figure is another one from ``run`` (place in the row, 0-based) on.  before, after: geometric mean
    (s), or mean share.  change: relative, or in points.  figures: all whose level moved there, this one most."""

    place: int
    run: str
    figure: str
    before: float
    after: float
    change: float
    p: float
    figures: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def history(bundles: Sequence[Bundle], slo: Slo | None = None, warm_up: float = 0.1) -> list[ChangePoint]:
    """The change points of runs in order of time, first to last.  UserError: fewer than LEAST_RUNS."""
    if len(bundles) < LEAST_RUNS:
        raise UserError(
            f"{several(len(bundles), 'run is', 'runs are')} too few to say since when: {LEAST_RUNS} are needed",
            where="--history",
            remedy="add runs of the same load: tailspan runs baseline set --add NAME RUN",
        )
    facts = [Facts.of(one, slo) for one in bundles]
    rows = [values(one.only(one.intended_s >= warm_up * one.length_s)) for one in facts]
    table = np.array([found for found, _ in rows])
    counts = np.min([n for _, n in rows], axis=0)
    return change_points([one.run for one in facts], table, counts)


def change_points(runs: Sequence[str], table: Floats, counts: npt.NDArray[np.int64]) -> list[ChangePoint]:
    """table: [runs, FIGURES], seconds or shares; counts: least n of each figure."""
    usable = [
        at for at, one in enumerate(FIGURES) if counts[at] >= one.needed and np.isfinite(table[:, at]).all()
    ]  # fmt: skip
    if not usable:
        return []
    levels = np.stack(
        [np.log(np.maximum(table[:, at], 1e-9)) if FIGURES[at].p is not None else table[:, at] for at in usable], axis=1
    )
    found: list[ChangePoint] = []
    rng = np.random.default_rng(SEED)
    todo = [(0, len(runs))]
    while todo:
        start, end = todo.pop()
        split = _split(levels[start:end], rng)
        if split is None:
            continue
        place, p, figure, moved = split
        at = usable[figure]
        before, after = levels[start : start + place, figure].mean(), levels[start + place : end, figure].mean()
        relative = FIGURES[at].p is not None
        found.append(
            ChangePoint(
                start + place, runs[start + place], FIGURES[at].name,
                math.exp(before) if relative else float(before), math.exp(after) if relative else float(after),
                math.expm1(after - before) if relative else float(after - before), p,
                tuple(FIGURES[usable[one]].name for one in moved),
            )
        )  # fmt: skip
        todo += [(start, start + place), (start + place, end)]
    return sorted(found, key=lambda one: one.place)


def _split(levels: Floats, rng: np.random.Generator) -> tuple[int, float, int, list[int]] | None:
    """The best split of a stretch: its place, p, the figure that moved most, all figures that moved as certainly."""
    n = len(levels)
    if n < LEAST_RUNS:
        return None
    seen = _contrasts(levels)
    place, figure = np.unravel_index(int(np.argmax(seen)), seen.shape)
    drawn = np.array([_contrasts(levels[rng.permutation(n)]).max() for _ in range(SHUFFLES)])
    p = float((1 + (drawn >= seen.max() - 1e-12).sum()) / (1 + SHUFFLES))
    if p > ALPHA or seen.max() <= 0:
        return None
    bound = float(np.quantile(drawn, 1 - ALPHA))
    moved = [int(one) for one in np.argsort(-seen[place]) if seen[place, one] > bound]
    return int(place) + LEAST_SEGMENT, p, int(figure), moved


def _contrasts(levels: Floats) -> Floats:
    """[places, figures]: |t| of the two means at every split that leaves LEAST_SEGMENT runs on each side."""
    n = len(levels)
    sums, squares = np.cumsum(levels, axis=0), np.cumsum(levels**2, axis=0)
    k = np.arange(LEAST_SEGMENT, n - LEAST_SEGMENT + 1)
    left, total = sums[k - 1], sums[-1]
    a, b = left / k[:, None], (total - left) / (n - k)[:, None]
    inside = np.maximum(squares[-1] - k[:, None] * a**2 - (n - k)[:, None] * b**2, 0.0)
    spread = np.sqrt(inside / (n - 2) * (1 / k + 1 / (n - k))[:, None])
    moved = np.abs(a - b)
    floor = 1e-12 * (1 + np.abs(a))  # a level that never moves has no t
    found: Floats = np.where(moved <= floor, 0.0, moved / np.maximum(spread, floor))
    return found
