"""What is done to a trace, and whether it can be done.  The doing is in loadgen.schedule.

Owns the figures and their limits.  Must always hold: every change is seeded, has a record with its numbers, and leaves
sessions whole: thinning keeps or drops all turns of one, a copy shifts all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loadgen.arrivals import ArrivalModel
from models.errors import UserError

SKIP: Final = "skip"
CLIP: Final = "clip"
FAIL: Final = "fail"
OVER_LIMIT: Final = (SKIP, CLIP, FAIL)
MAX_REQUESTS: Final = 100_000_000
DEFAULT_CLASS: Final = "default"


@dataclass(frozen=True, slots=True)
class Mix:
    """One traffic class and its share of the sessions (of the requests, where the trace has no sessions)."""

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class Transforms:
    """What is done to a trace.  Times are seconds of trace time; scales are factors; counts are tokens."""

    seed: int
    start_s: float = 0.0
    duration_s: float | None = None  # None: to the end of the trace
    speed: float = 1.0  # 1.5: 1.5 times as fast
    rate_scale: float = 1.0  # below 1: seeded thinning; above 1: seeded superposition of shifted copies
    length_scale: float = 1.0
    over_limit: str = SKIP
    max_context: int = 1 << 30
    min_input: int = 1  # the shortest prompt that the template allows
    dequantise_s: float | None = None  # the recorder's tick over which arrivals are spread
    loop: int = 1  # how often the window is sent, one after the other
    arrivals: ArrivalModel | None = None  # its times instead of the trace's
    mix: tuple[Mix, ...] = ()  # empty: all of DEFAULT_CLASS


def check(asked: Transforms) -> None:
    """Raises UserError naming the option whose value cannot be used."""
    for option, value in (
        ("--speed", asked.speed),
        ("--rate-scale", asked.rate_scale),
        ("--length-scale", asked.length_scale),
    ):
        if not 0 < value < 1e6:  # also refuses NaN
            raise UserError(
                f"{value:g} is not a positive factor", where=option, remedy="give a number above 0, e.g. 0.5"
            )
    if not 0 <= asked.start_s < 1e9:
        raise UserError(
            f"{asked.start_s:g} is not a start", where="--start", remedy="give seconds of trace time from 0"
        )
    if asked.duration_s is not None and not 0 < asked.duration_s < 1e9:
        raise UserError(
            f"{asked.duration_s:g} is not a duration", where="--duration", remedy="give seconds of trace time above 0"
        )
    if asked.dequantise_s is not None and not 0 < asked.dequantise_s < 1e6:
        raise UserError(
            f"{asked.dequantise_s:g} is not a tick", where="--dequantise", remedy="give the seconds of the clock's tick"
        )
    if not 1 <= asked.loop <= 1_000_000:
        raise UserError(f"{asked.loop} times", where="--loop", remedy="give how often the window is sent, from 1")
    if asked.over_limit not in OVER_LIMIT:
        raise UserError(
            f"{asked.over_limit!r} is not a policy", where="--over-limit", remedy=f"choose {', '.join(OVER_LIMIT)}"
        )
    if asked.min_input >= asked.max_context:
        raise UserError(
            f"a context of {asked.max_context} tokens cannot hold the shortest prompt, {asked.min_input}, and more",
            where="--model",
            remedy="serve a model with a longer context",
        )
    if asked.arrivals is not None and asked.rate_scale != 1.0:
        raise UserError("an arrival model has a rate of its own", where="--rate-scale", remedy="leave it out")
    names = [mix.name for mix in asked.mix]
    total = sum(mix.share for mix in asked.mix)
    if names and (len(set(names)) < len(names) or min(m.share for m in asked.mix) < 0 or abs(total - 1) > 1e-6):
        raise UserError(
            f"the shares of {', '.join(names)} sum to {total:g}",
            where="classes",
            remedy="name each class once, with shares that sum to 1",
        )
