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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names
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


@dataclass(frozen=True)
class Side:
    """The requests of a side that count.  slow: beyond the threshold; unit: pair and block of time; cells: per
    attribute the place of each request's group in the names that both sides share."""

    slow: Bools
    unit: Ints
    cells: dict[str, Ints]


def partitions(
    a: Sequence[Run], b: Sequence[Run], measure: str, threshold_s: float, warm_up: float = 0.0
) -> tuple[Partition, ...]:
    """All partitions, the one that tells most first.  threshold_s: what counts as slow; measure: ttft, tpot or e2e."""
    names_of = {name: _vocabulary(name, (*a, *b)) for name in ATTRIBUTES}
    sides = [_side(runs, measure, threshold_s, warm_up, names_of) for runs in (a, b)]
    if min(len(one.slow) for one in sides) < 2 * LEAST_IN_CELL:
        return ()
    found = []
    for name, words in names_of.items():
        one = _divide((name,), [side.cells[name] for side in sides], words, sides)
        if one is not None:
            found.append(one)
    found.sort(key=lambda one: -_telling(one))
    best = [one.attributes[0] for one in found[:DEEPER]]
    for first, second in combinations(best, 2):
        words = [f"{x} x {y}" for x in names_of[first] for y in names_of[second]]
        codes = [side.cells[first] * len(names_of[second]) + side.cells[second] for side in sides]
        crossed = _divide((first, second), codes, words, sides)
        if crossed is not None:
            found.append(crossed)
    kept = false_discovery([p for one in found for p in (one.p_mix, one.p_within)], RATE)
    marked = [replace(one, found=bool(kept[2 * k] or kept[2 * k + 1])) for k, one in enumerate(found)]
    return tuple(sorted(marked, key=lambda one: (not one.found, -_telling(one), len(one.attributes))))


def split(codes: Sequence[Ints], slow: Sequence[Bools], words: Sequence[str]) -> tuple[Cell, ...]:
    """The cells of one partition of A and B; their ``mix`` and ``within`` sum to mean(slow B) - mean(slow A), exactly.

    codes: per side the place of each request's cell in ``words``.  Cells without requests are left out.
    """
    size = len(words)
    counts = [np.bincount(one, minlength=size) for one in codes]
    beyond = [np.bincount(one, hit, size) for one, hit in zip(codes, slow, strict=True)]
    totals = [max(1, len(one)) for one in codes]
    found = []
    for at in np.flatnonzero(counts[0] + counts[1]).tolist():
        n_a, n_b = int(counts[0][at]), int(counts[1][at])
        # a cell that one side lacks has no exceedance there: the other side's is taken, so that all of it is mix
        e_a = float(beyond[0][at]) / n_a if n_a else float(beyond[1][at]) / n_b
        e_b = float(beyond[1][at]) / n_b if n_b else e_a
        found.append(Cell(words[at], n_a, n_b, n_a / totals[0], n_b / totals[1], e_a, e_b))
    return tuple(found)


# --- attributes: the places of a run's requests in the words of an attribute ---


def _text(name: str) -> Callable[[Run, Sequence[str]], Ints]:
    def places(run: Run, words: Sequence[str]) -> Ints:
        found: Ints = pc.index_in(pc.fill_null(run.texts[name], UNKNOWN), pa.array(words)).to_numpy(
            zero_copy_only=False
        )
        return found.astype(np.int64)

    return places


def _doubling(name: str) -> Callable[[Run, Sequence[str]], Ints]:
    """Ranges by powers of two: 65-128, 129-256 …"""

    def places(run: Run, words: Sequence[str]) -> Ints:
        power = np.ceil(np.log2(np.maximum(np.nan_to_num(run[name], nan=1.0), 1.0))).astype(np.int64)
        return np.minimum(power, len(words) - 1)

    return places


def _cached(run: Run, words: Sequence[str]) -> Ints:
    share = run["cached_tokens"] / np.maximum(run["prompt_tokens_reported"], 1)
    return np.select([np.isnan(share), share <= 0, share < 0.5], [0, 1, 2], 3).astype(np.int64)


def _attempts(run: Run, words: Sequence[str]) -> Ints:
    return np.clip(np.nan_to_num(run["attempts"], nan=1.0) - 1, 0, 2).astype(np.int64)


UNKNOWN: Final = "unknown"
_POWERS: Final = ("1", *(f"{2 ** (k - 1) + 1}-{2**k}" for k in range(1, 25)))
#: Name -> places of a run's requests, and the words; None: the values that the runs have.
ATTRIBUTES: Final[dict[str, tuple[Callable[[Run, Sequence[str]], Ints], Sequence[str] | None]]] = {
    "class": (_text("class"), None),
    "replica": (_text("replica"), None),
    "prompt tokens": (_doubling("input_tokens"), _POWERS),
    "answer tokens": (_doubling("expected_output_tokens"), _POWERS),
    "from the cache": (_cached, (UNKNOWN, "none", "less than half", "half or more")),
    "attempts": (_attempts, ("1", "2", "3 or more")),
}


def _vocabulary(name: str, runs: Sequence[Run]) -> Sequence[str]:
    words = ATTRIBUTES[name][1]
    if words is not None:
        return words
    return sorted({str(one) for run in runs for one in pc.unique(pc.fill_null(run.texts[name], UNKNOWN)).to_pylist()})


# --- dividing ---


def _side(
    runs: Sequence[Run], measure: str, threshold_s: float, warm_up: float, names_of: Mapping[str, Sequence[str]]
) -> Side:
    slow, unit = [], []
    cells: dict[str, list[Ints]] = {name: [] for name in ATTRIBUTES}
    blocks = 1 if len(runs) >= ENOUGH_PAIRS else BLOCKS
    for at, run in enumerate(runs):
        kept = run.counted & (run["intended_s"] >= warm_up * run.facts.length_s)
        times = _times(run, measure)
        kept &= ~np.isnan(times)
        slow.append(times[kept] > threshold_s)
        place = np.empty(int(kept.sum()), dtype=np.int64)
        place[np.argsort(run["intended_s"][kept], kind="stable")] = np.arange(len(place))
        unit.append(at * blocks + (place * blocks) // max(1, len(place)))
        for name, (of, _) in ATTRIBUTES.items():
            cells[name].append(of(run, names_of[name])[kept])
    joined = {name: np.concatenate(one) for name, one in cells.items()}
    return Side(np.concatenate(slow), np.concatenate(unit), joined)


def _times(run: Run, measure: str) -> Floats:
    if measure == "tpot":
        times = run["tpot_s"].copy()
    else:
        times = run["first_token_s" if measure == "ttft" else "end_s"] - run["intended_s"]
    times[run.is_label(names.DROPPED)] = np.inf
    return times


def _divide(
    key: tuple[str, ...], codes: Sequence[Ints], words: Sequence[str], sides: Sequence[Side]
) -> Partition | None:
    """The partition by one attribute or two; None: it has one cell alone, or none that both sides have.

    The latter says which side a request is of, and nothing else: two replicas, say, of which each is one side.
    """
    codes, words = _joined(codes, words)
    cells = split(codes, [side.slow for side in sides], words)
    if len(cells) < 2 or not any(one.n_a and one.n_b for one in cells):
        return None
    p_mix, p_within = _p_values(codes, len(words), sides)
    change = float(sides[1].slow.mean() - sides[0].slow.mean())
    mix, within = sum(one.mix for one in cells), sum(one.within for one in cells)
    return Partition(key, change, mix, within, p_mix, p_within, False, cells)


def _joined(codes: Sequence[Ints], words: Sequence[str]) -> tuple[list[Ints], list[str]]:
    """Cells with fewer than LEAST_IN_CELL requests on a side become one.

    One that a side lacks altogether, and that is large on the other, is the mix itself: it stays.
    """
    counts = [np.bincount(one, minlength=len(words)) for one in codes]
    least, most = np.minimum(*counts), np.maximum(*counts)
    small = (most > 0) & (least < LEAST_IN_CELL) & ((most < LEAST_IN_CELL) | (least > 0))
    if not small.any():
        return list(codes), list(words)
    place = np.where(small, len(words), np.arange(len(words)))
    return [place[one] for one in codes], [*words, REST]


def _p_values(codes: Sequence[Ints], size: int, sides: Sequence[Side]) -> tuple[float, float]:
    """Exchanging A and B inside units at random: how often are the sums of |mix| and |within| as large?"""
    used = np.flatnonzero(sum(np.bincount(one, minlength=size) for one in codes))
    place = np.zeros(size, dtype=np.int64)
    place[used] = np.arange(len(used))
    units = 1 + max(int(side.unit.max()) for side in sides)
    tables = []
    for side, code in zip(sides, codes, strict=True):
        flat = side.unit * len(used) + place[code]
        n = np.bincount(flat, minlength=units * len(used)).reshape(units, -1).astype(np.float64)
        x = np.bincount(flat, side.slow, units * len(used)).reshape(units, -1)
        tables.append((n, x))
    rng = np.random.default_rng(SEED)
    flips = np.vstack([np.zeros((1, units)), rng.integers(0, 2, (FLIPS, units))])
    (n_a, x_a), (n_b, x_b) = tables
    na, nb = (1 - flips) @ n_a + flips @ n_b, flips @ n_a + (1 - flips) @ n_b
    xa, xb = (1 - flips) @ x_a + flips @ x_b, flips @ x_a + (1 - flips) @ x_b
    with np.errstate(divide="ignore", invalid="ignore"):
        wa, wb = na / na.sum(axis=1, keepdims=True), nb / nb.sum(axis=1, keepdims=True)
        ea, eb = xa / na, xb / nb
    ea, eb = np.where(na > 0, ea, np.nan_to_num(eb)), np.where(nb > 0, eb, np.nan_to_num(ea))
    mix = np.abs((wb - wa) * (ea + eb) / 2).sum(axis=1)
    within = np.abs((eb - ea) * (wa + wb) / 2).sum(axis=1)
    return float((mix >= mix[0] - 1e-12).mean()), float((within >= within[0] - 1e-12).mean())


def _telling(one: Partition) -> float:
    """How much a partition tells: its mix, or how unevenly the rest lies over its cells."""
    uneven = sum(
        (cell.share_a + cell.share_b) / 2 * abs(cell.exceed_b - cell.exceed_a - one.within) for cell in one.cells
    )
    return max(abs(one.mix), uneven / 2)
