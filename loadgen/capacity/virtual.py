"""A rate run through the engine's twin in virtual time; it leaves a normal bundle that says it was simulated.

A way down is one play of the twin: the overload comes first, its clients all hang up at one moment, and there what is
measured begins.  Must always hold: the rows and steps kept are those of what is measured, on its own clock.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from loadgen.capacity.load import base_rate, seed_of, transforms_at
from loadgen.capacity.point import Point, point_of
from loadgen.capacity.probe import refuse_too_few
from loadgen.capacity.search import Step
from loadgen.options import Options
from loadgen.preflight import Target
from loadgen.prepare import Prepared, draft, with_schedule
from loadgen.progress import say
from loadgen.run import manifest
from loadgen.schedule import Schedule, build
from models.steady_load import SteadyLoad
from telemetry import names
from telemetry.bundle import Bundle
from telemetry.floor import device_labels
from telemetry.summary import summarize
from telemetry.twin import Twin, TwinLoad, TwinRun, TwinSetting
from telemetry.twin_bundle import REPLICA, TARGET, write_bundle

OVERLOAD_S: Final = 60.0  # of the overload before a way down


class VirtualProbe:
    """See loadgen.capacity.probe.Probe; nothing is sent anywhere."""

    def __init__(self, options: Options, twin: Twin, setting: TwinSetting, group: Path, console: Console) -> None:
        self._group, self._console, self._twin, self._setting = group, console, twin, setting
        account = twin.account(setting)
        self.limits, self.cost, self.utilisation = account.limits, account.cost, account.utilisation
        self._asked = options.rate_scale
        self._options = replace(options, fit=None, rate_scale=None, model=setting.model)
        drafted = draft(self._options, (TARGET,), console, account.reference)
        plan = replace(drafted.plan, max_context=min(drafted.plan.max_context, account.max_context))
        self._drafted = replace(drafted, plan=plan)
        self._transforms = replace(drafted.transforms, max_context=plan.max_context, min_input=plan.min_input)
        self._target = Target(
            TARGET, True, True, (account.reference.name,), account.max_context, "virtual time", account.label
        )
        self._base, self.slo = base_rate(drafted.trace, self._transforms), drafted.objective

    def first_rate(self) -> float:
        """The plan's own rate where it scales the trace, else half of what the iron law allows."""
        lengths = self.schedule(self._base, self._options.seed)
        if self._asked is not None:
            return self._base * self._asked
        load = SteadyLoad(self.cost, lengths.input_tokens, lengths.output_tokens, self.utilisation)
        return load.bound(self.limits).rate / 2

    def schedule(self, rate: float, seed: int) -> Schedule:
        """What is sent."""
        return build(self._drafted.trace, transforms_at(self._transforms, self._base, rate, seed))

    def run(self, step: Step, number: int) -> list[Point]:
        """See Probe; the overload is no point of its own."""
        seed = seed_of(self._options, number)
        schedule = self.schedule(step.rate, seed)
        if number == 0:
            refuse_too_few(self.slo, schedule)
        load = load_of(schedule)
        if step.after is None:
            played = self._twin.replay(load, self._setting, steps=True, tokens=True)
        else:
            over = load_of(self.schedule(step.after, seed + 1))
            played = after_overload(self._twin, self._setting, over, load)
        bundle = self._bundle(played, schedule, step, number, seed)
        summary = summarize(bundle, self.slo)
        say(self._console, "run", f"{bundle.path}: {schedule.rate_per_s:.2f}/s, {summary.sentence}")
        return [point_of(bundle, self.slo, summary, step.kind, schedule.rate_per_s, seed)]

    def _bundle(self, played: TwinRun, schedule: Schedule, step: Step, number: int, seed: int) -> Bundle:
        transforms = transforms_at(self._transforms, self._base, step.rate, seed)
        plan = with_schedule(replace(self._drafted.plan, seed=seed), transforms, schedule)
        drafted = self._drafted
        prepared = Prepared(
            plan, drafted.trace, schedule, drafted.reference, drafted.objective, drafted.source, [self._target],
            list(schedule.records),
        )  # fmt: skip
        told: dict[str, Any] = {
            **manifest(self._options, prepared),
            "plan": plan.to_dict(),
            "seeds": {"schedule": seed, "noise": self._setting.seed},
            "capacity": {"kind": step.kind, "number": number, "after": step.after},
        }
        bundle = write_bundle(played, self.slo, root=self._group, fields=told)
        with bundle.writer("series", REPLICA) as series:
            labels = json.dumps(device_labels(self.cost))
            series.append({"t_s": 0.0, "source": TARGET, "name": names.M_DEVICE_INFO, "labels": labels, "value": 1.0})
        bundle.compact()
        return bundle


def load_of(schedule: Schedule) -> TwinLoad:
    """The requests of a schedule; no two prompts have a page in common."""
    return TwinLoad(
        at_s=schedule.intended_s,
        input_tokens=schedule.input_tokens.astype(np.int64),
        output_tokens=schedule.output_tokens.astype(np.int64),
        klass=[schedule.class_names[place] for place in schedule.klass.tolist()],
    )


def after_overload(twin: Twin, setting: TwinSetting, over: TwinLoad, load: TwinLoad) -> TwinRun:
    """The load straight after an overload whose clients have all hung up; rows and steps of the load alone."""
    first = int(np.searchsorted(over.at_s, OVERLOAD_S))
    at_s = np.concatenate([over.at_s[:first], load.at_s + OVERLOAD_S])
    joined = TwinLoad(
        at_s=at_s,
        input_tokens=np.concatenate([over.input_tokens[:first], load.input_tokens]),
        output_tokens=np.concatenate([over.output_tokens[:first], load.output_tokens]),
        patience_s=np.where(np.arange(len(at_s)) < first, OVERLOAD_S - at_s, np.nan),
    )
    return without_first(twin.replay(joined, setting, steps=True, tokens=True), load, first, OVERLOAD_S)


def without_first(run: TwinRun, load: TwinLoad, first: int, zero_s: float) -> TwinRun:
    """A run without its first requests and the steps before zero_s, on the clock that begins there."""
    steps = run.steps
    if steps is not None:
        zero_ns = round(zero_s * 1e9)
        steps = steps.filter(pc.greater_equal(steps.column("start_ns"), zero_ns))
        for name in ("start_ns", "end_ns"):
            place = steps.column_names.index(name)
            shifted = pc.subtract(steps.column(name), pa.scalar(zero_ns, pa.int64()))
            steps = steps.set_column(place, steps.schema.field(name), shifted)
    arrays = {
        one.name: getattr(run, one.name)[first:]
        for one in fields(run)
        if one.name in ("outcome", "output_tokens", "ttft_s", "e2e_s", "tpot_s", "request_ids")
    }
    return replace(
        run,
        load=load,
        **arrays,
        phases={name: values[first:] for name, values in run.phases.items()},
        facts={name: values[first:] for name, values in run.facts.items()},
        length_s=run.length_s - zero_s,
        steps=steps,
        token_s=None if run.token_s is None else tuple(moments - zero_s for moments in run.token_s[first:]),
    )
