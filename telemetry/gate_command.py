"""``tailspan gate``: judge a finished run for CI, and the files that a gate leaves behind.

Owns the options and where the results go; ``tailspan run`` writes the same files through ``deliver``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from models.errors import UserError

if TYPE_CHECKING:
    from telemetry.gate import Gate

STEP_SUMMARY: Final = "GITHUB_STEP_SUMMARY"  # GitHub shows what is appended to the file it names beside the job

Baseline = Annotated[str | None, typer.Option("--baseline", help="Compare with this baseline, or with a run")]
SummaryFile = Annotated[Path | None, typer.Option("--summary", help="Write Markdown for a pull request here")]
JunitFile = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML here")]


def gate_command(
    run: Annotated[str, typer.Argument(help="A bundle's path, its id, a unique start of it, or: latest")] = "latest",
    root: Annotated[Path | None, typer.Option("--root", help="Folder of run bundles")] = None,
    slo: Annotated[
        str | None, typer.Option("--slo", help="Judge by this SLO file or preset, not by the run's own")
    ] = None,
    baseline: Baseline = None,
    summary: SummaryFile = None,
    junit: JunitFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Judge a finished run for CI: 0 held, 1 SLO broken, 2 regression, 3 no verdict (5 > 4 > 3 > 1 > 2)."""
    from telemetry.baseline import resolve_baseline
    from telemetry.bundle import Bundle
    from telemetry.gate import gate
    from telemetry.slo import load, of_manifest
    from telemetry.terminal import render, show

    bundle = Bundle.open(run, root)
    policy = load(slo) if slo else of_manifest(bundle.manifest)
    others = [one for one in resolve_baseline(baseline, root) if one.path != bundle.path] if baseline else []
    if baseline and not others:
        raise UserError(
            f"{baseline!r} holds this very run alone", where="--baseline", remedy="compare it with an earlier run"
        )
    found = gate(bundle, policy, baseline, others)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(render(found.summary))
        tell(found)
    deliver(found, summary, junit)  # last: what was found is printed, whatever becomes of the files
    raise typer.Exit(found.exit_code)


def deliver(gate: Gate, summary: Path | None, junit: Path | None) -> None:
    """Write the files that were asked for, and append to GitHub's job summary where there is one.  Raises UserError."""
    from telemetry import gate_text
    from telemetry.slo_commands import write

    if summary is not None:
        write(gate_text.markdown(gate), summary)
    if junit is not None:
        write(gate_text.junit(gate), junit)
    if target := os.environ.get(STEP_SUMMARY):
        try:
            with Path(target).open("a", encoding="utf-8") as file:
                file.write(gate_text.markdown(gate))
        except OSError as problem:
            raise UserError(
                f"cannot be appended to: {problem.strerror}", where=f"${STEP_SUMMARY}", remedy="unset the variable"
            ) from problem


def tell(gate: Gate) -> None:
    """What the comparison with a baseline adds to the report of the run, and the exit code in words."""
    from telemetry.summary import format_seconds, format_share

    if gate.baseline is not None:
        typer.echo(f"\nagainst baseline {gate.baseline[0]} ({', '.join(gate.baseline[1])})")
    for one in gate.changes:
        show = format_share if one.figure == "goodput" else format_seconds
        if one.change is None or one.baseline is None or one.value is None or one.noise is None:
            typer.echo(f"{'WORSE' if one.regressed else '–':<7}{one.figure:<10}{one.note}")
            continue
        unit = "points" if one.figure == "goodput" else "%"
        noise = f"noise {100 * one.noise:.1f} {unit}{', approximate' if one.approximate else ''}"
        mark = "WORSE" if one.regressed else "same"
        moved = f"{show(one.baseline)} -> {show(one.value)} ({100 * one.change:+.1f} {unit}; {noise})"
        typer.echo(f"{mark:<7}{one.figure:<10}{moved}")
    for shift in gate.shifts:
        typer.echo(f"suspicion  {shift.feature} moved: {shift.before} before, {shift.after} now")
    typer.echo(f"gate    {gate.words}: exit code {gate.exit_code}")
