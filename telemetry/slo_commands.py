"""``tailspan slo list | check | explain | export | import``: SLO files without a run.

Owns the options and the output of these commands; what they say comes from ``slo``, ``slo_explain``, ``openslo`` and
``prometheus_rules``.  Heavy imports stay inside the functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from models.errors import UserError
from models.wording import several

app = typer.Typer(help="Check, explain and convert SLO files.", no_args_is_help=True)

Reference = Annotated[str, typer.Argument(help="An SLO file in YAML, or a preset (tailspan slo list)")]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Write to this file instead of stdout")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]
FORMATS: Final = ("openslo", "prometheus")


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """The presets that ship with tailspan."""
    from telemetry.slo import load, presets

    found = [load(name) for name in presets()]
    if as_json:
        typer.echo(
            json.dumps([{"name": s.name, "description": s.description, "file": s.where} for s in found], indent=2)
        )
        return
    for one in found:
        typer.echo(f"{one.name:<8}{one.description}\n        {one.rule.words(one.objectives)}")


@app.command("check")
def check_command(
    files: Annotated[list[str], typer.Argument(help="SLO files or presets")], as_json: AsJson = False
) -> None:
    """Is each file sound?  Exit code 4 with the line of every file's first mistake."""
    from telemetry.slo import load

    found = []
    problems = []
    for name in files:
        try:
            one = load(name)
        except UserError as problem:
            problems.append(problem)
            found.append({"file": name, "ok": False, "error": str(problem)})
            continue
        found.append({"file": name, "ok": True, "name": one.name, "hash": one.hash})
        if not as_json:
            count = f"{several(len(one.classes), 'class', 'classes')}, {several(len(one.objectives), 'objective')}"
            typer.echo(f"ok    {name}: {one.name}, {count}, hash {one.hash[:12]}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    if problems:
        for earlier in problems[:-1]:
            typer.echo(f"error: {earlier}", err=True)
        raise problems[-1]


@app.command("explain")
def explain_command(
    slo: Reference = "chat",
    request: Annotated[
        list[str] | None, typer.Option("--request", metavar="IN:OUT", help="Tokens in and out of an example request")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What the file asks for, in words: deadlines of example requests, samples, budgets, client timeouts."""
    from telemetry.slo import load
    from telemetry.slo_explain import EXAMPLES, explain

    found = explain(load(slo), tuple(_example(text) for text in request) if request else EXAMPLES)
    typer.echo(json.dumps(found.facts, indent=2) if as_json else "\n".join(found.lines))


@app.command("export")
def export_command(
    slo: Reference = "chat",
    to: Annotated[str, typer.Option("--to", help="openslo (v1 documents) or prometheus (rules)")] = "openslo",
    out: Out = None,
) -> None:
    """The SLO as OpenSLO v1 documents, or as Prometheus recording and burn-rate rules."""
    from telemetry.openslo import to_openslo
    from telemetry.prometheus_rules import text
    from telemetry.slo import load

    if to not in FORMATS:
        raise UserError(f"{to!r} is not a format", where="--to", remedy=f"one of: {', '.join(FORMATS)}")
    policy = load(slo)
    write(to_openslo(policy) if to == "openslo" else text(policy), out)


@app.command("import")
def import_command(
    file: Annotated[str, typer.Argument(help="OpenSLO v1 documents in YAML")],
    out: Out = None,
) -> None:
    """An SLO file of ours from OpenSLO v1 documents."""
    from telemetry.openslo import import_file

    write(import_file(file), out)


def write(text: str, out: Path | None) -> None:
    """Text to a file, or to stdout.  UserError where the file cannot be written."""
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UserError(
            f"cannot be written: {problem.strerror}", where=str(out), remedy="give a file in a folder you may write to"
        ) from problem


def _example(text: str) -> tuple[int, int]:
    inputs, colon, outputs = text.partition(":")
    if not colon or not (inputs.isascii() and inputs.isdigit() and outputs.isascii() and outputs.isdigit()):
        raise UserError(f"{text!r} is not IN:OUT", where="--request", remedy="write tokens, such as 1000:200")
    return int(inputs), int(outputs)
