"""What changed between two sides, for the pages Compare and Explain: the answers of the analyses, and points to draw.

A run that `tailspan run --against` made stands for all pairs of its group; any other is one pair with the run that it
is compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from dashboards.facts.chosen import Chosen, indices
from dashboards.source import Source
from models.errors import UserError
from telemetry.bundle import Bundle
from telemetry.compare import Comparison, Facts, compare
from telemetry.compare.sides import read_group
from telemetry.explain import Explanation, explain

POINTS: Final = 1500  # of a scatter; the slowest of them are always among these
SLOWEST: Final = 300
AT_ONCE: Final = 200_000  # requests in all, up to which a page explains without being asked to


Paths = tuple[tuple[str, ...], tuple[str, ...]]


def sides(run: Source, base: Source) -> Paths:
    """Folders of A and of B: the pairs of the run's group, else the run that it is compared with and this one."""
    group = run.bundle.manifest.get("group")
    if isinstance(group, dict) and isinstance(group.get("id"), str):
        try:
            a, b = read_group(group["id"], run.bundle.path.parent)
            return tuple(str(one.path) for one in a), tuple(str(one.path) for one in b)
        except UserError:
            pass  # its file or a run of it is gone: then this run alone
    return (str(base.bundle.path),), (str(run.bundle.path),)


def _opened(paths: Paths) -> tuple[list[Bundle], list[Bundle]]:
    a, b = ([Bundle.open(Path(one)) for one in side] for side in paths)
    return a, b


def compared(run: Source, paths: Paths) -> Comparison:
    """The comparison, other loads included."""
    return compare(*_opened(paths), slo=run.policy, same_load=False)


def explained(run: Source, paths: Paths, chosen: Chosen | None = None) -> Explanation:
    """The explanation, by the queue model; chosen: of these requests of the run alone."""
    asked = None if chosen is None or chosen.empty else indices(run, chosen)
    return explain(*_opened(paths), slo=run.policy, chosen=asked)


def size(run: Source, paths: Paths) -> int:
    """Requests on both sides."""
    a, b = _opened(paths)
    return sum(one.scheduled for one in (*a, *b))


def scatter(run: Source, paths: Paths, measure: str) -> list[dict[str, Any]]:
    """Requests that both sides of the first pair answered: index, a_s, b_s; at most POINTS, the slowest among them."""
    a, b = (Facts.of(side[0], run.policy) for side in _opened(paths))
    _, at, there = np.intersect1d(a.index, b.index, return_indices=True)
    times = [one.times[measure][place] for one, place in ((a, at), (b, there))]
    known = np.flatnonzero(np.isfinite(times[0]) & np.isfinite(times[1]) & (times[0] > 0) & (times[1] > 0))
    if len(known) > POINTS:
        order = known[np.argsort(-np.maximum(times[0], times[1])[known], kind="stable")]
        others = np.random.default_rng(0).choice(order[SLOWEST:], POINTS - SLOWEST, replace=False)
        known = np.concatenate([order[:SLOWEST], others])
    return [
        {"index": int(a.index[at[k]]), "a_s": float(times[0][k]), "b_s": float(times[1][k])}
        for k in sorted(known.tolist())
    ]
