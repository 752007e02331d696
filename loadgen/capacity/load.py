"""The load of a search as a function of its rate: the arrival model scaled, or the trace thinned and laid over itself.

Must always hold: only the number of requests per second changes from point to point (and the seed, so that two runs at
one rate are two draws); lengths, burstiness and the window stay those of the plan.
"""

from __future__ import annotations

from dataclasses import replace

from loadgen.options import Options
from loadgen.schedule import build
from loadgen.traces.trace import Trace
from loadgen.transforms import Transforms

SEEDS_APART = 1000  # seeds of two searches whose own seeds follow each other do not meet


def seed_of(options: Options, number: int) -> int:
    """The seed of the number-th run of a search."""
    return options.seed * SEEDS_APART + number


def base_rate(trace: Trace, transforms: Transforms) -> float:
    """Requests/s of the plan's load as it stands: the trace at its own rate, or what the arrival model expects."""
    plain = build(trace, replace(transforms, rate_scale=1.0))
    if transforms.arrivals is not None:
        return transforms.arrivals.mean_rate(plain.length_s * transforms.speed) * transforms.speed
    return plain.rate_per_s


def at_rate(options: Options, base: float, rate: float, seed: int) -> Options:
    """The options of a run at this rate."""
    factor = rate / base
    if options.arrivals is not None:
        return replace(options, arrivals=options.arrivals.scaled(factor), seed=seed)
    return replace(options, rate_scale=factor, seed=seed)


def transforms_at(transforms: Transforms, base: float, rate: float, seed: int) -> Transforms:
    """The same for what is done to a trace."""
    factor = rate / base
    if transforms.arrivals is not None:
        return replace(transforms, arrivals=transforms.arrivals.scaled(factor), seed=seed)
    return replace(transforms, rate_scale=factor, seed=seed)
