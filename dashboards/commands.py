"""The commands of this folder: ``tailspan demo``, ``page``, ``report`` and ``up``.  Light to import; the work is in the
modules that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo_command(
    no_ui: Annotated[
        bool,
        typer.Option("--no-ui", help="End after the run, without the page (also: UI=0 in the environment)."),
    ] = False,
    duration: Annotated[float, typer.Option(min=5, max=3600, help="Seconds of the trace to replay.")] = 60.0,
) -> None:
    """The whole idea on one machine: a real model, a minute of a real trace, and the verdict."""
    from dashboards.demo import run_demo

    raise typer.Exit(run_demo(no_ui=no_ui, duration_s=duration))


def up_command(
    model: Annotated[str, typer.Option(help="Model name, GGUF file or safetensors folder.")] = "smollm2",
    engine_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    ui_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8501,
    prometheus_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 9090,
) -> None:
    """Engine, page and, where its binary is found, Prometheus, as local processes; Ctrl-C ends them all."""
    from dashboards.up import bring_up

    code = bring_up(model=model, engine_port=engine_port, ui_port=ui_port, prometheus_port=prometheus_port)
    raise typer.Exit(code)


def page_command(
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = 8501,
) -> None:
    """The pages alone, on the runs in $TAILSPAN_RUNS or ./runs; Ctrl-C ends them."""
    import os

    from dashboards import stack
    from models.addresses import checked_host

    checked_host(host, "--host")
    argv = stack.page_argv(port, host)
    os.execve(argv[0], argv, {**os.environ, **stack.child_env()})


def report_command(
    run: Annotated[str, typer.Argument(help="A bundle's path, its id, a unique start of it, or: latest")] = "latest",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file to write [default: tailspan-ID.html]")
    ] = None,
    root: Annotated[Path | None, typer.Option("--root", help="Folder of run bundles.")] = None,
    slo: Annotated[str | None, typer.Option(help="Judge by this SLO file or preset, not by the run's own.")] = None,
) -> None:
    """One run as one HTML file: opens with the network off, small enough to mail."""
    from dashboards.report import write
    from telemetry.bundle import resolve
    from telemetry.slo import load

    path = resolve(run, root)
    file = out or Path(f"tailspan-{path.name}.html")
    size = write(path, file, load(slo) if slo else None)
    typer.echo(f"{file} ({size / 1024:.0f} KiB)")
