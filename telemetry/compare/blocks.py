"""Without repeats: blocks of time stand in for them.  Always approximate, and says so.

Requests depend on each other through the queue, so a bootstrap of single requests calls most unchanged pairs different.
Here a side is cut into BLOCKS long stretches of equal numbers of requests, which are drawn with replacement (block
bootstrap, Künsch 1989); where both sides replayed the same load the same stretches are drawn on both.  The spread of
the drawn differences is the noise; its critical value is widened from the normal to Student's t with BLOCKS - 1 degrees
of freedom, and taken as the largest over all figures (max-T).  Blocks still understate what two runs of the same thing
differ by: ``FALSE_ALARMS`` says how often that was wrong when nothing had changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry import names
from telemetry.compare.facts import Facts
from telemetry.compare.figures import Figure, band, values
from telemetry.compare.refusals import TOO_FEW_REQUESTS, Refusal
from telemetry.compare.result import BLOCKS as METHOD
from telemetry.compare.result import UNTESTED, WORSE, Comparison, Effect
from telemetry.distributions import student_quantile

BLOCKS: Final = 10
DRAWS: Final = 500
GRID: Final = 10_000  # values that a draw tells apart: beyond so many requests neighbours share one
SEED: Final = 20_240_503
NORMAL: Final = 1.959964  # two-sided 95 %
LEAST_A_BLOCK: Final = 10  # requests
#: Share of unchanged pairs that this mode called changed, at utilisation 0.5, 0.8 and 0.9; measured on the simulated
#: engine by `make accept-compare`: with the same load on both sides, and for two windows of one run.
FALSE_ALARMS: Final = {True: (0.009, 0.084, 0.163), False: (0.096, 0.244, 0.366)}

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def compare_blocks(
    a: Facts,
    b: Facts,
    *,
    paired: bool,
    alpha: float,
    tolerance: float,
    figures: Sequence[Figure],
    refusals: Sequence[Refusal] = (),
    notes: Sequence[str] = (),
    warm_up: float = 0.0,
    effect: float = 0.10,
    power: float = 0.95,
) -> Comparison:
    """Two sets of requests in order of time.  paired: the same load on both sides."""
    runs = ((a.run,), (b.run,))
    least = BLOCKS * LEAST_A_BLOCK
    if min(len(a), len(b)) < least:
        said = f"{len(a)} and {len(b)} requests are too few for {BLOCKS} blocks of {LEAST_A_BLOCK}"
        short = Refusal(TOO_FEW_REQUESTS, said, f"take longer windows: at least {least} requests each")
        return Comparison(
            *runs, METHOD, alpha, (), (*refusals, short), tuple(notes), effect, power, None, warm_up, paired
        )
    of_a, n_a = values(a, figures)
    of_b, n_b = values(b, figures)
    counts = np.minimum(n_a, n_b)
    usable = [at for at, one in enumerate(figures) if counts[at] >= one.needed and np.isfinite(of_a[at] + of_b[at])]
    rng = np.random.default_rng(SEED)
    weights = [rng.multinomial(BLOCKS, [1 / BLOCKS] * BLOCKS, DRAWS).astype(np.float64) for _ in range(2)]
    if paired:
        weights[1] = weights[0]
    edges = _edges(a) if paired else None
    drawn = [_drawn(side, _ids(side, edges), one, figures) for side, one in zip((a, b), weights, strict=True)]
    effects, tested = _effects(a, b, of_a, of_b, counts, drawn, figures, usable, alpha, tolerance)
    short_figures = [one.name for at, one in enumerate(figures) if counts[at] < one.needed]
    more: list[Refusal] = []
    if short_figures:
        needed = max(one.needed for at, one in enumerate(figures) if counts[at] < one.needed)
        said = f"too few requests for {', '.join(short_figures)}: n = {int(counts.min())}, {needed} needed"
        more.append(Refusal(TOO_FEW_REQUESTS, said, f"take at least {needed} requests a side", whole=False))
    return Comparison(
        *runs, METHOD, alpha, tuple(effects), (*refusals, *more), (*notes, _warning(paired)), effect, power, None,
        warm_up, paired, {"critical": tested, "blocks": BLOCKS},
    )  # fmt: skip


def _warning(paired: bool) -> str:
    kind = "one replay a side" if paired else "two windows without replay"
    rates = (
        f"; measured where nothing had changed, at utilisation 0.5, 0.8 and 0.9: alarms in "
        f"{', '.join(f'{100 * one:.0f} %' for one in FALSE_ALARMS[paired])} of cases"
    )
    return (
        f"APPROXIMATE: {kind}; noise is guessed from {BLOCKS} blocks{rates}. For a verdict run 7 pairs or more: "
        "tailspan run … --repeats 7 --target URL_A --against URL_B"
    )


def _effects(
    a: Facts,
    b: Facts,
    of_a: Floats,
    of_b: Floats,
    counts: Ints,
    drawn: Sequence[Floats],
    figures: Sequence[Figure],
    usable: Sequence[int],
    alpha: float,
    tolerance: float,
) -> tuple[list[Effect], float]:
    from telemetry.compare.replays import judge

    seen, moved = np.zeros(len(figures)), np.zeros((DRAWS, len(figures)))
    for at in usable:
        if figures[at].p is None:
            seen[at], moved[:, at] = of_b[at] - of_a[at], drawn[1][:, at] - drawn[0][:, at]
        else:
            seen[at] = math.log(max(of_b[at], 1e-9) / max(of_a[at], 1e-9))
            moved[:, at] = _logs(drawn[1][:, at]) - _logs(drawn[0][:, at])
    error = moved.std(axis=0, ddof=1)
    # A share of a few requests hardly varies between blocks: its spread is at least that of counting.
    for at in usable:
        if figures[at].p is None:
            n = max(1, min(len(a), len(b)))
            error[at] = max(error[at], math.sqrt((of_a[at] + of_b[at] + 1 / n) / n))
    known = [at for at in usable if error[at] > 0]
    widest = np.abs(moved[:, known] - moved[:, known].mean(axis=0)) / error[known] if known else np.zeros((DRAWS, 1))
    student = student_quantile(1 - alpha / 2, BLOCKS - 1)
    critical = float(np.quantile(widest.max(axis=1), 1 - alpha)) * student / NORMAL
    critical = max(critical, student)
    found = []
    for at, one in enumerate(figures):
        relative = one.p is not None
        bands = (band([a], one), band([b], one)) if relative else (None, None)
        before, after = (float(side[at]) if np.isfinite(side[at]) else None for side in (of_a, of_b))
        here = Effect(
            one.name, relative, before, after, None, None, None, None, UNTESTED, int(counts[at]), bands[0], bands[1],
            pairs=((before, after),),
        )  # fmt: skip
        if at not in usable:
            if counts[at] < one.needed:
                here = replace(here, note=f"n = {counts[at]}, {one.needed} needed")
            elif relative and before is not None and after is None:
                here = replace(here, verdict=WORSE, note="unbounded on side B")
            else:
                here = replace(here, note="unbounded on a side")
            found.append(here)
            continue
        low, high = float(seen[at] - critical * error[at]), float(seen[at] + critical * error[at])
        verdict = judge(float(seen[at]), low, high, relative, tolerance)
        statistic = abs(seen[at]) / error[at] * NORMAL / student if error[at] > 0 else 0.0
        p = float((1 + (widest.max(axis=1) >= statistic).sum()) / (1 + DRAWS))
        change, low, high = (
            math.expm1(min(value, 700.0)) if relative else value for value in (float(seen[at]), low, high)
        )
        found.append(replace(here, change=change, low=low, high=high, p=p, verdict=verdict))
    return found, critical


def _logs(values: Floats) -> Floats:
    """Logarithms; an unbounded draw counts as four times the largest bounded one, as in ``replays``."""
    bounded = values[np.isfinite(values)]
    most = 4 * float(bounded.max()) if len(bounded) else 1.0
    logs: Floats = np.log(np.maximum(np.where(np.isfinite(values), values, most), 1e-9))
    return logs


def _edges(facts: Facts) -> Floats:
    """Moments between the blocks: equal numbers of requests."""
    found: Floats = np.quantile(facts.intended_s, np.arange(1, BLOCKS) / BLOCKS)
    return found


def _ids(facts: Facts, edges: Floats | None) -> Ints:
    return np.searchsorted(_edges(facts) if edges is None else edges, facts.intended_s, side="right").astype(np.int64)


def _drawn(facts: Facts, ids: Ints, weights: Floats, figures: Sequence[Figure]) -> Floats:
    """[draws, figures]: each figure over the requests of the drawn blocks, each as often as its block was drawn."""
    found = np.full((len(weights), len(figures)), np.nan)
    for measure in dict.fromkeys(one.measure for one in figures if one.p is not None):
        places = [at for at, one in enumerate(figures) if one.measure == measure and one.p is not None]
        times = facts.times[measure]
        defined = ~np.isnan(times)
        found[:, places] = _quantiles(times[defined], ids[defined], weights, [figures[at].p or 0.0 for at in places])
    sizes = np.bincount(ids, minlength=BLOCKS).astype(np.float64)
    for at, one in enumerate(figures):
        if one.p is None:
            hit = np.bincount(ids, facts.label == names.LABELS.index(one.measure), BLOCKS)
            found[:, at] = (weights @ hit) / np.maximum(weights @ sizes, 1.0)
    return found


def _quantiles(times: Floats, ids: Ints, weights: Floats, ps: Sequence[float]) -> Floats:
    """[draws, ps].  Values are gathered in at most GRID bins of equal numbers, and counted once per block."""
    n = len(times)
    found = np.full((len(weights), len(ps)), np.nan)
    if not n:
        return found
    order = np.argsort(times, kind="stable")
    bins = (np.arange(n) * min(n, GRID)) // n
    size = int(bins[-1]) + 1
    last = np.flatnonzero(np.diff(bins, append=size))  # the largest value of each bin
    counts = np.bincount(ids[order] * size + bins, minlength=BLOCKS * size).reshape(BLOCKS, size)
    below = np.cumsum(counts, axis=1).astype(np.float64)
    grid = times[order][last]
    cumulated = weights @ below
    total = cumulated[:, -1]
    for at, p in enumerate(ps):
        ranks = np.maximum(1.0, np.ceil(p * total / 100 - 1e-9))
        places = [int(np.searchsorted(row, rank)) for row, rank in zip(cumulated, ranks, strict=True)]
        found[:, at] = grid[np.minimum(places, size - 1)]
    return found
