"""Layer 3: for whom?  The change of the exceedance divided over groups of requests, exactly.

With t = A's percentile:

    P_B(T > t) - P_A(T > t) = sum over s of (w_s^B - w_s^A) * mean e_s  [mix]  +  mean w_s * (e_s^B - e_s^A)  [within]

for every partition s (class, replica, prompt length, answer length, share from the cache, attempts), w the share of the
requests and e the share of those beyond t; a dropped request is beyond.  Mix says that other requests came, within that
the same kind of request became slower.

p-values: the labels A and B are exchanged inside pairs (of repeats; with few of them of blocks of time as well), and
the sums compared.  Over all partitions the false-discovery rate is held (Benjamini and Hochberg 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.distributions import false_discovery
from telemetry.explain.result import Cell, Partition
from telemetry.explain.side import Run

LEAST_IN_CELL: Final = 30  # requests on each side; smaller cells are joined
RATE: Final = 0.05
FLIPS: Final = 999
ENOUGH_PAIRS: Final = 6
BLOCKS: Final = 10
SEED: Final = 20_240_506
DEEPER: Final = 3  # attributes that are crossed with each other
REST: Final = "others"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def partitions(
    a: Sequence[Run], b: Sequence[Run], measure: str, threshold_s: float, warm_up: float = 0.0
) -> tuple[Partition, ...]:
    """All partitions, the one that tells most first.  threshold_s: what counts as slow; measure: ttft, tpot or e2e."""
    sides = [_side(runs, measure, threshold_s, warm_up) for runs in (a, b)]
    if min(len(one[0]) for one in sides) < 2 * LEAST_IN_CELL:
        return ()
    names = [name for name in ATTRIBUTES if len({*np.unique(sides[0][2][name]), *np.unique(sides[1][2][name])}) > 1]
    single = {(name,): [side[2][name] for side in sides] for name in names}
    found = [_divide(key, labels, sides, len(a)) for key, labels in single.items()]
    found = [one for one in found if len(one.cells) > 1]
    found.sort(key=lambda one: -_telling(one))
    best = [one.attributes[0] for one in found[:DEEPER]]
    for one, two in combinations(best, 2):
        labels = [np.char.add(np.char.add(side[2][one], " x "), side[2][two]) for side in sides]
        crossed = _divide((one, two), labels, sides, len(a))
        if len(crossed.cells) > 1:
            found.append(crossed)
    kept = false_discovery([p for one in found for p in (one.p_mix, one.p_within)], RATE)
    marked = [replace(one, found=bool(kept[2 * k] or kept[2 * k + 1])) for k, one in enumerate(found)]
    return tuple(sorted(marked, key=lambda one: (not one.found, -_telling(one), len(one.attributes))))


def split(
    cells_a: npt.NDArray[np.str_], slow_a: Bools, cells_b: npt.NDArray[np.str_], slow_b: Bools
) -> tuple[Cell, ...]:
    """The cells of one partition; the sum of their ``mix`` and ``within`` is mean(slow_b) - mean(slow_a), exactly."""
    found = []
    for name in sorted({*np.unique(cells_a), *np.unique(cells_b)}):
        in_a, in_b = cells_a == name, cells_b == name
        n_a, n_b = int(in_a.sum()), int(in_b.sum())
        # a cell that one side lacks has no exceedance there: the other side's is taken, so that all of it is mix
        e_a = float(slow_a[in_a].mean()) if n_a else float(slow_b[in_b].mean())
        e_b = float(slow_b[in_b].mean()) if n_b else e_a
        found.append(Cell(str(name), n_a, n_b, n_a / max(1, len(cells_a)), n_b / max(1, len(cells_b)), e_a, e_b))
    return tuple(found)


# --- attributes ---


def _class(run: Run) -> npt.NDArray[np.str_]:
    return _words(run.texts["class"])


def _replica(run: Run) -> npt.NDArray[np.str_]:
    return _words(run.texts["replica"])


def _prompt(run: Run) -> npt.NDArray[np.str_]:
    return _doubling(run["input_tokens"])


def _answer(run: Run) -> npt.NDArray[np.str_]:
    return _doubling(run["expected_output_tokens"])


def _cached(run: Run) -> npt.NDArray[np.str_]:
    share = run["cached_tokens"] / np.maximum(run["prompt_tokens_reported"], 1)
    return np.select(
        [np.isnan(share), share <= 0, share < 0.5], ["unknown", "none", "less than half"], "half or more"
    ).astype(np.str_)


def _attempts(run: Run) -> npt.NDArray[np.str_]:
    tries = np.nan_to_num(run["attempts"], nan=1.0)
    return np.where(tries <= 1, "1", np.where(tries == 2, "2", "3 or more")).astype(np.str_)


ATTRIBUTES: Final = {
    "class": _class,
    "replica": _replica,
    "prompt tokens": _prompt,
    "answer tokens": _answer,
    "from the cache": _cached,
    "attempts": _attempts,
}


def _words(texts: pa.Array) -> npt.NDArray[np.str_]:
    return np.asarray(pc.fill_null(texts, "unknown").to_numpy(zero_copy_only=False)).astype(np.str_)


def _doubling(values: Floats) -> npt.NDArray[np.str_]:
    """Ranges by powers of two: 65-128, 129-256 …"""
    power = np.ceil(np.log2(np.maximum(np.nan_to_num(values, nan=1.0), 1.0))).astype(np.int64)
    low = np.where(power > 0, 2 ** np.maximum(power - 1, 0) + 1, 1)
    return np.char.add(np.char.add(low.astype(np.str_), "-"), (2**power).astype(np.str_))


# --- dividing ---

#: slow, unit (pair and block), attribute -> cell; of the requests that count.
_Side = tuple[Bools, Ints, dict[str, npt.NDArray[np.str_]]]


def _side(runs: Sequence[Run], measure: str, threshold_s: float, warm_up: float) -> _Side:
    slow, unit = [], []
    cells: dict[str, list[npt.NDArray[np.str_]]] = {name: [] for name in ATTRIBUTES}
    blocks = 1 if len(runs) >= ENOUGH_PAIRS else BLOCKS
    for at, run in enumerate(runs):
        kept = run.counted & (run["intended_s"] >= warm_up * run.facts.length_s)
        times = _times(run, measure)
        kept &= ~np.isnan(times)
        slow.append(times[kept] > threshold_s)
        place = np.argsort(np.argsort(run["intended_s"][kept], kind="stable"), kind="stable")
        unit.append(at * blocks + (place * blocks) // max(1, len(place)))
        for name, of in ATTRIBUTES.items():
            cells[name].append(of(run)[kept])
    return np.concatenate(slow), np.concatenate(unit), {name: np.concatenate(one) for name, one in cells.items()}


def _times(run: Run, measure: str) -> Floats:
    from telemetry import names

    if measure == "tpot":
        times = run["tpot_s"].copy()
    else:
        times = run["first_token_s" if measure == "ttft" else "end_s"] - run["intended_s"]
    times[run.is_label(names.DROPPED)] = np.inf
    return times


def _divide(
    key: tuple[str, ...], labels: Sequence[npt.NDArray[np.str_]], sides: Sequence[_Side], pairs: int
) -> Partition:
    joined = _joined(labels)
    slow = [side[0] for side in sides]
    cells = split(joined[0], slow[0], joined[1], slow[1])
    p_mix, p_within = _p_values(cells, joined, sides)
    return Partition(
        key, float(slow[1].mean() - slow[0].mean()), sum(one.mix for one in cells), sum(one.within for one in cells),
        p_mix, p_within, False, cells,
    )  # fmt: skip


def _joined(labels: Sequence[npt.NDArray[np.str_]]) -> list[npt.NDArray[np.str_]]:
    """Cells with fewer than LEAST_IN_CELL requests on a side become one."""
    counts = [dict(zip(*np.unique(side, return_counts=True), strict=True)) for side in labels]
    names = {*counts[0], *counts[1]}
    small = [name for name in names if min(int(side.get(name, 0)) for side in counts) < LEAST_IN_CELL]
    # a cell that one side lacks altogether, and that is large on the other, is the mix itself: it stays
    small = [name for name in small if max(int(side.get(name, 0)) for side in counts) < LEAST_IN_CELL
             or min(int(side.get(name, 0)) for side in counts) > 0]  # fmt: skip
    if not small:
        return list(labels)
    return [np.where(np.isin(side, small), REST, side) for side in labels]


def _p_values(
    cells: Sequence[Cell], labels: Sequence[npt.NDArray[np.str_]], sides: Sequence[_Side]
) -> tuple[float, float]:
    """Exchanging A and B inside units at random: how often are the sums of |mix| and |within| as large?"""
    names = np.array([one.name for one in cells])
    order = np.argsort(names)
    units = 1 + max(int(side[1].max()) for side in sides)
    tables = []
    for side, label in zip(sides, labels, strict=True):
        place = order[np.searchsorted(names[order], label)]
        flat = side[1] * len(names) + place
        size = units * len(names)
        n = np.bincount(flat, minlength=size).reshape(units, -1).astype(np.float64)
        x = np.bincount(flat, side[0], size).reshape(units, -1)
        tables.append((n, x))
    rng = np.random.default_rng(SEED)
    flips = np.vstack([np.zeros((1, units)), rng.integers(0, 2, (FLIPS, units))])
    (n_a, x_a), (n_b, x_b) = tables
    of = [
        ((1 - flips) @ left + flips @ right, flips @ left + (1 - flips) @ right)
        for left, right in ((n_a, n_b), (x_a, x_b))
    ]
    (na, nb), (xa, xb) = of
    with np.errstate(divide="ignore", invalid="ignore"):
        wa, wb = na / na.sum(axis=1, keepdims=True), nb / nb.sum(axis=1, keepdims=True)
        ea, eb = xa / na, xb / nb
    ea, eb = np.where(na > 0, ea, np.nan_to_num(eb)), np.where(nb > 0, eb, np.nan_to_num(ea))
    mix = np.abs((wb - wa) * (ea + eb) / 2).sum(axis=1)
    within = np.abs((eb - ea) * (wa + wb) / 2).sum(axis=1)
    return tuple(float((one >= one[0] - 1e-12).mean()) for one in (mix, within))  # type: ignore[return-value]


def _telling(one: Partition) -> float:
    """How much a partition tells: its mix, or how unevenly the rest lies over its cells."""
    mean = one.within
    uneven = (
        sum((cell.share_a + cell.share_b) / 2 * abs(cell.exceed_b - cell.exceed_a - mean) for cell in one.cells) / 2
    )
    return max(abs(one.mix), uneven)
