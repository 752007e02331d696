"""What a trace is like: rate, burstiness, lengths, shared prefixes.  Constant memory over any number of rows.

CV is the coefficient of variation of the gaps between arrivals (constant 0, Poisson 1); IoD is the index of
dispersion, variance / mean of the counts per bin (Poisson 1), over whole bins only, undefined below two of them.
The prefix-hit bound is the share of prefix blocks that an endless cache would hold: the leading blocks of a prompt that
were all seen before, counted from two blocks up (the first block heads every prompt of a service).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loadgen.traces.trace import NO_SESSION, Batch, Rows

QUANTILES: Final = (50, 90, 99, 100)
IOD_BINS_S: Final = (1, 10, 60)
#: From this share of equal stamps on the clock is called quantised.
QUANTISED_SHARE: Final = 0.30
CURVE_BINS: Final = 72
_DISTINCT_GAPS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of one sequence of arrivals.  None: not defined for so few arrivals."""

    arrivals: int
    span_s: float
    rate_per_s: float | None
    gap_cv: float | None
    longest_gap_s: float | None
    iod: dict[str, float | None]  # bin width in s -> IoD
    peak_1s: int
    peak_60s: int
    equal_stamps: int  # arrivals at the very time of the one before
    tick_s: float | None  # median step of a quantised clock
    duplicates: int  # rows with the stamp and the lengths of another
    sessions: int
    failures: int
    prefix_seen: float | None  # share of the prefix blocks that stood at their place before; None without such
    prefix_hit_bound: float | None  # the same, counted from two blocks up
    input_tokens: dict[str, int]  # p50, p90, p99, max
    output_tokens: dict[str, int]
    input_mean: float
    output_mean: float
    over_limit: int | None  # rows whose lengths together exceed the context; None where none was given
    curve: tuple[float, ...]  # arrivals per second over the span, in equal bins

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "curve": list(self.curve)}


def describe(
    arrival_s: npt.NDArray[np.float64], inputs: npt.NDArray[np.int32], outputs: npt.NDArray[np.int32]
) -> Statistics:
    """Figures of arrivals (seconds, sorted) with their token lengths; at least one arrival."""
    tally = Tally()
    tally.add(Rows(Path()).many(np.round(arrival_s * 1e9).astype(np.int64), inputs, outputs))
    return tally.result()


class Tally:
    """Add batches in order of time, then ask for the result.  max_context: tokens, for `over_limit`."""

    def __init__(self, max_context: int | None = None) -> None:
        self._bins = {width: _Bins(width * 1_000_000_000) for width in IOD_BINS_S}
        self._curve = _Curve()
        self._max_context = max_context
        self._count = self._equal = self._duplicates = self._failures = self._over = 0
        self._first = self._last = 0
        self._gap_sum = self._gap_squares = 0.0
        self._longest = 0
        self._gaps_ms: Counter[int] = Counter()
        self._inputs: Counter[int] = Counter()
        self._outputs: Counter[int] = Counter()
        self._same_stamp: set[tuple[int, int]] = set()  # lengths of the rows at the last stamp
        self._sessions: set[int] = set()
        self._seen: set[int] = set()
        self._blocks = self._hits = self._seen_before = 0

    def add(self, batch: Batch) -> None:
        """The next rows, not earlier than those before."""
        if not len(batch):
            return
        stamps = batch.stamp_ns
        if not self._count:
            self._first = self._last = int(stamps[0])
            gaps = np.diff(stamps)
        else:
            gaps = np.diff(stamps, prepend=self._last)
        self._add_gaps(gaps)
        self._find_duplicates(batch)
        self._count += len(batch)
        self._last = int(stamps[-1])
        since = stamps - self._first
        for bins in self._bins.values():
            bins.add(since)
        self._curve.add(since)
        for counter, values in ((self._inputs, batch.input_tokens), (self._outputs, batch.output_tokens)):
            found, counts = np.unique(values, return_counts=True)
            counter.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        self._failures += int(batch.failed.sum())
        if self._max_context is not None:
            total = batch.input_tokens.astype(np.int64) + batch.output_tokens
            self._over += int((total > self._max_context).sum())
        self._sessions.update(np.unique(batch.session[batch.session != NO_SESSION]).tolist())
        if len(batch.ids):
            self._add_prefixes(batch)

    def result(self) -> Statistics:
        """The figures of all rows added; there must have been one."""
        n_gaps = self._count - 1
        span = (self._last - self._first) / 1e9
        mean = self._gap_sum / n_gaps if n_gaps else 0.0
        variance = max(0.0, self._gap_squares / n_gaps - mean**2) if n_gaps else 0.0
        quantised = self._count > 1 and self._equal / self._count >= QUANTISED_SHARE and self._gaps_ms
        return Statistics(
            arrivals=self._count,
            span_s=span,
            rate_per_s=n_gaps / span if span > 0 else None,
            gap_cv=math.sqrt(variance) / mean if mean > 0 else None,
            longest_gap_s=self._longest / 1e9 if n_gaps else None,
            iod={str(width): bins.iod for width, bins in self._bins.items()},
            peak_1s=self._bins[1].peak,
            peak_60s=self._bins[60].peak,
            equal_stamps=self._equal,
            tick_s=quantile_of(self._gaps_ms, 0.5) / 1e3 if quantised else None,
            duplicates=self._duplicates,
            sessions=len(self._sessions),
            failures=self._failures,
            prefix_seen=self._seen_before / self._blocks if self._blocks else None,
            prefix_hit_bound=self._hits / self._blocks if self._blocks else None,
            input_tokens=quantiles(self._inputs),
            output_tokens=quantiles(self._outputs),
            input_mean=mean_of(self._inputs),
            output_mean=mean_of(self._outputs),
            over_limit=None if self._max_context is None else self._over,
            curve=self._curve.rates(self._last - self._first),
        )

    def _add_gaps(self, gaps: npt.NDArray[np.int64]) -> None:
        if not len(gaps):
            return
        seconds = gaps / 1e9
        self._gap_sum += float(seconds.sum())
        self._gap_squares += float((seconds**2).sum())
        self._longest = max(self._longest, int(gaps.max()))
        self._equal += int(np.count_nonzero(gaps == 0))
        if len(self._gaps_ms) < _DISTINCT_GAPS:
            found, counts = np.unique(gaps[gaps > 0] // 1_000_000, return_counts=True)
            self._gaps_ms.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def _find_duplicates(self, batch: Batch) -> None:
        """Only rows that share their stamp with a neighbour are looked at."""
        stamps = batch.stamp_ns
        shared = np.zeros(len(stamps), dtype=np.bool_)
        shared[1:] |= stamps[1:] == stamps[:-1]
        shared[:-1] |= stamps[1:] == stamps[:-1]
        shared[0] |= bool(self._count and stamps[0] == self._last)
        if not (self._count and stamps[0] == self._last):
            self._same_stamp.clear()
        at = int(stamps[0])
        for place in np.flatnonzero(shared).tolist():
            if stamps[place] != at:
                self._same_stamp.clear()
                at = int(stamps[place])
            lengths = (int(batch.input_tokens[place]), int(batch.output_tokens[place]))
            self._duplicates += lengths in self._same_stamp
            self._same_stamp.add(lengths)
        if not shared[-1]:
            self._same_stamp = {(int(batch.input_tokens[-1]), int(batch.output_tokens[-1]))}

    def _add_prefixes(self, batch: Batch) -> None:
        start = 0
        seen = self._seen
        ids = batch.ids.tolist()
        for end in batch.ids_end.tolist():
            row = ids[start:end]
            start = end
            hits = next((place for place, one in enumerate(row) if one not in seen), len(row))
            self._blocks += len(row)
            self._seen_before += hits
            self._hits += hits if hits >= 2 else 0
            seen.update(row)


class _Bins:
    """Counts per bin, of which only sums are kept; the last bin is open until a later one begins."""

    def __init__(self, width_ns: int) -> None:
        self._width = width_ns
        self._open = 0  # number of the bin that is open
        self._count = 0  # arrivals in it
        self._sum = self._squares = 0
        self._peak = 0

    def add(self, since_ns: npt.NDArray[np.int64]) -> None:
        numbers, counts = np.unique(since_ns // self._width, return_counts=True)
        if int(numbers[0]) == self._open:
            counts[0] += self._count
        else:
            self._close(self._count)
        closed = counts[:-1]
        self._sum += int(closed.sum())
        self._squares += int((closed.astype(np.float64) ** 2).sum())
        self._peak = max(self._peak, int(counts.max()))
        self._open, self._count = int(numbers[-1]), int(counts[-1])

    def _close(self, count: int) -> None:
        self._sum += count
        self._squares += count**2
        self._peak = max(self._peak, count)

    @property
    def peak(self) -> int:
        return max(self._peak, self._count)

    @property
    def iod(self) -> float | None:
        """Over the whole bins, which are all but the open one."""
        bins = self._open
        if bins < 2 or not self._sum:
            return None
        mean = self._sum / bins
        return (self._squares - bins * mean**2) / (bins - 1) / mean


class _Curve:
    """Arrivals over time in at most 2 x CURVE_BINS x 8 bins: where the span outgrows them, neighbours are joined."""

    def __init__(self) -> None:
        self._width = 1_000_000  # ns
        self._counts = np.zeros(CURVE_BINS * 16, dtype=np.int64)

    def add(self, since_ns: npt.NDArray[np.int64]) -> None:
        while int(since_ns[-1]) >= self._width * len(self._counts):
            self._counts[: len(self._counts) // 2] = self._counts.reshape(-1, 2).sum(axis=1)
            self._counts[len(self._counts) // 2 :] = 0
            self._width *= 2
        self._counts += np.bincount(since_ns // self._width, minlength=len(self._counts))

    def rates(self, span_ns: int) -> tuple[float, ...]:
        """Arrivals per second in CURVE_BINS equal parts of the span, or fewer where it is short."""
        used = span_ns // self._width + 1
        size = -(-used // CURVE_BINS)
        parts = [self._counts[at : at + size].sum() for at in range(0, used, size)]
        return tuple(float(part) / (size * self._width / 1e9) for part in parts)


def quantiles(counted: Counter[int]) -> dict[str, int]:
    """p50, p90, p99 (nearest rank: a value that occurs) and max."""
    return {"max" if q == 100 else f"p{q}": quantile_of(counted, q / 100) for q in QUANTILES}


def quantile_of(counted: Counter[int], q: float) -> int:
    """The value at nearest rank q (0..1)."""
    rank = max(1, math.ceil(q * counted.total() - 1e-9))
    seen = 0
    for value, count in sorted(counted.items()):
        seen += count
        if seen >= rank:
            return value
    return 0


def mean_of(counted: Counter[int]) -> float:
    total = counted.total()
    return sum(value * count for value, count in counted.items()) / total if total else 0.0
