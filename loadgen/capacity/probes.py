"""How a rate is run: against a server, or through the engine's twin in virtual time.  Both leave a normal bundle.

Must always hold: a way down follows its overload at once; a run that is lost is ended early and says so in its
manifest; a run in virtual time says in every place that it was simulated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from rich.console import Console

from loadgen.capacity.growth import Growth, deadline_of
from loadgen.capacity.load import at_rate, base_rate, seed_of, transforms_at
from loadgen.capacity.point import OVERLOAD, Point, point_of
from loadgen.capacity.search import Step
from loadgen.finish import judge
from loadgen.options import Options
from loadgen.preflight import Target
from loadgen.progress import Totals
from loadgen.run import Prepared, draft, manifest, prepare, run, say, with_schedule
from loadgen.schedule import Schedule, build
from models.errors import UserError
from models.roofline import StepCost
from models.steady_load import Limits, SteadyLoad
from telemetry import names
from telemetry.bundle import COMPLETE, INCOMPLETE, INTERRUPTED, Bundle
from telemetry.floor import device_labels
from telemetry.schema import SERIES
from telemetry.slo import Slo
from telemetry.virtual_load import Offered, Twin

OVERLOAD_S = 60.0  # of an overload in virtual time; on a server it lasts until its queue is lost


class Probe(Protocol):
    """Runs a rate.  slo: of every run.  limits, cost, utilisation: of the engine, where they are known beforehand."""

    slo: Slo
    limits: Limits
    cost: StepCost | None
    utilisation: float

    def first_rate(self) -> float:
        """Requests/s to begin with."""

    def run(self, step: Step, number: int) -> list[Point]:
        """Make the run, the number-th of the search; an overload that was asked for is a point too."""


class ServerProbe:
    """Runs ``tailspan run`` at one rate after the other."""

    def __init__(self, options: Options, group: Path, console: Console, first: Mapping[str, float] | None) -> None:
        """first: what an earlier part of this search began with (``begun``), so that it is not measured again."""
        self._group, self._console = group, console
        self.limits, self.cost, self.utilisation = Limits(), None, 1.0
        if first is None:
            prepared = prepare(options, console)
            scales = {"rate_scale": prepared.plan.rate_scale, "length_scale": prepared.plan.length_scale}
            self.begun = {**scales, "rate": prepared.schedule.rate_per_s}
            refuse_too_few(prepared.objective, prepared.schedule)
        else:
            self.begun = dict(first)
        length_scale = self.begun["length_scale"] if options.fit is not None else options.length_scale
        self._options = replace(options, fit=None, rate_scale=None, length_scale=length_scale, runs=str(group))
        drafted = draft(self._options, (), Console(quiet=True))
        self._base, self.slo = base_rate(drafted.trace, drafted.transforms), drafted.objective

    def first_rate(self) -> float:
        """That of the plan, or what --fit chose."""
        return self.begun["rate"]

    def run(self, step: Step, number: int) -> list[Point]:
        """See Probe."""
        points = []
        if step.after is not None:
            points.append(self._once(step.after, OVERLOAD, number))
            number += 1
        return [*points, self._once(step.rate, step.kind, number)]

    def _once(self, rate: float, kind: str, number: int) -> Point:
        seed = seed_of(self._options, number)
        options = at_rate(self._options, self._base, rate, seed)
        prepared = prepare(options, self._console)
        growth = Growth(deadline_of(prepared.schedule, self.slo))

        def lost(totals: Totals, labels: Mapping[str, int]) -> str | None:
            return growth(totals.t_s, totals.due, totals.done)

        bundle, summary = run(options, prepared, self._console, lost=lost)
        if bundle.status == INTERRUPTED:
            raise KeyboardInterrupt  # the points so far are kept
        bundle.update(capacity={"kind": kind, "number": number})
        return point_of(bundle, self.slo, summary, kind, prepared.schedule.rate_per_s, seed)


class VirtualProbe:
    """Runs the engine's twin; nothing is sent anywhere."""

    def __init__(self, options: Options, twin: Twin, group: Path, console: Console) -> None:
        self._group, self._console, self._twin = group, console, twin
        self._target = Target(
            f"virtual://{twin.cost.device.name}", True, True, (twin.reference.name,), twin.max_context,
            "virtual time", twin.label,
        )  # fmt: skip
        plain = replace(options, fit=None, rate_scale=None)
        drafted = draft(plain, (self._target.url,), console, twin.reference)
        plan = replace(drafted.plan, max_context=min(drafted.plan.max_context, twin.max_context))
        self._drafted = replace(drafted, plan=plan)
        self._transforms = replace(drafted.transforms, max_context=plan.max_context, min_input=plan.min_input)
        self._options = replace(plain, runs=str(group), model=twin.reference.name)
        self._base, self.slo = base_rate(drafted.trace, self._transforms), drafted.objective
        self.limits, self.cost, self.utilisation = twin.limits, twin.cost, twin.utilisation
        self._asked = options.rate_scale or 1.0
        self._first: float | None = None

    def first_rate(self) -> float:
        """Half of what the iron law allows, or the plan's own rate where it gives one."""
        if self._options.arrivals is None and self._asked != 1.0:
            return self._base * self._asked
        lengths = self.schedule(self._base, self._options.seed)
        refuse_too_few(self.slo, lengths)
        load = SteadyLoad(self._twin.cost, lengths.input_tokens, lengths.output_tokens, self._twin.utilisation)
        return load.bound(self._twin.limits).rate / 2

    def schedule(self, rate: float, seed: int) -> Schedule:
        """What would be sent."""
        return build(self._drafted.trace, transforms_at(self._transforms, self._base, rate, seed))

    def run(self, step: Step, number: int) -> list[Point]:
        """See Probe; the overload goes to the same engine and is no point of its own."""
        seed = seed_of(self._options, number)
        schedule = self.schedule(step.rate, seed)
        before = None
        if step.after is not None:
            over = self.schedule(step.after, seed + 1)
            before = offered(over, min(OVERLOAD_S, over.length_s))
        growth = Growth(deadline_of(schedule, self.slo))
        shown = self._twin.run(offered(schedule), growth, before)
        transforms = transforms_at(self._transforms, self._base, step.rate, seed)
        plan = with_schedule(replace(self._drafted.plan, seed=seed), transforms, schedule)
        drafted = self._drafted
        prepared = Prepared(
            plan, drafted.trace, schedule, drafted.reference, drafted.objective, drafted.source, [self._target],
            list(schedule.records),
        )  # fmt: skip
        bundle = Bundle.create(self._group, {}, **manifest(self._options, prepared))
        bundle.put("requests", shown.requests)
        bundle.put("steps", shown.steps)
        bundle.put("series", self._series())
        bundle.update(
            status=COMPLETE if shown.stopped is None else INCOMPLETE,
            plan=replace(plan, run_id=bundle.run_id).to_dict(),
            seeds={"schedule": seed},
            capacity={"kind": step.kind, "number": number, "after": step.after},
            virtual={"seconds": shown.end_s, "cpu_s": shown.cpu_s},
            engine_limits={name: getattr(self.limits, name) for name in ("max_batch", "token_budget", "kv_tokens")},
            **({} if shown.stopped is None else {"stopped": shown.stopped}),
        )
        summary = judge(bundle, self.slo)
        say(self._console, "run", f"{bundle.path}: {schedule.rate_per_s:.2f}/s, {summary.sentence}")
        return [point_of(bundle, self.slo, summary, step.kind, schedule.rate_per_s, seed)]

    def _series(self) -> pa.Table:
        """What a scrape of the same engine would say of the device, so that floors can be told."""
        labels = device_labels(self._twin.cost)
        row = {"t_s": 0.0, "source": self._target.url, "name": names.M_DEVICE_INFO, "value": 1.0}
        return pa.Table.from_pylist([row | {"labels": json.dumps(labels)}], schema=SERIES)


def offered(schedule: Schedule, until_s: float | None = None) -> Offered:
    """The requests of a schedule, or those of its first seconds."""
    chosen = slice(None) if until_s is None else slice(0, max(1, int((schedule.intended_s < until_s).sum())))
    return Offered(
        schedule.intended_s[chosen],
        schedule.input_tokens[chosen],
        schedule.output_tokens[chosen],
        schedule.trace_row[chosen],
        schedule.klass[chosen],
        schedule.class_names,
    )


def refuse_too_few(slo: Slo, schedule: Schedule) -> None:
    """Raises UserError where a run is too short for the SLO's own minimum, which no rate below would ever reach."""
    needed = max((one.min_requests for one in slo.objectives), default=0)
    if len(schedule) < needed:
        raise UserError(
            f"a run of {len(schedule)} requests is too small for this SLO, which asks for {needed}",
            where="--slo",
            remedy="give a longer --duration, a --loop, or a higher rate to begin with",
        )
