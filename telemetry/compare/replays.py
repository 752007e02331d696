"""Paired replays: the same load, K repeats a side.  What can be told, and with which certainty.

Order: refuse what cannot be compared, drop the warm-up, compute each figure of each run, test the differences of the
pairs together.  One pair has no spread between repeats: then blocks of time stand in, and the result says approximate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.errors import UserError
from models.wording import several
from telemetry.bundle import Bundle
from telemetry.compare import max_t
from telemetry.compare.facts import Facts
from telemetry.compare.figures import FIGURES, Figure, band, values
from telemetry.compare.refusals import (
    NOT_VALID,
    OTHER_LOAD,
    SAME_RUN,
    TOO_FEW_PAIRS,
    TOO_FEW_REQUESTS,
    UNEQUAL_SIDES,
    Refusal,
)
from telemetry.compare.result import BETTER, NONE, PAIRED, SAME, STUDENT, UNTESTED, WORSE, Comparison, Effect
from telemetry.slo import Slo

WARM_UP: Final = 0.1  # of the run, by intended send
ALPHA: Final = 0.05
EFFECT: Final = 0.10
POWER: Final = 0.95
#: A change below is not called one, however certain: relative for times, of all requests for shares.
TOLERANCE: Final = 0.02
SHARE_TOLERANCE: Final = 0.001
BEYOND: Final = 4.0  # an unbounded percentile counts as so many times the largest bounded one of its figure
ARRIVAL_TOLERANCE_S: Final = 0.001

Floats = npt.NDArray[np.float64]


def compare(
    a: Sequence[Bundle],
    b: Sequence[Bundle],
    *,
    slo: Slo | None = None,
    warm_up: float = WARM_UP,
    alpha: float = ALPHA,
    effect: float = EFFECT,
    power: float = POWER,
    tolerance: float = TOLERANCE,
    same_load: bool = True,
) -> Comparison:
    """Compare two sides; pair i is a[i], b[i].

    slo: judges both (default: each bundle's own).  warm_up: share of the run that is left out at its start.  effect,
    power: what ``needed`` is for.  tolerance: relative change of a time below which no change is named.  same_load:
    refuse sides whose loads differ; off, they are compared with a note.  UserError for options out of range.
    """
    facts = [[Facts.of(one, slo) for one in side] for side in (a, b)]
    return compare_facts(
        facts[0], facts[1], warm_up=warm_up, alpha=alpha, effect=effect, power=power, tolerance=tolerance,
        same_load=same_load,
    )  # fmt: skip


def compare_facts(
    a: Sequence[Facts],
    b: Sequence[Facts],
    *,
    warm_up: float = WARM_UP,
    alpha: float = ALPHA,
    effect: float = EFFECT,
    power: float = POWER,
    tolerance: float = TOLERANCE,
    same_load: bool = True,
    figures: Sequence[Figure] = FIGURES,
) -> Comparison:
    """``compare`` on arrays."""
    check_options(warm_up, alpha, effect, power, tolerance)
    runs = (tuple(one.run for one in a), tuple(one.run for one in b))
    differs = other_load(a, b)
    refusals = _refusals(a, b, differs if same_load else None)
    if any(one.whole for one in refusals):
        return Comparison(*runs, NONE, alpha, (), tuple(refusals), effect=effect, power=power, warm_up=warm_up,
                          same_load=differs is None)  # fmt: skip
    sides = [[_warm(one, warm_up) for one in side] for side in (a, b)]
    notes = _notes(a, b, differs)
    if len(a) == 1:
        from telemetry.compare.blocks import compare_blocks

        return compare_blocks(
            sides[0][0], sides[1][0], paired=differs is None, alpha=alpha, tolerance=tolerance, figures=figures,
            refusals=refusals, notes=notes, warm_up=warm_up, effect=effect, power=power,
        )  # fmt: skip
    found = [np.array([values(one, figures)[0] for one in side]) for side in sides]
    counts = np.min([values(one, figures)[1] for side in sides for one in side], axis=0)
    usable = _usable(found, counts, figures)
    places = [at for at, why in enumerate(usable) if why is None]
    differences = (
        np.stack([difference(found[0][:, at], found[1][:, at], figures[at]) for at in places], axis=1)
        if (places)
        else np.empty((len(a), 0))
    )
    tested = max_t.test(differences, alpha) if places else None
    bound_from = max_t.pairs_to_bound(alpha, len(places))
    effects = []
    for at, figure in enumerate(figures):
        bands = (band(sides[0], figure), band(sides[1], figure)) if figure.p is not None else (None, None)
        effects.append(
            _effect(figure, found[0][:, at], found[1][:, at], int(counts[at]), usable[at], bands,
                    tested, places.index(at) if at in places else None, tolerance, bound_from)
        )  # fmt: skip
    needed = _needed(differences, [figures[at] for at in places], tested, effect, power, alpha)
    refusals += _too_few(figures, counts)
    return Comparison(
        *runs, PAIRED if tested is not None and tested.exact else STUDENT, alpha, tuple(effects), tuple(refusals),
        tuple(notes), effect, power, max((k for k in needed.values() if k is not None), default=None), warm_up,
        differs is None, {"needed": needed},
    )  # fmt: skip


def refuse(a: Sequence[Facts], b: Sequence[Facts], *, same_load: bool = True) -> list[Refusal]:
    """What stands against comparing two sides at all; empty: nothing does."""
    return _refusals(a, b, other_load(a, b) if same_load else None)


def _refusals(a: Sequence[Facts], b: Sequence[Facts], differs: str | None) -> list[Refusal]:
    found: list[Refusal] = []
    if not a or not b:
        remedy = "run both sides: tailspan run … --repeats 6 --target URL_A --against URL_B"
        return [Refusal(TOO_FEW_PAIRS, f"{several(len(a), 'run')} on side A, {len(b)} on side B", remedy, usage=True)]
    if len(a) != len(b):
        said = f"{several(len(a), 'run')} on side A, {len(b)} on side B: they cannot be paired"
        found.append(Refusal(UNEQUAL_SIDES, said, "name as many runs on both sides", usage=True))
    both = {one.run for one in a} & {one.run for one in b}
    if both:
        said = f"run {sorted(both)[0]} stands on both sides"
        found.append(Refusal(SAME_RUN, said, "name two different runs", usage=True))
    for side, runs in (("A", a), ("B", b)):
        for one in runs:
            if not one.valid:
                why = "; ".join(one.reasons) or "no reason given"
                said = f"run {one.run} on side {side} is not to be trusted: {why}"
                found.append(
                    Refusal(NOT_VALID, said, "run it again with a generator that keeps up: tailspan selfcheck")
                )
            elif not len(one):
                found.append(Refusal(TOO_FEW_REQUESTS, f"run {one.run} has no request", "run it again"))
    if differs is not None:
        said = f"the loads differ: {differs}"
        remedy = (
            "replay the same trace, window, scales and seed on both sides; for two windows without replay: --window"
        )
        found.append(Refusal(OTHER_LOAD, said, remedy, usage=True))
    return found


def other_load(a: Sequence[Facts], b: Sequence[Facts]) -> str | None:
    """In which way the requests of the pairs differ (what was asked, and when); None: they are the same."""
    for one, two in zip(a, b, strict=False):
        said = _difference_of_loads(one, two)
        if said is not None:
            return f"{said} (runs {one.run} and {two.run})"
    return None


def _difference_of_loads(one: Facts, two: Facts) -> str | None:
    x, y = one.load.get("trace"), two.load.get("trace")
    if x and y and x != y:
        return f"another trace (sha256 {str(x)[:12]} and {str(y)[:12]})"
    common = one.index
    at: npt.NDArray[Any] | slice = slice(None)
    there: npt.NDArray[Any] | slice = slice(None)
    if not np.array_equal(one.index, two.index):
        common, at, there = np.intersect1d(one.index, two.index, assume_unique=False, return_indices=True)
    if len(common) < 0.98 * max(len(one), len(two)):  # invalid ones are missing on one side alone
        return f"{len(one):,} and {len(two):,} requests, {len(common):,} of them with the same index"
    for what, of_one, of_two in (
        ("prompt lengths", one.input_tokens, two.input_tokens),
        ("answer lengths", one.output_tokens, two.output_tokens),
    ):
        n = int((of_one[at] != of_two[there]).sum())
        if n:
            return f"other {what} in {n:,} of {len(common):,} requests"
    apart = np.abs(one.intended_s[at] - two.intended_s[there])
    n = int((apart > ARRIVAL_TOLERANCE_S).sum())
    if n:
        return f"other arrival times in {n:,} of {len(common):,} requests, up to {apart.max():.3g} s"
    x, y = one.load.get("seed"), two.load.get("seed")
    if x is not None and y is not None and x != y:
        return f"other prompts: seed {x} and {y}"
    return None


def difference(a: Floats, b: Floats, figure: Figure) -> Floats:
    """log q_B - log q_A of each pair, or share_B - share_A.

    An unbounded percentile counts as BEYOND times the largest bounded one: enough to outrank all, and the same on both
    sides, so that exchanging them changes the sign alone.
    """
    if figure.p is None:
        return b - a
    bounded = np.concatenate([a, b])
    bounded = bounded[np.isfinite(bounded)]
    most = BEYOND * float(bounded.max()) if len(bounded) else 1.0
    x, y = (np.maximum(np.where(np.isfinite(side), side, most), 1e-9) for side in (a, b))
    found: Floats = np.log(y) - np.log(x)
    return found


def _warm(facts: Facts, warm_up: float) -> Facts:
    return facts.only(facts.intended_s >= warm_up * facts.length_s) if warm_up > 0 else facts


def _usable(found: Sequence[Floats], counts: npt.NDArray[np.int64], figures: Sequence[Figure]) -> list[str | None]:
    """Per figure, why it is not compared; None: it is."""
    usable: list[str | None] = []
    for at, figure in enumerate(figures):
        both = np.concatenate([side[:, at] for side in found])
        if counts[at] < figure.needed:
            usable.append(f"n = {counts[at]}, {figure.needed} needed")
        elif figure.p is not None and not np.isfinite(both).any():
            usable.append("unbounded in every run: too many requests were dropped")
        else:
            usable.append(None)
    return usable


def _effect(
    figure: Figure,
    a: Floats,
    b: Floats,
    n: int,
    why_not: str | None,
    bands: tuple[tuple[float | None, float | None] | None, tuple[float | None, float | None] | None],
    tested: max_t.Tested | None,
    place: int | None,
    tolerance: float,
    bound_from: int,
) -> Effect:
    relative = figure.p is not None
    pairs = tuple((_bounded(x), _bounded(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    levels = [middle(side, relative) for side in (a, b)]
    if place is None or tested is None:
        return Effect(figure.name, relative, levels[0], levels[1], None, None, None, None, UNTESTED, n, *bands, why_not,
                      pairs)  # fmt: skip
    open_ended = relative and not (np.isfinite(a).all() and np.isfinite(b).all())
    ends = [float(values[place]) for values in (tested.mean, tested.low, tested.high)]
    verdict = judge(ends[0], ends[1], ends[2], relative, tolerance)
    mean: float | None
    low: float | None
    high: float | None
    mean, low, high = (math.expm1(min(one, 700.0)) if relative else one for one in ends)
    note = (
        "unbounded in some runs: the change is at least in this direction, its size is not known"
        if open_ended
        else None
    )
    too_few = len(pairs) < bound_from and verdict == SAME and not open_ended
    if open_ended:
        mean = None
    if open_ended or too_few:
        low = high = None
    return Effect(
        figure.name, relative, levels[0], levels[1], mean, low, high, float(tested.p[place]), verdict, n, *bands, note,
        pairs, bound_from if too_few else None,
    )  # fmt: skip


def judge(mean: float, low: float, high: float, relative: bool, tolerance: float) -> str:
    """What an effect is called; all in logarithms where it is relative."""
    least = math.log1p(tolerance) if relative else SHARE_TOLERANCE
    if low > 0 and mean > least:
        return WORSE
    if high < 0 and mean < -least:
        return BETTER
    return SAME


def middle(values: Floats, relative: bool) -> float | None:
    """Geometric mean of times, mean of shares; None: not all of them are bounded."""
    if not len(values) or not np.isfinite(values).all():
        return None
    return float(np.exp(np.log(np.maximum(values, 1e-9)).mean())) if relative else float(values.mean())


def _bounded(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _needed(
    differences: Floats,
    figures: Sequence[Figure],
    tested: max_t.Tested | None,
    effect: float,
    power: float,
    alpha: float,
) -> dict[str, int | None]:
    """Pairs for each percentile to show the effect asked for."""
    if tested is None:
        return {}
    level = max_t.effective_level(tested, len(differences), alpha, len(figures))
    return {
        figure.name: max_t.pairs_needed(float(differences[:, at].std(ddof=1)), math.log1p(effect), power, level)
        for at, figure in enumerate(figures)
        if figure.p is not None
    }


def _too_few(figures: Sequence[Figure], counts: npt.NDArray[np.int64]) -> list[Refusal]:
    short = [(one, int(n)) for one, n in zip(figures, counts, strict=True) if n < one.needed]
    if not short:
        return []
    named = ", ".join(one.name for one, _ in short)
    most = max(one.needed for one, _ in short)
    said = f"too few requests for {named}: n = {min(n for _, n in short)} after the warm-up, {most} needed"
    return [Refusal(TOO_FEW_REQUESTS, said, f"replay at least {most} requests after the warm-up", whole=False)]


def _notes(a: Sequence[Facts], b: Sequence[Facts], differs: str | None) -> list[str]:
    notes = []
    pairs = len(a)
    if 1 < pairs < max_t.LEAST_FLIPPED:
        notes.append(
            f"{pairs} pairs: an exact two-sided test cannot go below p = {max_t.least_p(pairs):.2g}, so Student's t "
            "with Bonferroni's correction stands in, which takes the differences for normal; 6 pairs make it exact"
        )
    if differs is not None:
        notes.append(f"the loads differ ({differs}): a change may be the load's")
    salts = [(one.load.get("salt"), two.load.get("salt")) for one, two in zip(a, b, strict=True)]
    if any(x is not None and y is not None and x != y for x, y in salts):
        notes.append("the prompts of a pair have equal lengths but other words (another salt)")
    return notes


def check_options(
    warm_up: float = WARM_UP,
    alpha: float = ALPHA,
    effect: float = EFFECT,
    power: float = POWER,
    tolerance: float = TOLERANCE,
) -> None:
    """Raises UserError for an option out of range, by its name."""
    for name, value, low, high in (
        ("--warm-up", warm_up, 0.0, 0.9),
        ("--alpha", alpha, 0.0005, 0.5),
        ("--effect", effect, 0.0001, 10.0),
        ("--power", power, 0.05, 0.999),
        ("--tolerance", tolerance, 0.0, 10.0),
    ):
        if not low <= value <= high:
            raise UserError(f"{value:g} is out of range", where=name, remedy=f"give {low:g} to {high:g}")
