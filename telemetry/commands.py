"""``tailspan runs list | show | check | relabel | baseline``: look at run bundles without making load.

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


@app.command("relabel")
def relabel_command(
    slo: Annotated[str, typer.Option("--slo", help="The other SLO file or preset")],
    run: Run = "latest",
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """What another SLO says of a run: which labels move.  No row of it is touched."""
    from telemetry.bundle import Bundle
    from telemetry.relabel import relabel
    from telemetry.slo import load, of_manifest
    from telemetry.summary import summarize

    bundle = Bundle.open(run, root)
    old, new = of_manifest(bundle.manifest), load(slo)
    found = relabel(bundle, old, new)
    summary = summarize(bundle, new)
    if as_json:
        _print_json(
            {
                "run_id": bundle.run_id,
                "from": old.name,
                "to": new.name,
                **found.to_dict(),
                "sentence": summary.sentence,
                "exit_code": summary.exit_code,
            }
        )
        return
    typer.echo(f"{'label':<9}{old.name:>12}{new.name:>12}")
    for label in names.LABELS:
        typer.echo(f"{label:<9}{found.before[label]:>12}{found.after[label]:>12}")
    for (before, after), count in found.moves.items():
        if before != after:
            typer.echo(f"{count} {before} -> {after}")
    total = sum(found.after.values())
    typer.echo(f"{found.changed} of {total} requests have another label; under {new.name}: {summary.sentence}")


baselines = typer.Typer(help="Runs kept by a name, to compare later ones with.", no_args_is_help=True)
app.add_typer(baselines, name="baseline")


@baselines.command("set")
def baseline_set(
    name: Annotated[str, typer.Argument(help="Such as: main")],
    runs: Annotated[list[str], typer.Argument(help="Runs that it stands for; three or more show the noise")],
    root: Root = None,
    add: Annotated[bool, typer.Option("--add", help="Add to the runs it already holds (the newest 20 stay)")] = False,
) -> None:
    """Make a name stand for runs: complete, VALID, of one load."""
    from telemetry.baseline import set_baseline

    kept = set_baseline(name, runs, root, add=add)
    typer.echo(f"{name}: {', '.join(kept)}")


@baselines.command("list")
def baseline_list(root: Root = None, as_json: AsJson = False) -> None:
    """All names with their runs; a file that cannot be read is named, and the others are listed."""
    from models.errors import UserError
    from telemetry.baseline import list_baselines

    broken: list[UserError] = []
    found = list_baselines(root, broken)
    for problem in broken:
        typer.echo(f"error: {problem}", err=True)
    if as_json:
        _print_json(found)
        return
    for name, runs in found.items():
        typer.echo(f"{name}: {', '.join(runs)}")
    if not found and not broken:
        typer.echo("no baseline yet; set one: tailspan runs baseline set NAME RUN")


@baselines.command("remove")
def baseline_remove(name: Annotated[str, typer.Argument()], root: Root = None) -> None:
    """Forget a name; its runs stay."""
    from telemetry.baseline import remove_baseline

    remove_baseline(name, root)
    typer.echo(f"{name}: forgotten")


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
