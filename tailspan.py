"""The command line.  Mounts each folder's commands and turns what goes wrong into exit codes; nothing else.

Exit codes (telemetry/names.py): 0 held, 1 SLO broken, 2 regression, 3 run not valid, 4 usage error, 5 internal error,
130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dashboards.commands import demo_command, page_command, report_command, up_command
from dashboards.grafana.commands import app as grafana_app
from engine.commands import serve_command
from loadgen.canaries.commands import app as canaries_app
from loadgen.capacity.commands import capacity_command
from loadgen.commands import run_command
from loadgen.lab.commands import app_of as lab_app_of
from loadgen.selfcheck import selfcheck_command
from loadgen.traces.commands import traces
from loadgen.watch.commands import watch_command
from loadgen.worker_command import worker_command
from models.commands import app as models_app
from models.errors import UserError
from models.strict_command import made_strict
from telemetry.bundle import BEFORE_REPAIR
from telemetry.commands import app as runs_app
from telemetry.compare_command import compare_command
from telemetry.explain_command import explain_with
from telemetry.floor_command import floor_command
from telemetry.gate_command import gate_command
from telemetry.names import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from telemetry.slo_commands import app as slo_app
from telemetry.standard_streams import StandardStreams

if TYPE_CHECKING:
    from telemetry.twin import Twin


def _twin() -> Twin:
    """The engine in virtual time, for analyses that know no engine."""
    from engine.replay import TWIN

    return TWIN


def _recover(bundle: Path) -> None:
    """Make the rows that a run noted and did not come to, before its bundle is repaired."""
    from loadgen.recover import recover

    recover(bundle)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Replay a real arrival trace against an LLM server: every request is good, late, wrong or dropped.",
)
app.command("capacity")(capacity_command(_twin))
app.command("compare")(compare_command)
app.command("demo")(demo_command)
app.command("explain")(explain_with(_twin))
app.command("floor")(floor_command)
app.command("gate")(gate_command)
app.command("page")(page_command)
app.command("report")(report_command)
app.command("run")(run_command)
app.command("selfcheck")(selfcheck_command)
app.command("serve")(serve_command)
app.command("up")(up_command)
app.command("watch")(watch_command)
app.command("worker")(worker_command)
app.add_typer(canaries_app, name="canaries")
app.add_typer(grafana_app, name="grafana")
app.add_typer(lab_app_of(_twin), name="lab")
app.add_typer(traces, name="traces")
app.add_typer(models_app, name="models")
app.add_typer(runs_app, name="runs")
app.add_typer(slo_app, name="slo")
made_strict(app)
BEFORE_REPAIR.append(_recover)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"tailspan {version('tailspan')}")
        except PackageNotFoundError:
            print("tailspan (not installed)")
        raise typer.Exit


@app.callback()
def _root(
    show: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of every command."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code.  arguments None: those of this process, whose streams are taken over."""
    if arguments is not None:
        return _run(arguments)
    streams = StandardStreams()
    return streams.finish(_run(None))


def _run(arguments: list[str] | None) -> int:
    """Only an internal error shows a traceback."""
    try:
        result = app(args=arguments, prog_name="tailspan", standalone_mode=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except typer.TyperException as error:  # what the option parser found wrong
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        if type(error).__name__ == "NoArgsIsHelpError":  # typer keeps this class to itself
            print(text)
            return EXIT_OK
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "tailspan"
        print(f"error: {text}\n  remedy: `{command} --help` lists what it takes", file=sys.stderr)
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        print(f"error: internal: {type(error).__name__}: {error}", file=sys.stderr)
        print("  remedy: please report it with the lines above", file=sys.stderr)
        return EXIT_INTERNAL
    return result if isinstance(result, int) else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
