"""Before a run: options, files and targets become a plan and a schedule; whatever can be refused is refused here.

Must always hold: nothing of a load has been sent, and no bundle exists, when ``prepare`` returns or raises.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen import calibrate, preflight
from loadgen.bodies import APIS, CHAT
from loadgen.calls import sampling_ratio
from loadgen.canaries.before import planned
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.mixed import checked_share
from loadgen.job import SendSettings
from loadgen.locust_runner import address_of, checked_network
from loadgen.options import CANARY_SHARE, Options
from loadgen.plan import (
    Plan,
    calls_of,
    checked_headers,
    checked_limits,
    checked_targets,
    prompt_maker,
    with_canaries,
)
from loadgen.progress import say
from loadgen.prompts import PromptMaker
from loadgen.schedule import Schedule, build
from loadgen.traces import find, registry
from loadgen.traces.trace import Trace
from loadgen.transforms import Transforms, check
from loadgen.way import checked_proxy
from models.addresses import checked_host
from models.errors import UserError
from models.store import Reference, load_reference
from models.wording import several
from telemetry import slo
from telemetry.forward import checked_collector

LONGEST_LINGER_S = 86_400.0


@dataclass(slots=True)
class Prepared:
    """Everything known before a bundle exists.  plan lacks only the run's id."""

    plan: Plan
    trace: Trace
    schedule: Schedule
    reference: Reference
    objective: slo.Slo
    source: str  # the sentence on where the trace came from
    servers: list[preflight.Target]
    records: list[dict[str, Any]]
    canaries: CanaryFile | None = None


@dataclass(slots=True)
class Draft:
    """What options and files say before anybody is asked.  plan lacks what only the schedule and the servers know."""

    plan: Plan
    trace: Trace
    transforms: Transforms
    reference: Reference
    objective: slo.Slo
    source: str
    prompts: PromptMaker  # of a salt of its own


def draft(options: Options, targets: tuple[str, ...], console: Console, reference: Reference | None = None) -> Draft:
    """Check all options and files, and read the trace.  reference: instead of the model that the options name.

    Raises UserError.
    """
    headers = checked_headers(options.headers)
    limits = {
        "--connect-timeout": options.connect_timeout_s,
        "--first-token-timeout": options.first_token_timeout_s,
        "--total-timeout": options.total_timeout_s,
    }
    workers = options.workers + options.remote_workers
    checked_limits(workers, options.max_concurrency, limits, options.keep_text, options.temperature)
    checked_sending(options)
    objective = slo.load(options.slo)
    transforms = Transforms(
        seed=options.seed,
        start_s=options.start_s,
        duration_s=options.duration_s,
        speed=options.speed,
        rate_scale=1.0 if options.rate_scale is None else options.rate_scale,
        length_scale=1.0 if options.length_scale is None else options.length_scale,
        over_limit=options.over_limit,
        dequantise_s=options.dequantise_s,
        loop=options.loop,
        arrivals=options.arrivals,
        mix=tuple(one.mix for one in options.classes),
    )
    check(transforms)
    if options.salt is not None:
        say(
            console,
            "",
            "warning: a given salt repeats the prompts of the run that had it; its cache may still hold them",
        )
    found = find.locate(options.trace)
    trace = registry.read(
        found.path,
        found.name,
        options.choices,
        start_s=options.start_s,
        duration_s=None if options.arrivals is not None else options.duration_s,
    )
    say(console, "trace", found.sentence)
    say(console, "", trace.account())
    for note in trace.notes:
        say(console, "", f"note: {note}")
    reference = reference or load_reference(model_reference(options.model))
    maker = prompt_maker(reference, options.api, seed=options.seed, salt=f"probe {time.time_ns()}")
    plan = Plan(
        run_id="",
        seed=options.seed,
        salt=options.salt or "",
        trace_name=trace.name,
        trace_path=str(found.path),
        trace_format=trace.format,
        trace_sha256=trace.sha256,
        reference=model_reference(options.model),
        served_model=options.served_model or reference.name,
        max_context=reference.shape.max_context,
        min_input=maker.minimum,
        requests=0,
        targets=targets,
        workers=workers,
        start_s=options.start_s,
        duration_s=options.duration_s,
        speed=options.speed,
        over_limit=options.over_limit,
        dequantise_s=options.dequantise_s,
        loop=options.loop,
        arrivals=None if options.arrivals is None else options.arrivals.to_dict(),
        trace_choices=options.choices.to_dict(),
        classes=tuple(one.to_dict() for one in options.classes),
        share_prefixes=options.share_prefixes,
        patience=None if options.patience is None else options.patience.to_dict(),
        api=options.api,
        exact_output=options.exact_output,
        temperature=options.temperature,
        headers=headers,
        api_key_env=options.api_key_env,
        proxy=options.proxy,
        ca_file=options.ca_file,
        verify_tls=options.verify_tls,
        connect_timeout_s=options.connect_timeout_s,
        first_token_timeout_s=options.first_token_timeout_s,
        total_timeout_s=options.total_timeout_s,
        max_concurrency=options.max_concurrency,
        keep_text=options.keep_text,
    )
    return Draft(plan, trace, transforms, reference, objective, found.sentence, maker)


def prepare(options: Options, console: Console) -> Prepared:
    """Check all options and files, look at the targets, and lay out the load.  Raises UserError."""
    targets = checked_targets(options.targets)
    drafted = draft(options, targets, console)
    plan, trace, transforms, reference = drafted.plan, drafted.trace, drafted.transforms, drafted.reference
    settings = plan.settings()  # also finds out whether the secrets are there
    wire_headers, way = settings.headers, settings.way
    servers = [preflight.look(target, wire_headers, way) for target in targets]
    for server in servers:
        say(console, "target", f"{server.url}: {server.detail}")
    plan = replace(plan, **served(options, plan, servers))
    transforms = replace(transforms, max_context=plan.max_context, min_input=plan.min_input)
    fit = None
    if options.fit is not None:
        if options.rate_scale is not None and options.length_scale is not None:
            raise UserError("both scales are given", where="--fit", remedy="leave out --fit or one of the scales")
        speed = calibrate.measure(
            targets[0], wire_headers, drafted.prompts, plan.served_model, plan.max_context, way, plan.sampling
        )
        speed = speed.times(len(set(targets)))
        fit = calibrate.fit(trace, transforms, speed, options.fit, rate=options.rate_scale, length=options.length_scale)
        say(console, "fit", fit.sentence())
        transforms = replace(transforms, rate_scale=fit.rate_scale, length_scale=fit.length_scale)
    schedule = build(trace, transforms)
    recorded = None
    if options.canaries is not None:
        recorded, plan = planned(options.canaries, options.canary_share, plan, lambda text: say(console, "", text))
        schedule = with_canaries(schedule, plan)
    plan = with_schedule(plan, transforms, schedule)
    records = [*schedule.records, *([{"name": "fit", **fit.to_dict()}] if fit else [])]
    say(console, "load", load_sentence(schedule))
    for record in schedule.records:
        if record["name"] in ("over_limit", "shortest", "dequantise", "loop", "arrivals", "classes", "canaries"):
            say(console, "", ", ".join(f"{key} {value}" for key, value in record.items() if key != "name"))
    prepared = Prepared(plan, trace, schedule, reference, drafted.objective, drafted.source, servers, records, recorded)
    check_tokens(prepared, settings, console)
    return prepared


def with_schedule(plan: Plan, transforms: Transforms, schedule: Schedule) -> Plan:
    """The plan with what its schedule fixes."""
    return replace(
        plan,
        rate_scale=transforms.rate_scale,
        length_scale=transforms.length_scale,
        requests=len(schedule),
        sampling_ratio=sampling_ratio(schedule.rate_per_s),
    )


def checked_sending(options: Options) -> None:
    """Raises UserError for what cannot be sent."""
    remedy = f"choose {', '.join(APIS)}"
    if options.forward_spans is not None:
        checked_collector(options.forward_spans, "--forward-spans")
    if options.api not in APIS:
        raise UserError(f"{options.api!r} is no API", where="--api", remedy=remedy)
    if options.fit is not None:
        calibrate.checked_share(options.fit)
    if options.fit is not None and options.api != CHAT:
        raise UserError("the probe speaks the chat API alone", where="--fit", remedy="give the scales yourself")
    if options.proxy is not None:
        checked_proxy(options.proxy)
    checked_host(options.listen, "--listen")
    if not 0 <= options.linger_s <= LONGEST_LINGER_S:
        remedy = f"give seconds from 0 to {LONGEST_LINGER_S:g}"
        raise UserError(f"{options.linger_s:g} is no time to stay", where="--linger", remedy=remedy)
    bind = address_of(options.bind, "--bind")
    if options.remote_workers:
        checked_network(bind[0], "--bind", options.unencrypted)
        if any(one.file is not None for one in options.classes):
            raise UserError("prompts of a file stay on this machine", where="--remote-workers", remedy="leave one out")
    if options.canaries is not None:
        checked_share(options.canary_share)
    if options.canaries is None and options.canary_share != CANARY_SHARE:
        raise UserError("no canaries are named", where="--canary-share", remedy="add --canaries FILE, or leave it out")
    if not 1 <= options.repeats <= 1000:
        raise UserError(f"{options.repeats} repeats", where="repeats", remedy="give 1 to 1000")


def check_tokens(prepared: Prepared, settings: SendSettings, console: Console) -> None:
    """Ask a target that counts tokens itself whether it agrees with us on one prompt; warn where it does not."""
    plan = replace(prepared.plan, salt="token check", run_id="token check")
    call = calls_of(plan, prepared.schedule, prepared.reference).at(0)
    body = json.loads(call.body)
    asked = {key: body[key] for key in ("messages", "prompt") if key in body}
    for target in plan.targets if asked else ():
        counted = preflight.counted_by(target, settings.headers, plan.served_model, asked, settings.way)
        if counted is not None and counted != call.input_tokens:
            say(
                console,
                "",
                f"warning: {target} counts {counted} tokens in a prompt that has {call.input_tokens} under "
                f"{plan.reference}: name the model that it serves with --model",
            )


def served(options: Options, plan: Plan, servers: list[preflight.Target]) -> dict[str, Any]:
    """What the targets say that changes the plan: the model's name, and a context shorter than the reference's."""
    names_served = [server.models[0] for server in servers if server.models]
    contexts = [server.max_context for server in servers if server.max_context]
    return {
        "served_model": options.served_model or (names_served[0] if names_served else plan.served_model),
        "max_context": min([plan.max_context, *contexts]),
    }


def model_reference(text: str) -> str:
    """A model given by path, made absolute: the workers run in another folder."""
    path = Path(text).expanduser()
    return str(path.resolve()) if path.exists() and ("/" in text or path.suffix or path.is_dir()) else text


def load_sentence(schedule: Schedule) -> str:
    """One line: what will be sent."""
    parts = [
        f"{several(len(schedule), 'request')} in {schedule.length_s:.1f} s ({schedule.rate_per_s:.2f}/s)",
        f"input mean {schedule.input_tokens.mean():.1f} max {schedule.input_tokens.max():,}",
        f"output mean {schedule.output_tokens.mean():.1f} max {schedule.output_tokens.max():,}",
    ]
    factors = {"rate_scale": "rate", "speed": "speed", "length_scale": "lengths"}
    parts += [f"{factors[r['name']]} x {r['factor']:.4g}" for r in schedule.records if r["name"] in factors]
    return "; ".join(parts)
