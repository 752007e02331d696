"""``tailspan demo``: the whole idea in one command: model, engine, a minute of a real trace, verdict, page.

What must always hold: every part is a process of its own that any user could start by hand with the printed command,
each wait is bounded, and all of them end when the demo ends, however it ends.
"""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
from pathlib import Path
from typing import Final

import typer

from dashboards import stack
from dashboards.processes import Children, Terminated, choose_port, describe, port_is_free
from telemetry.bundle import newest, runs_root
from telemetry.names import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_NOT_VALID, EXIT_SLO_BROKEN

MODEL: Final = "smollm2"
TRACE: Final = "azure-2023-conv"
SLO: Final = "demo"  # a preset of telemetry.slo
#: Share of what the engine carries on this machine, measured by the run before it starts: busy, not broken.
FIT: Final = "0.35"
#: The engine yields to the generator, else a busy two-core machine would spoil the measurement.
ENGINE_NICE: Final = 15
_PAGE_PORT: Final = 8501


def run_demo(*, no_ui: bool, duration_s: float) -> int:
    """Run the demo.  Returns 0 when it ran and the run is valid, whatever the verdict on the SLO; else the run's code.

    Raises UserError when a part cannot be started.
    """
    with_page = not no_ui and os.environ.get("UI", "1") != "0"
    typer.echo(_announcement(duration_s, with_page))
    with tempfile.TemporaryDirectory(prefix="tailspan-demo-") as folder:
        ran = False
        try:
            with Children(Path(folder)) as children:
                code = _through(children, "model", stack.tailspan("models", "pull", MODEL))
                if code != EXIT_OK:
                    return code
                typer.echo("\n[2/4] starting the engine ...")
                engine = stack.start_engine(children, model=MODEL, port=0, nice=ENGINE_NICE)
                typer.echo(f"      ready at {engine.url} after {engine.seconds:.1f} s")
                argv = _run_argv(engine.url, duration_s)
                typer.echo(f"\n[3/4] {shlex.join(['tailspan', *argv[3:]])}\n")
                code = _through(children, "run", argv)
                ran = code in (EXIT_OK, EXIT_SLO_BROKEN)
                if (said := _gate(code)) is not None:
                    typer.echo(f"\n{said}")
                if engine.child.exit_status() is not None:
                    typer.echo(f"error: the engine ended during the run:\n{engine.child.tail()}", err=True)
                if not ran:
                    return code
                if not with_page:
                    typer.echo(_next_steps(None))
                    return EXIT_OK
                _stay(children, engine.url)
                return EXIT_INTERNAL  # only a part that ended by itself gets here
        except KeyboardInterrupt:
            typer.echo("\nended.")
            return EXIT_OK if ran else EXIT_INTERRUPTED
        except Terminated as end:
            return end.exit_code


def _announcement(duration_s: float, with_page: bool) -> str:
    minutes = (duration_s + 60.0) / 60.0  # beside the load: engine start, a short calibration, page
    last = "shows the run as a page in your browser, until Ctrl-C" if with_page else "ends"
    return (
        f"tailspan demo: about {minutes:.0f} minutes (the first time, a model of 93 MB is downloaded as well).\n"
        f"  1. fetches SmolLM2-135M-Instruct and converts it once\n"
        f"  2. starts an LLM server with it on this machine's CPU\n"
        f"  3. replays {duration_s:.0f} s of real arrivals against it, and gives every request one verdict:\n"
        f"     good, late, wrong or dropped\n"
        f"  4. {last}\n\n[1/4] the model"
    )


def _run_argv(url: str, duration_s: float) -> list[str]:
    words = ["run", "--trace", TRACE, "--duration", f"{duration_s:g}", "--fit", FIT, "--slo", SLO, "--target", url]
    return stack.tailspan(*words)


def _through(children: Children, name: str, argv: list[str]) -> int:
    """Run ``argv`` to its end with its output on our terminal.  Ctrl-C gives it time to write what it has."""
    child = children.start(name, argv, env=stack.child_env(), log=False, end_signal=signal.SIGINT, grace_s=30.0)
    status = children.run_to_end(child)
    if status < 0:
        typer.echo(f"error: {name} was {describe(status)}", err=True)
        return EXIT_INTERNAL
    return status


def _gate(code: int) -> str | None:
    """What a gate in CI would have made of the run; None where the run itself has just said what went wrong."""
    if code == EXIT_OK:
        return "The SLO held: a gate in CI would have passed (exit code 0)."
    if code == EXIT_SLO_BROKEN:
        return "The SLO is broken: a gate in CI would have stopped here with exit code 1. The demo itself went well."
    if code == EXIT_RUN_NOT_VALID:
        return f"The run gives no verdict on the server: a gate in CI would have stopped with exit code {code}."
    return None


def _stay(children: Children, engine_url: str) -> None:
    port = _PAGE_PORT if port_is_free(_PAGE_PORT) else choose_port(0, "the page", "")
    typer.echo("\n[4/4] starting the page ...")
    page = stack.start_page(children, port=port)
    run = newest(runs_root())
    typer.echo(f"      {page.url}/{'' if run is None else f'?run={run.name}'}")
    typer.echo(_next_steps(engine_url))
    typer.echo("\nThe engine and the page stay up until Ctrl-C.")
    ended = children.wait_any()
    typer.echo(f"error: {ended.name} ended; ending the others. Its last lines:\n{ended.tail()}", err=True)


def _next_steps(engine_url: str | None) -> str:
    """Three commands, each of which works as it stands."""
    lines = ["\nTry next" + (" (in another terminal):" if engine_url else ":")]
    if engine_url:
        overload = f"tailspan run --trace {TRACE} --duration 60 --fit 1.5 --slo {SLO} --target {engine_url}"
        lines.append(f"  {overload}\n      three times the load: watch the queue grow")
    else:
        lines.append("  tailspan up\n      engine, page and Prometheus, until Ctrl-C")
    lines.append("  tailspan runs show\n      the verdict again, from the files of the run")
    lines.append("  tailspan runs check\n      every request has one label, and its phases add up")
    return "\n".join(lines)
