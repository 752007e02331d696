"""What a search asks of whoever runs a rate for it, and what is refused before the first run."""

from __future__ import annotations

from typing import Protocol

from loadgen.capacity.point import Point
from loadgen.capacity.search import Step
from loadgen.schedule import Schedule
from models.errors import UserError
from models.roofline import StepCost
from models.steady_load import Limits
from telemetry.slo import Slo


class Probe(Protocol):
    """Runs a rate.  slo: of every run.  limits, cost, utilisation: of the engine, where they are known beforehand."""

    slo: Slo
    limits: Limits
    utilisation: float

    @property
    def cost(self) -> StepCost | None:
        """The account of the model on its device; None: not known beforehand."""

    def first_rate(self) -> float:
        """Requests/s to begin with."""

    def run(self, step: Step, number: int) -> list[Point]:
        """Make the run, the number-th of the search; an overload that was asked for may be a point too.

        Raises KeyboardInterrupt where the user ended it.
        """


def refuse_too_few(slo: Slo, schedule: Schedule) -> None:
    """Raises UserError where a run is too short for the SLO's own minimum, which no rate below would ever reach."""
    needed = max((one.min_requests for one in slo.objectives), default=0)
    if len(schedule) < needed:
        raise UserError(
            f"a run of {len(schedule)} requests is too small for this SLO, which asks for {needed}",
            where="--slo",
            remedy="give a longer --duration, a --loop, or a higher rate to begin with",
        )
