"""Fits with coefficients that cannot be negative: what takes time never gives any back.

``robust`` minimises Huber's loss of the relative error (Huber, Ann. Math. Stat. 35(1), 1964), so that neither large
values nor disturbed ones decide alone; ``non_negative`` is plain least squares.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

ROUNDS: Final = 30  # of reweighting; it settles in fewer than ten
HUBER: Final = 1.345  # 95 % efficient where the noise is normal

Floats = npt.NDArray[np.float64]


def robust(features: Floats, measured: Floats) -> Floats:
    """Non-negative coefficients that minimise Huber's loss of the relative error."""
    weights = 1.0 / measured
    coefficients = np.zeros(features.shape[1])
    for _ in range(ROUNDS):
        coefficients = non_negative(features * weights[:, None], measured * weights)
        guess = np.maximum(features @ coefficients, 1e-9)
        relative = measured / guess - 1.0
        bound = HUBER * max(spread(relative), 1e-6)
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(np.abs(relative), 1e-12))) / guess
    return coefficients


def non_negative(features: Floats, target: Floats) -> Floats:
    """Least squares with coefficients >= 0, by Lawson and Hanson's active set (Solving Least Squares Problems, ch. 23).

    features: [n, k]; target: [n].  Columns are scaled to one length first, since their units differ by millions.
    """
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    columns = features / scale
    gram, along = columns.T @ columns, columns.T @ target
    k = len(scale)
    x, free = np.zeros(k), np.zeros(k, dtype=bool)
    tolerance = 1e-10 * float(np.abs(along).max(initial=1.0))
    for _ in range(10 * k):
        gradient = along - gram @ x
        gradient[free] = -np.inf
        if float(gradient.max(initial=-np.inf)) <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(k)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], along[free], rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            down = free & (trial <= 0)
            gaps = x[down] - trial[down]
            step = float(np.min(x[down] / np.where(gaps > 0, gaps, 1.0)))
            x = x + step * (trial - x)
            x[x < 1e-15] = 0.0
            free &= x > 0
            if not free.any():
                break
    result: Floats = x / scale
    return result


def spread(values: Floats) -> float:
    """A standard deviation that outliers do not move: 1.4826 times the median distance to the median."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))
