"""What a trace is like: rate, burstiness, lengths.  Used to recognise a trace and to compare a changed one with it.

CV is the coefficient of variation of the gaps between arrivals (constant 0, Poisson 1); IoD is the index of
dispersion, variance / mean of the counts per bin (Poisson 1), over whole bins only, undefined below two of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

QUANTILES: Final = (50, 90, 99, 100)
IOD_BINS_S: Final = (1, 10, 60)


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
    equal_stamps: int  # arrivals at the very time of the one before
    input_tokens: dict[str, int]  # p50, p90, p99, max
    output_tokens: dict[str, int]
    input_mean: float
    output_mean: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(
    arrival_s: npt.NDArray[np.float64], inputs: npt.NDArray[np.int32], outputs: npt.NDArray[np.int32]
) -> Statistics:
    """Figures of arrivals (seconds, sorted) with their token lengths; at least one arrival."""
    gaps = np.diff(arrival_s)
    span = float(arrival_s[-1] - arrival_s[0])
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0
    return Statistics(
        arrivals=len(arrival_s),
        span_s=span,
        rate_per_s=(len(arrival_s) - 1) / span if span > 0 else None,
        gap_cv=float(gaps.std() / mean_gap) if mean_gap > 0 else None,
        longest_gap_s=float(gaps.max()) if len(gaps) else None,
        iod={str(width): iod(arrival_s, width) for width in IOD_BINS_S},
        peak_1s=int(np.bincount((arrival_s - arrival_s[0]).astype(np.int64)).max()),
        equal_stamps=int(np.count_nonzero(gaps == 0)),
        input_tokens=quantiles(inputs),
        output_tokens=quantiles(outputs),
        input_mean=float(inputs.mean()),
        output_mean=float(outputs.mean()),
    )


def iod(arrival_s: npt.NDArray[np.float64], width_s: float) -> float | None:
    """Index of dispersion of the counts in whole bins of width_s; None below two bins."""
    since = arrival_s - arrival_s[0]
    bins = int(since[-1] // width_s)
    if bins < 2:
        return None
    counts = np.bincount((since // width_s).astype(np.int64), minlength=bins)[:bins]
    return float(counts.var(ddof=1) / counts.mean()) if counts.mean() > 0 else None


def quantiles(values: npt.NDArray[np.int32]) -> dict[str, int]:
    """p50, p90, p99 (nearest rank: a value that occurs) and max."""
    ordered = np.sort(values)
    out: dict[str, int] = {}
    for percent in QUANTILES:
        rank = max(0, int(np.ceil(percent / 100 * len(ordered))) - 1)
        out["max" if percent == 100 else f"p{percent}"] = int(ordered[rank])
    return out
