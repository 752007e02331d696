"""The latency-cost frontier: one search for each value of a knob, on the engine's twin.

A knob is an option of the engine that trades latency for cost: ``batch``, ``token-budget`` or ``weight-bits``.  Must
always hold: all searches have the same load, SLO and seeds, so that only the knob differs; a point is on the frontier
when no other one is at least as fast and at least as cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from loadgen.capacity.answer import Answer
from models.errors import UserError
from telemetry.twin import TwinSetting

BATCH: Final = "batch"
TOKEN_BUDGET: Final = "token-budget"
WEIGHT_BITS: Final = "weight-bits"
KNOBS: Final = (BATCH, TOKEN_BUDGET, WEIGHT_BITS)
#: Bits -> precision.  Scales that a format adds are left out, as in models.roofline.
BITS: Final = {32: "fp32", 16: "bf16", 8: "int8", 4: "int4"}
MOST_VALUES: Final = 12
_REMEDY: Final = "write --sweep batch=64,256,1024, token-budget=2048,8192 or weight-bits=4,8,16"


@dataclass(frozen=True, slots=True)
class Sweep:
    """knob: one of KNOBS."""

    knob: str
    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """From ``knob=v1,v2``.  Raises UserError."""
        knob, equals, rest = text.partition("=")
        if knob not in KNOBS or not equals:
            raise UserError(f"{text!r} names no knob: {', '.join(KNOBS)}", where="--sweep", remedy=_REMEDY)
        words = [word.strip() for word in rest.split(",")]
        if not all(word.isascii() and word.isdigit() and 0 < int(word) < 10**9 for word in words):
            raise UserError(f"{rest!r} is no list of whole numbers above 0", where="--sweep", remedy=_REMEDY)
        values = tuple(int(word) for word in words)
        if len(set(values)) < len(values) or not 2 <= len(values) <= MOST_VALUES:
            raise UserError(
                f"{len(set(values))} different values", where="--sweep", remedy=f"give 2 to {MOST_VALUES}, each once"
            )
        if knob == WEIGHT_BITS and (odd := [value for value in values if value not in BITS]):
            raise UserError(f"weights of {odd[0]} bits", where="--sweep", remedy=f"of {', '.join(map(str, BITS))}")
        return cls(knob, values)

    def setting(self, base: TwinSetting, value: int) -> TwinSetting:
        """The engine with this value."""
        if self.knob == BATCH:
            return replace(base, max_batch=value)
        if self.knob == TOKEN_BUDGET:
            return replace(base, token_budget=value)
        return replace(base, dtype=BITS[value])


@dataclass(frozen=True, slots=True)
class Corner:
    """One value of the knob.  latency_s: p95 of the time to the first token at the capacity; token_s: of a token.

    cost: device-seconds per million output tokens of good requests.  efficient: on the frontier of token_s and cost.
    """

    value: int
    rate: float | None
    latency_s: float | None
    token_s: float | None
    cost: float | None
    binds: str | None
    breaks: str | None
    ended: str
    efficient: bool


@dataclass(frozen=True, slots=True)
class Frontier:
    """corners: in the order of the values.  answers: of the same."""

    sweep: Sweep
    corners: tuple[Corner, ...]
    answers: tuple[Answer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "knob": self.sweep.knob,
            "corners": [{name: getattr(one, name) for name in Corner.__slots__} for one in self.corners],
            "answers": [one.to_dict() for one in self.answers],
        }


def frontier(sweep: Sweep, search: Callable[[int], Answer]) -> Frontier:
    """search: the whole search with one value of the knob."""
    answers = tuple(search(value) for value in sweep.values)
    raw = [_corner(value, one) for value, one in zip(sweep.values, answers, strict=True)]
    return Frontier(sweep, tuple(replace(one, efficient=_efficient(one, raw)) for one in raw), answers)


def _corner(value: int, found: Answer) -> Corner:
    cost = 1e6 * found.terms.devices / found.tokens if found.tokens else None
    return Corner(
        value=value,
        rate=found.rate,
        latency_s=(found.latency_s.get("ttft") or [None, None])[1],
        token_s=(found.latency_s.get("tpot") or [None, None])[1],
        cost=cost,
        binds=None if found.binding is None else found.binding.binds,
        breaks=found.breaks,
        ended=found.ended,
        efficient=False,
    )


def _efficient(one: Corner, others: Sequence[Corner]) -> bool:
    """Does no other corner beat it in one figure without losing in the other?"""
    if one.token_s is None or one.cost is None:
        return False
    return not any(
        other.token_s is not None
        and other.cost is not None
        and other.token_s <= one.token_s
        and other.cost <= one.cost
        and (other.token_s < one.token_s or other.cost < one.cost)
        for other in others
    )
