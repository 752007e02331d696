"""One load test from options to exit code: the parent process of a run.

Order: everything that can be refused is refused before a bundle exists; then plan.json, the span receiver, the fleet,
the scraper; then what came back is gathered, judged and printed.  Must always hold: once a bundle exists it is closed
with a status that says how the run ended, and all processes and threads of the run are gone when run() returns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from loadgen import calibrate, preflight
from loadgen.arrivals import ArrivalModel
from loadgen.calls import sampling_ratio
from loadgen.drive import Drive, Interrupts
from loadgen.finish import close_spans, judge, versions
from loadgen.locust_runner import Fleet, free_port
from loadgen.plan import (
    PLAN_FILE,
    Plan,
    checked_headers,
    checked_limits,
    checked_targets,
)
from loadgen.progress import Progress, Totals
from loadgen.prompts import PromptMaker
from loadgen.schedule import Schedule, build
from loadgen.scrape import Scraper
from loadgen.traces import find, registry
from loadgen.traces.trace import Choices, Trace
from loadgen.transforms import Transforms, check
from models.errors import UserError
from models.store import Reference, load_reference
from telemetry import names, slo
from telemetry.bundle import COMPLETE, INCOMPLETE, INTERRUPTED, Bundle
from telemetry.receiver import Receiver

WEB_PORT: Final = 8089  # Locust's own
STOP_GRACE_S: Final = 3.0  # what the stop button leaves to requests in flight


@dataclass(frozen=True, slots=True)
class Options:
    """What `tailspan run` was asked, by the names of its options; None where the default depends on something."""

    targets: str
    trace: str = "azure-2023-conv"
    slo: str = "chat"
    model: str = "smollm2"
    served_model: str | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    speed: float = 1.0
    rate_scale: float | None = None
    length_scale: float | None = None
    fit: float | None = None
    over_limit: str = "skip"
    dequantise_s: float | None = None
    loop: int = 1
    arrivals: ArrivalModel | None = None
    choices: Choices = field(default_factory=Choices)
    workers: int = 1
    seed: int = 0
    salt: str | None = None
    max_concurrency: int | None = None
    connect_timeout_s: float = 10.0
    first_token_timeout_s: float = 120.0
    total_timeout_s: float = 600.0
    keep_text: str = "wrong"
    exact_output: bool = True
    temperature: float = 1.0
    headers: list[str] = field(default_factory=list)
    api_key_env: str | None = None
    otlp_port: int = 4318
    runs: str | None = None
    name: str | None = None
    web_ui: bool = False
    command: str = ""


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


def prepare(options: Options, console: Console) -> Prepared:
    """Check all options and files, look at the targets, and lay out the load.  Raises UserError."""
    targets = checked_targets(options.targets)
    headers = checked_headers(options.headers)
    limits = {
        "--connect-timeout": options.connect_timeout_s,
        "--first-token-timeout": options.first_token_timeout_s,
        "--total-timeout": options.total_timeout_s,
    }
    checked_limits(options.workers, options.max_concurrency, limits, options.keep_text, options.temperature)
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
    )
    check(transforms)
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
    reference = load_reference(model_reference(options.model))
    maker = PromptMaker(reference.tokenizer, reference.template, seed=options.seed, salt=f"probe {time.time_ns()}")
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
        workers=options.workers,
        start_s=options.start_s,
        duration_s=options.duration_s,
        speed=options.speed,
        over_limit=options.over_limit,
        dequantise_s=options.dequantise_s,
        loop=options.loop,
        arrivals=None if options.arrivals is None else options.arrivals.to_dict(),
        trace_choices=options.choices.to_dict(),
        exact_output=options.exact_output,
        temperature=options.temperature,
        headers=headers,
        api_key_env=options.api_key_env,
        connect_timeout_s=options.connect_timeout_s,
        first_token_timeout_s=options.first_token_timeout_s,
        total_timeout_s=options.total_timeout_s,
        max_concurrency=options.max_concurrency,
        keep_text=options.keep_text,
    )
    wire_headers = plan.settings().headers  # also finds out whether the secrets are there
    servers = [preflight.look(target, wire_headers) for target in targets]
    for server in servers:
        say(console, "target", f"{server.url}: {server.detail}")
    plan = replace(plan, **served(options, plan, servers))
    transforms = replace(transforms, max_context=plan.max_context, min_input=plan.min_input)
    fit = None
    if options.fit is not None:
        if options.rate_scale is not None and options.length_scale is not None:
            raise UserError("both scales are given", where="--fit", remedy="leave out --fit or one of the scales")
        speed = calibrate.measure(targets[0], wire_headers, maker, plan.served_model, plan.max_context)
        speed = speed.times(len(set(targets)))
        fit = calibrate.fit(trace, transforms, speed, options.fit, rate=options.rate_scale, length=options.length_scale)
        say(console, "fit", fit.sentence())
        transforms = replace(transforms, rate_scale=fit.rate_scale, length_scale=fit.length_scale)
    schedule = build(trace, transforms)
    plan = replace(
        plan,
        rate_scale=transforms.rate_scale,
        length_scale=transforms.length_scale,
        requests=len(schedule),
        sampling_ratio=sampling_ratio(schedule.rate_per_s),
    )
    records = [*schedule.records, *([{"name": "fit", **fit.to_dict()}] if fit else [])]
    say(console, "load", load_sentence(schedule))
    for record in schedule.records:
        if record["name"] in ("over_limit", "shortest", "dequantise", "loop", "arrivals", "classes"):
            say(console, "", ", ".join(f"{key} {value}" for key, value in record.items() if key != "name"))
    return Prepared(plan, trace, schedule, reference, objective, found.sentence, servers, records)


def run(options: Options, prepared: Prepared, console: Console) -> tuple[Bundle, Any]:
    """Run it.  Returns the closed bundle and its telemetry.summary.Summary."""
    plan, schedule = prepared.plan, prepared.schedule
    bundle = Bundle.create(options.runs, {}, **manifest(options, prepared))
    plan = replace(plan, run_id=bundle.run_id, salt=plan.salt or bundle.run_id)
    plan.write(bundle.path / PLAN_FILE)
    bundle.update(plan=plan.to_dict(), seeds={"schedule": plan.seed, "prompts": plan.seed, "salt": plan.salt})
    say(console, "run", f"{bundle.path}")
    receiver = started_receiver(bundle, options.otlp_port, console)
    web_port = free_web_port() if options.web_ui else None
    fleet = Fleet(bundle.path, bundle.path / PLAN_FILE, plan.workers, grace_s=STOP_GRACE_S, web_port=web_port)
    progress = Progress(console, len(schedule), schedule.length_s)
    scrapers: list[Scraper] = []

    def on_start(zero_ns: int, zero_unix_ns: int) -> None:
        bundle.update(clock={"zero_monotonic_ns": zero_ns, "zero_unix_ns": zero_unix_ns})
        scrapers.append(Scraper(bundle, plan.targets, plan.settings().headers, zero_ns))
        scrapers[0].start()

    def on_progress(totals: Totals) -> None:
        scrapers[0].note(
            **{
                names.M_SCHEDULE_LAG: totals.lag_p99_s,
                names.M_CLIENT_LOOP_LAG: totals.loop_lag_p99_s,
                names.M_CLIENT_CPU: totals.cpu_ratio,
                names.M_CLIENT_INFLIGHT: totals.inflight,
            }
        )

    interrupts = Interrupts()
    began_cpu, began = time.process_time(), time.monotonic()
    drive = Drive(
        fleet,
        progress,
        interrupts,
        length_s=schedule.length_s,
        total_timeout_s=plan.connect_timeout_s + plan.total_timeout_s,
        on_start=on_start,
        on_progress=on_progress,
    )
    with interrupts.counted():
        status = INCOMPLETE
        try:
            fleet.start()
            if web_port is not None:
                say(console, "web", f"http://127.0.0.1:{web_port} (its stop button ends the run)")
            drive.run()
            status = drive.status
        finally:
            progress.close()
            for scraper in scrapers:
                scraper.stop()
            fleet.close(quickly=status != COMPLETE)
            cpu = (time.process_time() - began_cpu) / max(1e-9, time.monotonic() - began)
            bundle.update(status=status, workers=[worker.to_dict() for worker in drive.workers])
            if drive.zero_ns is None:
                say(console, "", f"the run did not start:\n{fleet.log_tail()}")
            spans = close_spans(bundle, receiver, quickly=status == INTERRUPTED)
            bundle.update(generator=generator(drive, cpu, scrapers), spans=spans)
        return bundle, judge(bundle, prepared.objective)


def manifest(options: Options, prepared: Prepared) -> dict[str, Any]:
    """The fields of the manifest that are known before the start."""
    plan, trace, reference = prepared.plan, prepared.trace, prepared.reference
    return {
        "name": options.name,
        "command": options.command,
        "slo": prepared.objective.manifest_entry(),
        "versions": versions(),
        "hashes": {"trace": trace.sha256, **reference.shas},
        "transforms": prepared.records,
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "source": prepared.source,
            "synthetic": trace.synthetic,
            "rows_read": trace.rows_read,
            "rows_kept": trace.rows_kept,
            "rows_dropped": trace.rows_dropped,
            "first_drop": trace.first_drop,
            "inversions": trace.inversions,
            "choices": plan.trace_choices,
            "notes": list(trace.notes),
        },
        "scheduled": len(prepared.schedule),
        "length_s": prepared.schedule.length_s,
        "sampling_ratio": plan.sampling_ratio,
        "targets": list(plan.targets),
        "server": {server.url: server.to_dict() for server in prepared.servers},
        "open_loop": plan.max_concurrency is None,
    }


def generator(drive: Drive, parent_cpu: float, scrapers: list[Scraper]) -> dict[str, Any]:
    """The generator's account of itself: the worst worker's figures, and the parent's."""
    ends = [worker.end or worker.progress for worker in drive.workers]

    def worst(key: str) -> float | None:
        return max((end[key] for end in ends if isinstance(end.get(key), int | float)), default=None)

    return {
        "cpu_ratio": worst("cpu_ratio"),
        "loop_lag_p99_s": worst("loop_lag_p99_s"),
        "lag_p99_s": worst("lag_p99_s"),
        "lag_max_s": worst("lag_max_s"),
        "parent": {"mean_cpu": parent_cpu},
        "failed_scrapes": scrapers[0].failures if scrapers else {},
    }


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


def started_receiver(bundle: Bundle, port: int, console: Console) -> Receiver:
    """The span receiver, on a free port where the asked one is taken."""
    try:
        receiver = Receiver(bundle.path / "spans", port=port).start()
    except UserError as error:
        receiver = Receiver(bundle.path / "spans", port=0).start()
        say(console, "spans", f"{error.message}; receiving on {receiver.url} instead (for the server's exporter)")
    return receiver


def free_web_port() -> int:
    """Locust's port, or a free one where it is taken."""
    import socket

    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", WEB_PORT))
            return WEB_PORT
        except OSError:
            return free_port()


def load_sentence(schedule: Schedule) -> str:
    """One line: what will be sent."""
    parts = [
        f"{len(schedule):,} requests in {schedule.length_s:.1f} s ({schedule.rate_per_s:.2f}/s)",
        f"input mean {schedule.input_tokens.mean():.1f} max {schedule.input_tokens.max():,}",
        f"output mean {schedule.output_tokens.mean():.1f} max {schedule.output_tokens.max():,}",
    ]
    factors = {"rate_scale": "rate", "speed": "speed", "length_scale": "lengths"}
    parts += [f"{factors[r['name']]} x {r['factor']:.4g}" for r in schedule.records if r["name"] in factors]
    return "; ".join(parts)


def say(console: Console, label: str, text: str) -> None:
    """One labelled line."""
    console.print(f"{label:<8}{text}", highlight=False, markup=False, soft_wrap=True)
