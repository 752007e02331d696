"""Makes the shipped trace `shipped/synthetic-conv.csv`.  SYNTHETIC: it holds no real request.

It is drawn with the published statistics of the Azure 2023 conversation trace, so that a machine without the network
still sees traffic of that kind: mean rate 5.53/s, inter-arrival CV 1.09 within a stretch of constant rate, a rate that
drifts from minute to minute (IoD 16 at 60 s: a standard deviation of 22 %), and the marginals of the token lengths
(quantiles below, measured on that trace; input and output are nearly independent there, rank correlation 0.07).
Run `python -m loadgen.traces.make_synthetic FILE`; the same seed gives the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

SEED: Final = 20231126  # of thirty tried, the one whose IoD at 10 s (3.7) comes nearest to the real 3.9
SECONDS: Final = 180.0
RATE: Final = 5.53  # arrivals per second
GAP_CV: Final = 1.09
KNOT_SD: Final = 0.28  # of the mean rate; linear between knots brings it to the 22 %
KNOTS_S: Final = 30.0  # the rate is drawn every half minute and linear between

#: Quantiles of azure-2023-conv; between them the inverse distribution is taken as linear in the logarithm.
LEVELS: Final = (0.0, 0.01, 0.05, 0.10, 0.20, 0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 0.95, 0.98, 0.99, 0.999, 1.0)
INPUT: Final = (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4098, 4142, 6179, 14050)
OUTPUT: Final = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 540, 601, 954, 1000)


def arrivals_s(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Arrival times in seconds: a gamma renewal process, its clock warped by the drifting rate."""
    knots = np.arange(0.0, SECONDS + KNOTS_S, KNOTS_S)
    rates = RATE * np.clip(1.0 + KNOT_SD * rng.standard_normal(len(knots)), 0.4, 1.8)
    grid = np.linspace(0.0, SECONDS, int(SECONDS * 10) + 1)
    rate = np.interp(grid, knots, rates)
    rate *= RATE / float(np.mean(rate))
    expected = np.concatenate(([0.0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(grid))))  # arrivals so far
    shape = 1.0 / GAP_CV**2
    gaps = rng.gamma(shape, 1.0 / shape, size=int(expected[-1] * 1.3) + 50)
    unit = np.cumsum(gaps)
    unit = unit[unit < expected[-1]]
    return np.asarray(np.interp(unit, expected, grid), dtype=np.float64)


def lengths(rng: np.random.Generator, quantiles: tuple[int, ...], n: int) -> npt.NDArray[np.int64]:
    """n token lengths with these quantiles at LEVELS."""
    drawn = np.exp(np.interp(rng.random(n), LEVELS, np.log(np.asarray(quantiles, dtype=np.float64))))
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def text() -> str:
    """The file: the layout of azure-2023 with invented stamps of the year 2000."""
    rng = np.random.default_rng(SEED)
    times = arrivals_s(rng)
    inputs, outputs = lengths(rng, INPUT, len(times)), lengths(rng, OUTPUT, len(times))
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for t, tokens_in, tokens_out in zip(times, inputs, outputs, strict=True):
        tenth_us = round(t * 1e6) * 10
        minute, rest = divmod(tenth_us, 600_000_000)
        rows.append(
            f"2000-01-01 00:{minute:02d}:{rest // 10_000_000:02d}.{rest % 10_000_000:07d},{tokens_in},{tokens_out}"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(text().encode())
