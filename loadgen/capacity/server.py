"""A rate run against a server, as ``tailspan run`` does it.

Must always hold: a way down follows its overload at once; a run that is lost is ended early and says so in its
manifest; what --fit measured is measured once, and kept with the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.capacity.growth import Growth, deadline_of
from loadgen.capacity.load import at_rate, base_rate, seed_of
from loadgen.capacity.point import OVERLOAD, Point, point_of
from loadgen.capacity.probe import refuse_too_few
from loadgen.capacity.search import Step
from loadgen.options import Options
from loadgen.prepare import draft, prepare
from loadgen.progress import Totals
from loadgen.run import run
from models.errors import UserError
from models.roofline import StepCost
from models.steady_load import Limits
from telemetry.bundle import INTERRUPTED


class ServerProbe:
    """See loadgen.capacity.probe.Probe.  begun: rate and scales of the beginning, to go on with later."""

    def __init__(self, options: Options, group: Path, console: Console, begun: Mapping[str, float] | None) -> None:
        self._console = console
        self.limits, self.utilisation = Limits(), 1.0
        self.cost: StepCost | None = None
        if begun is None:
            prepared = prepare(options, console)
            if gone := [server for server in prepared.servers if not server.reachable]:
                raise UserError(
                    f"{gone[0].url}: {gone[0].detail}", where="--target", remedy="start the server, then search"
                )
            refuse_too_few(prepared.objective, prepared.schedule)
            begun = {"rate": prepared.schedule.rate_per_s, "length_scale": prepared.plan.length_scale}
        self.begun = dict(begun)
        length_scale = self.begun["length_scale"] if options.fit is not None else options.length_scale
        self._options = replace(options, fit=None, rate_scale=None, length_scale=length_scale, runs=str(group))
        drafted = draft(self._options, (), Console(quiet=True))
        self._base, self.slo = base_rate(drafted.trace, drafted.transforms), drafted.objective

    def first_rate(self) -> float:
        """That of the plan, or what --fit chose."""
        return self.begun["rate"]

    def run(self, step: Step, number: int) -> list[Point]:
        """See Probe; the overload is a run and a point of its own."""
        if step.after is None:
            return [self._once(step.rate, step.kind, number)]
        return [self._once(step.after, OVERLOAD, number), self._once(step.rate, step.kind, number + 1)]

    def _once(self, rate: float, kind: str, number: int) -> Point:
        seed = seed_of(self._options, number)
        options = at_rate(self._options, self._base, rate, seed)
        prepared = prepare(options, self._console)
        growth = Growth(deadline_of(prepared.schedule, self.slo))

        def lost(totals: Totals, labels: Mapping[str, int]) -> str | None:
            return growth(totals.t_s, totals.due, totals.done)

        bundle, summary = run(options, prepared, self._console, lost=lost)
        if bundle.status == INTERRUPTED:
            raise KeyboardInterrupt  # the points before it are kept
        bundle.update(capacity={"kind": kind, "number": number})
        return point_of(bundle, self.slo, summary, kind, prepared.schedule.rate_per_s, seed)
