"""The floor beside every figure: steps and requests of this engine put into the account of models.roofline.

What must hold: an account is taken from the plan that ran, never from the time it took, so that floor and duration
are independent; it costs the engine thread a few microseconds a step.
"""

from __future__ import annotations

from typing import TypedDict

from engine.request import Request
from engine.step_load import StepLoad
from models.roofline import StepCost, efficiency, wall_of


class StepAccount(TypedDict, total=False):
    """Columns of ``telemetry.schema.STEPS``; none of them where the device is unknown."""

    bytes: int
    flops: int
    floor_ns: int
    efficiency: float
    wall: str


class Floors:
    """cost: the model on its device; None: unknown, then nothing is said."""

    def __init__(self, cost: StepCost | None) -> None:
        self.cost = cost

    def step(self, load: StepLoad, duration_ns: int) -> StepAccount:
        """The account of a step."""
        if self.cost is None:
            return {}
        found = self.cost.floor_ns(*load)
        return {
            "bytes": found.bytes,
            "flops": found.flops,
            "floor_ns": found.floor_ns,
            "efficiency": efficiency(found.floor_ns, duration_ns),
            "wall": wall_of(found, duration_ns),
        }

    def first_token(self, request: Request) -> None:
        """Note the floor of its TTFT, given what the cache held when it was first admitted."""
        if self.cost is not None:
            facts = request.clock.facts
            facts.floor_ttft_ns = self.cost.ttft_ns(len(request.prompt_ids), facts.cached_tokens)

    def over(self, request: Request) -> None:
        """Note the floor of its time per token, for the tokens that it got."""
        if self.cost is not None:
            request.clock.facts.floor_tpot_ns = self.cost.tpot_ns(len(request.prompt_ids), request.generated)
