"""``tailspan watch``: options, the clock, and the loop that ticks until Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from models.errors import UserError

TICK_S = 0.5


def watch_command(
    target: Annotated[str, typer.Option("--target", help="Base URL of the server.")],
    slo: Annotated[str, typer.Option("--slo", help="SLO file in YAML, or a preset (tailspan slo list).")] = "chat",
    canaries: Annotated[
        Path | None,
        typer.Option("--canaries", help="Recorded canaries (tailspan canaries record), asked at a trickle."),
    ] = None,
    canary_every: Annotated[float, typer.Option(help="Seconds between two canaries.", min=1)] = 30.0,
    period: Annotated[float, typer.Option(help="Seconds of a window.", min=5)] = 3600.0,
    look: Annotated[float, typer.Option(help="Seconds of requests on which the SLO is judged.", min=1)] = 60.0,
    keep: Annotated[int, typer.Option(help="Closed windows kept, beside those of breaches.", min=1)] = 48,
    disk_mb: Annotated[int, typer.Option("--disk-mb", help="Most megabytes of closed windows.", min=1)] = 4096,
    scrape: Annotated[float, typer.Option(help="Seconds between two scrapes of the server's metrics.", min=0.5)] = 5.0,
    otlp_port: Annotated[int, typer.Option(min=0, max=65535, help="Where spans are received (OTLP/HTTP).")] = 4318,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Where verdicts are served for alerts.")] = 9109,
    runs: Annotated[Path, typer.Option(help="Folder of windows and breaches.")] = Path("runs/watch"),
    duration: Annotated[float | None, typer.Option(help="Seconds after which it ends. [default: never]")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Extra header; write secrets as $VARIABLE.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable that holds the API key.")
    ] = None,
) -> int:
    """On call: watch production for days, in rolling windows; on a breach leave what changed, and why."""
    from loadgen import preflight
    from loadgen.canaries.client import Client
    from loadgen.canaries.file import CanaryFile
    from loadgen.drive import Interrupts
    from loadgen.plan import checked_headers, checked_targets, expanded, from_environment
    from loadgen.watch.canary import Canaries
    from loadgen.watch.explained import explained
    from loadgen.watch.exposition import Exposition
    from loadgen.watch.watch import Settings, Watch
    from telemetry import slo as slos
    from telemetry.names import EXIT_OK

    targets = checked_targets(target)
    if len(targets) != 1:
        raise UserError(f"{len(targets)} targets", where="--target", remedy="start one watch for each")
    if duration is not None and duration <= 0:
        remedy = "give seconds above 0, or leave it out to watch on"
        raise UserError(f"{duration:g} is no duration", where="--duration", remedy=remedy)
    headers = {name: expanded(name, value) for name, value in checked_headers(header or []).items()}
    if api_key_env:
        headers["Authorization"] = f"Bearer {from_environment(api_key_env, '--api-key-env')}"
    policy = slos.load(slo)
    server = preflight.look(targets[0], headers)
    typer.echo(f"target  {server.url}: {server.detail}")
    asked = None
    if canaries is not None:
        if not server.models:
            raise UserError("no model is served that canaries could ask", where=server.url, remedy="start it first")
        asked = Canaries(Client(server.url, server.models[0], headers, timeout_s=30.0), CanaryFile.read(canaries))
    settings = Settings(
        root=runs,
        period_s=period,
        keep=keep,
        disk_bytes=disk_mb << 20,
        look_s=look,
        judge_s=min(10.0, look / 4),
        scrape_s=scrape,
        canary_s=canary_every,
        headers=headers,
    )
    watch = Watch(server, policy, settings, explained, canaries=asked, otlp_port=otlp_port, say=_say)
    interrupts = Interrupts()
    with interrupts.counted():
        watch.start(time.monotonic(), time.time_ns())
        try:
            exposition = Exposition(watch, metrics_port)
            try:
                _say(f"spans   {watch.receiver.url} (the server's exporter sends there)")
                _say(f"metrics {exposition.url}")
                end = None if duration is None else time.monotonic() + duration
                while not interrupts.count and (end is None or time.monotonic() < end):
                    watch.tick(time.monotonic(), time.time_ns())
                    interrupts.wait(TICK_S, 0)
            finally:
                exposition.close()
        finally:
            watch.stop(time.monotonic())
    return int(EXIT_OK)


def _say(text: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")
