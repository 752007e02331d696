"""``tailspan runs list | show | check``: look at run bundles without making load.

Owns the options and the output of these commands; what they say comes from ``summary`` and ``check``.  Heavy imports
stay inside the functions, so that ``tailspan --help`` is quick.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from telemetry import names

app = typer.Typer(help="Look at finished or running runs.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(help="A bundle's path, its id, a unique start of it, or: latest")]
Root = Annotated[
    Path | None, typer.Option("--root", help="Folder of run bundles [default: $TAILSPAN_RUNS, else ./runs]")
]
SloFile = Annotated[str | None, typer.Option("--slo", help="Judge by this SLO file or preset, not by the run's own")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]


@app.command("list")
def list_command(
    root: Root = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most so many")] = 20,
    as_json: AsJson = False,
) -> None:
    """The newest runs, each with its verdict."""
    from models.errors import UserError
    from telemetry.bundle import Bundle, list_runs, runs_root
    from telemetry.slo import of_manifest
    from telemetry.summary import Summary, summarize
    from telemetry.terminal import render_list, show

    found: list[tuple[str, Summary | str]] = []
    for path in list_runs(root)[:limit]:
        try:
            bundle = Bundle.open(path)
            found.append((path.name, summarize(bundle, of_manifest(bundle.manifest))))
        except UserError as problem:
            found.append((path.name, problem.message))
    if as_json:
        _print_json([{"run_id": i, "error": s} if isinstance(s, str) else s.to_dict() for i, s in found])
    elif found:
        show(render_list(found))
    else:
        typer.echo(f"no runs under {root or runs_root()}; make one: tailspan demo")


@app.command("show")
def show_command(run: Run = "latest", root: Root = None, slo: SloFile = None, as_json: AsJson = False) -> None:
    """The report on one run."""
    from telemetry.bundle import Bundle
    from telemetry.slo import load, of_manifest
    from telemetry.summary import summarize
    from telemetry.terminal import render, show

    bundle = Bundle.open(run, root)
    summary = summarize(bundle, load(slo) if slo else of_manifest(bundle.manifest))
    if as_json:
        _print_json(summary.to_dict())
    else:
        show(render(summary))


@app.command("check")
def check_command(
    run: Run = "latest",
    root: Root = None,
    repair: Annotated[bool, typer.Option("--repair", help="First finish a bundle whose writer died")] = False,
    slo: SloFile = None,
    as_json: AsJson = False,
) -> None:
    """Does the bundle hold together?  Exit code 3 when a check fails."""
    from telemetry.bundle import Bundle
    from telemetry.check import check
    from telemetry.slo import load, of_manifest

    bundle = Bundle.open(run, root)
    repaired = bundle.repair() if repair else False
    findings = check(bundle, load(slo) if slo else of_manifest(bundle.manifest))
    failed = [finding for finding in findings if not finding.ok]
    if as_json:
        _print_json({"run_id": bundle.run_id, "repaired": repaired, "findings": [f.to_dict() for f in findings]})
    else:
        if repair:
            typer.echo(_told(repaired, bundle.manifest))
        for finding in findings:
            rows = f"  [requests {', '.join(map(str, finding.rows))} …]" if finding.rows else ""
            typer.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name}: {finding.message}{rows}")
            if finding.remedy:
                typer.echo(f"      remedy: {finding.remedy}")
        typer.echo(f"{len(findings) - len(failed)} of {len(findings)} checks hold for run {bundle.run_id}")
    if failed:
        raise typer.Exit(names.EXIT_RUN_NOT_VALID)


def _told(repaired: bool, manifest: dict[str, Any]) -> str:
    if not repaired:
        return "nothing to repair"
    account = manifest.get("repaired", {})
    scheduled = manifest.get("scheduled")
    torn = account.get("torn_bytes", 0)
    tail = f"; {torn} bytes of an unfinished write were left out" if torn else ""
    return f"repaired: {account.get('rows', 0)} rows of {scheduled} requests are back{tail}"


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
