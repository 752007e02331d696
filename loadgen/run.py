"""One load test from options to exit code: the parent process of a run.

Order: everything that can be refused is refused before a bundle exists; then plan.json, the span receiver, the fleet,
the scraper; then what came back is gathered, judged and printed.  Must always hold: once a bundle exists it is closed
with a status that says how the run ended, and all processes and threads of the run are gone when run() returns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from loadgen import calibrate, preflight
from loadgen.bodies import APIS, CHAT
from loadgen.calls import sampling_ratio
from loadgen.canaries.after import close
from loadgen.canaries.before import clients_of, planned
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.watch import CanaryWatch
from loadgen.drive import START_LIMIT_S, Drive, Interrupts
from loadgen.finish import close_spans, judge, versions
from loadgen.job import SendSettings
from loadgen.live import METRICS_FILE, Live
from loadgen.locust_runner import Fleet, address_of, checked_network, free_port
from loadgen.options import Options
from loadgen.pairs import Pairing
from loadgen.plan import (
    PLAN_FILE,
    Plan,
    calls_of,
    checked_headers,
    checked_limits,
    checked_targets,
    prompt_maker,
    with_canaries,
)
from loadgen.progress import Progress, Totals
from loadgen.prompts import PromptMaker
from loadgen.schedule import Schedule, build
from loadgen.scrape import Scraper, newest_steps
from loadgen.traces import find, registry
from loadgen.traces.trace import Trace
from loadgen.transforms import Transforms, check
from loadgen.way import checked_proxy
from models.errors import UserError
from models.store import Reference, load_reference
from telemetry import names, slo
from telemetry.bundle import COMPLETE, INCOMPLETE, INTERRUPTED, Bundle
from telemetry.forward import Forwarder, checked_collector
from telemetry.parts import write_atomically
from telemetry.receiver import Receiver
from telemetry.summary import Summary

#: (the run so far, requests by verdict) -> why it is lost, or None.
Lost = Callable[[Totals, Mapping[str, int]], str | None]

WEB_PORT: Final = 8089  # Locust's own
REMOTE_START_S: Final = 600.0  # for workers on other machines to come
STOP_GRACE_S: Final = 3.0  # what the stop button leaves to requests in flight


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
    if options.fit is not None and options.api != CHAT:
        raise UserError("the probe speaks the chat API alone", where="--fit", remedy="give the scales yourself")
    if options.proxy is not None:
        checked_proxy(options.proxy)
    if options.remote_workers:
        checked_network(address_of(options.bind, "--bind")[0], "--bind", options.unencrypted)
        if any(one.file is not None for one in options.classes):
            raise UserError("prompts of a file stay on this machine", where="--remote-workers", remedy="leave one out")
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


def run(
    options: Options,
    prepared: Prepared,
    console: Console,
    repeat: int = 0,
    *,
    pairing: Pairing | None = None,
    lost: Lost | None = None,
) -> tuple[Bundle, Summary]:
    """Run it.  Returns the closed bundle and what it says.

    pairing: its place among paired runs.  lost: asked each second whether the run is lost already; then it is cut, and
    the manifest says why (``stopped``).
    """
    plan, schedule = prepared.plan, prepared.schedule
    settings = plan.settings()
    bundle = Bundle.create(options.runs, {}, **manifest(options, prepared))
    salt = plan.salt or (pairing.salt if pairing is not None else None) or bundle.run_id
    plan = replace(plan, run_id=bundle.run_id, salt=salt)
    plan.write(bundle.path / PLAN_FILE)
    bundle.update(
        plan=plan.to_dict(), repeat=repeat, seeds={"schedule": plan.seed, "prompts": plan.seed, "salt": plan.salt}
    )
    if pairing is not None:
        bundle.update(group=pairing.to_dict())
    say(console, "run", f"{bundle.path}")
    receiver = started_receiver(bundle, options, console)
    web_port = free_web_port() if options.web_ui else None
    metrics_port = options.metrics_port or free_port()
    fleet = Fleet(
        bundle.path,
        bundle.path / PLAN_FILE,
        plan.workers,
        grace_s=STOP_GRACE_S,
        web_port=web_port,
        metrics_port=metrics_port,
        listen=options.listen,
        remote_workers=options.remote_workers,
        bind=address_of(options.bind, "--bind") if options.remote_workers else None,
    )
    if options.remote_workers:
        say(console, "workers", f"waiting for {options.remote_workers}: on each machine, {worker_words(options)}")
    watch = None if prepared.canaries is None else CanaryWatch(prepared.canaries)
    live = Live(bundle, prepared.objective, len(schedule), watch)
    alarmed: list[str] = []
    say(console, "metrics", f"http://{options.listen}:{metrics_port}/metrics, while the run goes")
    progress = Progress(console, len(schedule), schedule.length_s)
    scrapers: list[Scraper] = []

    def on_start(zero_ns: int, zero_unix_ns: int) -> None:
        bundle.update(clock={"zero_monotonic_ns": zero_ns, "zero_unix_ns": zero_unix_ns})
        paths = {one.url: one.metrics_path for one in prepared.servers}
        scrapers.append(Scraper(bundle, plan.targets, settings.headers, zero_ns, settings.way, paths, after=before))
        scrapers[0].start()

    def on_progress(totals: Totals) -> Mapping[str, int]:
        if lost is not None and (why := lost(totals, live.labels)):
            drive.cut(why)
        scrapers[0].note(
            **{
                names.M_SCHEDULE_LAG: totals.lag_p99_s,
                names.M_CLIENT_LOOP_LAG: totals.loop_lag_p99_s,
                names.M_CLIENT_CPU: totals.cpu_ratio,
                names.M_CLIENT_INFLIGHT: totals.inflight,
            }
        )
        live.update()
        if watch is not None and watch.alarm is not None and watch.alarm not in alarmed:
            alarmed.append(watch.alarm)
            progress.say(f"canaries: {watch.alarm} after {watch.broken.seen} of them: {watch.findings()[0].said}")
        fleet.command(cmd="live", text=live.exposition(totals).decode(), rows=live.table())
        return live.labels

    before = newest_steps(plan.targets, settings.headers, settings.way)
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
        start_limit_s=REMOTE_START_S if options.remote_workers else START_LIMIT_S,
    )
    with interrupts.counted():
        status = INCOMPLETE
        try:
            fleet.start()
            if web_port is not None:
                say(console, "web", f"http://127.0.0.1:{web_port} (its stop button ends the run)")
            drive.run()
            status = drive.status
        except Exception as error:
            bundle.update(failure=f"{type(error).__name__}: {error}")
            raise
        finally:
            progress.close()
            for scraper in scrapers:
                scraper.stop()
            cpu = (time.process_time() - began_cpu) / max(1e-9, time.monotonic() - began)
            bundle.update(status=status, workers=[worker.to_dict() for worker in drive.workers])
            if drive.cut_why is not None:
                bundle.update(stopped=drive.cut_why)
            if drive.zero_ns is not None:
                signals = interrupts.count  # one that comes while the last word is written ends the linger too
                last_word(live, fleet, drive.totals, bundle)
                if status != INTERRUPTED:
                    interrupts.wait(options.linger_s, signals)
            fleet.close(quickly=status != COMPLETE)
            if drive.zero_ns is None:
                say(console, "", f"the run did not start:\n{fleet.log_tail()}")
            spans = close_spans(bundle, receiver, quickly=status == INTERRUPTED)
            bundle.update(generator=generator(drive, cpu, scrapers), spans=spans)
    if watch is not None and drive.zero_ns is not None and status != INTERRUPTED:
        bundle.compact()
        verdict = close(bundle, watch, clients_of(plan), salted=bool((plan.canaries or {}).get("salted")))
        say(console, "", f"canaries, those that changed asked again alone: {verdict}")
    summary = judge(bundle, prepared.objective)
    if options.salt is not None:
        share = (
            "no account of it" if summary.cached_share is None else f"{summary.cached_share:.1%} of the prompt tokens"
        )
        say(console, "", f"prompts sent before: the server says it had in its prefix cache: {share}")
    return bundle, summary


def last_word(live: Live, fleet: Fleet, totals: Totals, bundle: Bundle) -> None:
    """/metrics as the bundle has it, served while the master lives and kept beside the rows."""
    live.finish()
    text = live.exposition(totals)
    fleet.command(cmd="live", text=text.decode(), rows=live.table())
    write_atomically(bundle.path / METRICS_FILE, text)


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
        names.SIMULATED_KEY: next((one.simulated for one in prepared.servers if one.simulated is not None), None),
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


def started_receiver(bundle: Bundle, options: Options, console: Console) -> Receiver:
    """The span receiver, on a free port where the asked one is taken; it passes spans on where that is asked for."""
    forward = None if options.forward_spans is None else Forwarder(options.forward_spans)
    folder = bundle.path / "spans"
    try:
        receiver = Receiver(folder, options.listen, options.otlp_port, forward=forward).start()
    except UserError as error:
        receiver = Receiver(folder, options.listen, 0, forward=forward).start()
        say(console, "spans", f"{error.message}")
        say(
            console,
            "",
            f"this run receives spans at {receiver.url}: for those of a server, free the port, or start the server "
            f"with OTEL_EXPORTER_OTLP_ENDPOINT={receiver.url}; everything else is measured all the same",
        )
    return receiver


def worker_words(options: Options) -> str:
    """The commands that add a worker on another machine to this run."""
    _, port = address_of(options.bind, "--bind")
    if options.unencrypted:
        return f"tailspan worker --master THIS_HOST:{port} --unencrypted"
    return f"ssh -N -L {port}:127.0.0.1:{port} THIS_HOST, and beside it tailspan worker --master 127.0.0.1:{port}"


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
