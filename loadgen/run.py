"""One load test from what ``loadgen.prepare`` laid out to a judged bundle: the parent process of a run.

Order: the bundle and plan.json, the span receiver, the fleet, the scraper; then what came back is gathered and judged.
Must always hold: once a bundle exists it is closed with a status that says how the run ended, and all processes and
threads of the run are gone when run() returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from rich.console import Console

from loadgen.canaries.after import close
from loadgen.canaries.before import clients_of
from loadgen.canaries.watch import CanaryWatch
from loadgen.drive import START_LIMIT_S, Drive, Interrupts
from loadgen.finish import close_spans, judge, versions
from loadgen.live import METRICS_FILE, Live
from loadgen.locust_runner import Fleet, address_of, free_port
from loadgen.options import Options
from loadgen.pairs import Pairing
from loadgen.plan import PLAN_FILE
from loadgen.prepare import Prepared
from loadgen.progress import Progress, Totals, say
from loadgen.recover import recover
from loadgen.scrape import Scraper, newest_steps
from models.errors import UserError
from telemetry import names
from telemetry.bundle import COMPLETE, INCOMPLETE, INTERRUPTED, Bundle
from telemetry.forward import Forwarder
from telemetry.parts import write_atomically
from telemetry.receiver import Receiver
from telemetry.summary import Summary

#: (the run so far, requests by verdict) -> why it is lost, or None.
Lost = Callable[[Totals, Mapping[str, int]], str | None]

WEB_PORT: Final = 8089  # Locust's own
REMOTE_START_S: Final = 600.0  # for workers on other machines to come
STOP_GRACE_S: Final = 3.0  # what the stop button leaves to requests in flight


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
    try:
        receiver = started_receiver(bundle, options, console)
    except UserError:
        bundle.update(status=INCOMPLETE)  # nothing was sent, and nobody writes into it any more
        raise
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
        labels = live.labels
        text = live.exposition(totals.when_ended(sum(labels.values())))
        fleet.command(cmd="live", text=text.decode(), rows=live.table())
        return labels

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
            last_rows(bundle, console)
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


def last_rows(bundle: Bundle, console: Console) -> None:
    """Wait for the recorders that still make rows, and make those of one that died."""
    try:
        made = recover(bundle.path)
    except UserError as error:
        say(console, "rows", f"{error.message}; {error.remedy}")
    else:
        if made:
            say(console, "rows", f"{made:,} were made now, of requests that a lost worker had noted")


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
