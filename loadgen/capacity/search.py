"""Which rate is run next: doubling to a bracket, bisection of what is believed, and down again after an overload.

A run says by how many standard errors it held or broke the SLO (``telemetry.repeatable``).  Believed is a distribution
over the capacity c, begun flat in its logarithm: a run at rate r is expected at a distance of log(c / r) / s, and was
seen at another one, with noise of Student's form (NOISE, DEGREES) for what runs differ by beyond their own standard
errors.  s, how steeply the SLO breaks, is not known; the belief is averaged over SCALES.  The next rate is the median
of the belief (a bisection of noisy answers, as in Horstein 1963); the search has ended when its 90 % lie within the
precision asked for, or the runs are used up.

Must always hold: the next step is a function of the points and the bounds alone, so that a search that was interrupted
goes on as if it had not been; a run in which the client was the limit moves nothing but the ceiling below which the
search then stays; never more than ``most_runs``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loadgen.capacity.point import DESCENT, OVERLOAD, SEARCH, Point
from models.errors import UserError
from models.wording import several
from telemetry import names
from telemetry.objective import BROKEN, HELD, UNDECIDED
from telemetry.repeatable import FARTHEST

MOST_RUNS: Final = 12
FACTOR: Final = 2.0
BELIEVED: Final = 0.9  # of the interval that is reported
NOISE: Final = 1.5  # of a distance, in standard errors
DEGREES: Final = 5.0
#: Share of the rate that moves the SLO by one standard error: hardly noisy .. hardly steep.
SCALES: Final = (0.003, 0.006, 0.0125, 0.025, 0.05, 0.1, 0.2)
#: Share by which two draws of one load differ in what they ask of a server; an assumption, which widens the interval.
BETWEEN: Final = 0.01
#: What is believed reaches so far beyond the rates that were run: doubling has shown on which side of them it lies.
MARGIN: Final = 1.25
OVERLOAD_FACTOR: Final = 1.5  # above what is believed, before the way down
DOWN: Final = 0.9  # from one try of the way down to the next
SAME: Final = 0.95  # rates so near count as one
NARROW: Final = 1.15  # a gap below a ceiling that is not worth a run
TIMES_OFF: Final = 256.0  # from the first rate, up or down, before the search gives up
GRID: Final = 2048

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bounds:
    """start: first rate, requests/s.  precision: half the width of the interval, as a share.  lowest: not below."""

    start: float
    precision: float = 0.05
    most_runs: int = MOST_RUNS
    lowest: float = 0.0
    highest: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.start < 1e7:
            raise UserError(f"{self.start:g} is no rate", where="--start-rate", remedy="give requests per second")
        if not 0.005 <= self.precision <= 0.5:
            raise UserError(f"{self.precision:g} is no precision", where="--precision", remedy="give 0.005 to 0.5")
        if not 3 <= self.most_runs <= MOST_RUNS:
            raise UserError(several(self.most_runs, "run"), where="--max-runs", remedy=f"give 3 to {MOST_RUNS}")


@dataclass(frozen=True, slots=True)
class Step:
    """A run to make.  after: the rate of an overload that comes first, of the way down."""

    rate: float
    kind: str = SEARCH
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Belief:
    """Of the capacity, requests/s: median, and the ends of the BELIEVED interval."""

    rate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half the width, as a share of the middle."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf


# How a search ended.
FOUND: Final = "found"
ROUGH: Final = "rough"  # found, but the runs were used up before the precision was reached
NONE_HOLDS: Final = "none_holds"
CLIENT_LIMITED: Final = "client_limited"
TOO_FEW: Final = "too_few"  # requests, for the SLO's own minimum
UNBOUNDED: Final = "unbounded"  # the load could not be made heavy enough to break the SLO
INCOMPLETE: Final = "incomplete"  # a run was cut
GOING: Final = "going"


def judged(points: Sequence[Point]) -> list[Point]:
    """The points that say something of the server."""
    return [point for point in points if point.verdict in (HELD, BROKEN) and point.kind != OVERLOAD]


def ceiling(points: Sequence[Point]) -> float:
    """The lowest rate at which the client was the limit; not one that it did deliver at another try."""
    delivered = max((point.rate for point in judged(points)), default=0.0)
    limited = (point.rate for point in points if point.verdict == names.CLIENT_LIMITED)
    return min((rate for rate in limited if rate * SAME > delivered), default=math.inf)


def _once_limited(points: Sequence[Point]) -> bool:
    """Was the client the limit in the last run, for the first time at its rate?  A machine may have been busy."""
    if not points or points[-1].verdict != names.CLIENT_LIMITED or points[-1].kind != SEARCH:
        return False
    rate = points[-1].rate
    tries = [p for p in points if p.verdict == names.CLIENT_LIMITED and SAME * rate < p.rate < rate / SAME]
    return len(tries) == 1


def believe(points: Sequence[Point]) -> Belief | None:
    """What the points say; None as long as they are all on one side.

    A run of the way down that broke is left out: after an overload it is another question.
    """
    said = [p for p in judged(points) if p.kind == SEARCH or p.verdict == HELD]
    if not any(p.verdict == HELD for p in said) or not any(p.verdict == BROKEN for p in said):
        return None
    held = max(point.rate for point in said if point.verdict == HELD)
    broken = min(point.rate for point in said if point.verdict == BROKEN)
    first, last = min(held, broken) / MARGIN, max(held, broken) * MARGIN
    grid = np.exp(np.linspace(math.log(first), math.log(last), GRID))
    weight: Floats = np.zeros((len(SCALES), GRID))
    scales = np.array(SCALES)[:, None]
    for point in said:
        expected = np.clip(np.log(grid / point.rate) / scales, -FARTHEST, FARTHEST)
        off = (point.margin - expected) / NOISE
        weight -= (DEGREES + 1) / 2 * np.log1p(off * off / DEGREES)
    mass = np.cumsum(_blurred(np.exp(weight - weight.max()).sum(axis=0), math.log(last / first) / GRID))
    mass /= mass[-1]
    tail = (1 - BELIEVED) / 2

    def at(share: float) -> float:
        return float(grid[min(int(np.searchsorted(mass, share)), GRID - 1)])

    return Belief(at(0.5), at(tail), at(1 - tail))


def _blurred(density: Floats, step: float) -> Floats:
    """Spread by BETWEEN; step: of the grid, in log rate."""
    reach = math.ceil(3 * BETWEEN / step)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) * step / BETWEEN) ** 2)
    found: Floats = np.convolve(density, kernel / kernel.sum(), mode="same")
    return found


def next_step(points: Sequence[Point], bounds: Bounds) -> Step | None:
    """The next run, None when there is none to make (``ended`` says why)."""
    if ended(points, bounds) != GOING:
        return None
    if not any(point.kind == DESCENT for point in points) and not _searched(points, bounds):
        return Step(_next_rate(points, bounds))
    return _down(points)


def ended(points: Sequence[Point], bounds: Bounds) -> str:
    """How the search ended, or GOING."""
    last = points[-1] if points else None
    if last is not None and last.verdict == names.INCOMPLETE and last.kind != OVERLOAD:
        return INCOMPLETE
    if last is not None and last.verdict == UNDECIDED:
        return TOO_FEW
    down = [point for point in points if point.kind == DESCENT]
    said = judged(points)
    full = len(points) >= bounds.most_runs
    if not down and not _searched(points, bounds):
        return GOING
    if not any(point.verdict == HELD for point in said):
        return CLIENT_LIMITED if not said and points else NONE_HOLDS
    if not any(point.verdict == BROKEN for point in said):
        return CLIENT_LIMITED if math.isfinite(ceiling(points)) else UNBOUNDED
    settled = bool(down) and (down[-1].verdict == HELD or len(points) + 2 > bounds.most_runs)
    if not settled and not full and len(points) + 2 <= bounds.most_runs:
        return GOING
    belief = believe(points)
    return FOUND if belief is not None and belief.width <= bounds.precision * 1.001 else ROUGH


def _searched(points: Sequence[Point], bounds: Bounds) -> bool:
    """Whether doubling and bisection are over.

    Two runs are kept for the way down once there is a rate that held and one that broke; before, there is no way to
    come down, and they go into finding them.
    """
    found = [point for point in points if point.kind == SEARCH]
    said = judged(found)
    held = [point.rate for point in said if point.verdict == HELD]
    broken = [point.rate for point in said if point.verdict == BROKEN]
    if len(found) + (2 if held and broken else 0) >= bounds.most_runs:
        return True
    if _once_limited(found):
        return False
    top = ceiling(found)
    if not said:
        return bool(found) and top <= bounds.start / TIMES_OFF
    if not broken:
        reached = max(held)
        return reached * NARROW >= min(top, bounds.highest) or reached >= bounds.start * TIMES_OFF
    if not held:
        return min(broken) <= max(bounds.lowest, bounds.start / TIMES_OFF) * NARROW
    belief = believe(found)
    return belief is not None and belief.width <= bounds.precision


def _next_rate(points: Sequence[Point], bounds: Bounds) -> float:
    said = judged(points)
    held = [point.rate for point in said if point.verdict == HELD]
    broken = [point.rate for point in said if point.verdict == BROKEN]
    top = ceiling(points)
    if not points:
        return min(bounds.start, bounds.highest)
    if _once_limited(points):
        return points[-1].rate
    if not said:
        return top / FACTOR
    if not broken:
        up = min(max(held) * FACTOR, bounds.highest)
        return up if up < top else math.sqrt(max(held) * top)
    if not held:
        return max(min(broken) / FACTOR, bounds.lowest)
    belief = believe(points)
    assert belief is not None
    return belief.rate if belief.rate < top else math.sqrt(max(held) * top)


def _down(points: Sequence[Point]) -> Step:
    """Just below what is believed, after an overload; each further try a tenth lower."""
    belief = believe(points)
    assert belief is not None
    tries = [point for point in points if point.kind == DESCENT]
    rate = tries[-1].rate * DOWN if tries else belief.low
    over = min(belief.rate * OVERLOAD_FACTOR, 0.98 * ceiling(points))
    return Step(rate, DESCENT, max(over, belief.high))
