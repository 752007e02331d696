"""``tailspan up``: engine, page and, where its binary is found, Prometheus, as local processes until Ctrl-C.

What must always hold: nothing is restarted behind the user's back (the first part that ends, ends the rest and is
named), and nothing is left behind.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import typer

from dashboards import stack
from dashboards.processes import Child, Children, Terminated, choose_port, describe
from telemetry.names import EXIT_INTERNAL, EXIT_OK

_LOAD: Final = "--trace azure-2023-conv --duration 60 --fit 0.5 --slo demo"


def bring_up(*, model: str, engine_port: int, ui_port: int, prometheus_port: int) -> int:
    """Start all, print where they are, stay until Ctrl-C.  Returns the exit code: 0 when the user ended it.

    Raises UserError when a port is taken or a part does not come up.
    """
    engine_port = choose_port(engine_port, "the engine", "--engine-port")
    ui_port = choose_port(ui_port, "the page", "--ui-port")
    binary = stack.prometheus_binary()
    if binary is not None:
        prometheus_port = choose_port(prometheus_port, "Prometheus", "--prometheus-port")
    with tempfile.TemporaryDirectory(prefix="tailspan-up-") as folder:
        try:
            with Children(Path(folder)) as children:
                typer.echo(f"starting the engine with {model} ...")
                engine = stack.start_engine(children, model=model, port=engine_port, nice=0)
                _say("engine", engine, "OpenAI API at /v1, figures at /metrics")
                _say("page", stack.start_page(children, port=ui_port), "runs and verdicts")
                if binary is None:
                    typer.echo("  Prometheus   not found on PATH (optional: apt-get install prometheus)")
                else:
                    started = stack.start_prometheus(
                        children, binary=binary, port=prometheus_port, engine_url=engine.url
                    )
                    _say("Prometheus", started, "keeps its data until Ctrl-C")
                typer.echo(f"\nSend it load from another terminal:\n  tailspan run --target {engine.url} {_LOAD}")
                typer.echo(f"Logs: {folder}\nCtrl-C ends all of them.")
                return _report(children.wait_any())
        except KeyboardInterrupt:
            typer.echo("\nended.")
            return EXIT_OK
        except Terminated as end:
            return end.exit_code


def _say(name: str, part: stack.Part, what: str) -> None:
    typer.echo(f"  {name:<12} {part.url:<24} {what} (ready in {part.seconds:.1f} s)")


def _report(child: Child) -> int:
    status = child.exit_status()
    how = describe(status) if status is not None else "still running"
    typer.echo(f"error: {child.name} ended ({how}); ending the others. Its last lines:\n{child.tail()}", err=True)
    return EXIT_INTERNAL
