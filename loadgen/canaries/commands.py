"""``tailspan canaries record | check``: is what a server says still right?

Owns the options and the output; the work is in ``record`` and ``check``.  Exit codes: 0 same, 1 broken, 2 numeric drift
(a regression that may be meant), 4 usage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from models.errors import UserError
from models.wording import several

app = typer.Typer(no_args_is_help=True, help="Ask questions with known answers: is what a server says still right?")

Target = Annotated[str, typer.Option("--target", help="Base URL of the server")]
Model = Annotated[str | None, typer.Option("--model", help="Model name to send [default: what is served]")]
Header = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME:VALUE", help="Extra header; write secrets as $VARIABLE")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key-env", metavar="VARIABLE", help="Variable that holds the API key")
]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, max=256, help="Requests at a time, under load")]


@app.command("record")
def record_command(
    target: Target,
    out: Annotated[Path, typer.Option("-o", "--out", help="The canary file to write")] = Path("canaries.json"),
    model: Model = None,
    runs: Annotated[int, typer.Option("--runs", min=2, max=100, help="Baseline runs, half idle and half loaded")] = 20,
    tokens: Annotated[int, typer.Option("--tokens", min=8, max=64, help="Tokens of a golden answer")] = 32,
    questions: Annotated[str, typer.Option("--questions", help="small (below 1B parameters) or large")] = "small",
    concurrency: Concurrency = 8,
    header: Header = None,
    api_key_env: ApiKey = None,
) -> None:
    """Record canaries on a server that you trust."""
    from loadgen.canaries.record import record
    from telemetry.question_sets import SETS

    if questions not in SETS:
        raise UserError(f"no question set {questions!r}", where="--questions", remedy=f"one of: {', '.join(SETS)}")
    if out.is_dir():
        raise UserError("a folder", where=str(out), remedy="name a file with -o")
    client = _client(target, model, header, api_key_env)
    made = record(client, runs=runs, tokens=tokens, questions=questions, concurrency=concurrency, say=_say)
    made.write(out)
    for one in made.left:
        typer.echo(f"left out  {one.id}: {one.reason}")
    lengths = [len(one.tokens) for one in made.goldens]
    typer.echo(
        f"{out}: {several(len(made.goldens), 'golden')} of {min(lengths)} to {max(lengths)} tokens, "
        f"{len(made.left)} left out, "
        f"noise {made.noise:.2g} nats, {sum(made.scores.values())} of {len(made.scores)} questions right"
    )


@app.command("check")
def check_command(
    target: Target,
    file: Annotated[Path, typer.Option("--canaries", help="The recorded canary file")] = Path("canaries.json"),
    model: Model = None,
    concurrency: Concurrency = 8,
    header: Header = None,
    api_key_env: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Check a server against recorded canaries: same, numeric drift or broken."""
    from loadgen.canaries.check import check
    from loadgen.canaries.file import CanaryFile
    from loadgen.canaries.verdict import BROKEN, NUMERIC
    from telemetry import names

    _only_target(target)
    recorded = CanaryFile.read(file)
    found = check(_client(target, model, header, api_key_env), recorded, concurrency=concurrency, say=_say)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        for one in found.findings:
            typer.echo(f"{one.verdict:<14}{one.said}")
        typer.echo(f"verdict       {found.verdict}")
    code = {BROKEN: names.EXIT_SLO_BROKEN, NUMERIC: names.EXIT_REGRESSION}.get(found.verdict, names.EXIT_OK)
    raise typer.Exit(code)


def _client(target: str, model: str | None, header: list[str] | None, api_key_env: str | None) -> Any:
    """The client of one target, whose model is asked for where none was named.  Raises UserError."""
    from loadgen import preflight
    from loadgen.canaries.client import Client
    from loadgen.plan import checked_headers, expanded, from_environment

    url = _only_target(target)
    headers = {name: expanded(name, value) for name, value in checked_headers(header or []).items()}
    if api_key_env:
        headers["Authorization"] = f"Bearer {from_environment(api_key_env, '--api-key-env')}"
    found = preflight.look(url, headers)
    if not found.reachable:
        raise UserError(found.detail, where=url, remedy="start the server first")
    name = model or (found.models[0] if found.models else None)
    if name is None:
        raise UserError("the server names no model", where=url, remedy="name it by --model")
    return Client(url, name, headers)


def _only_target(text: str) -> str:
    """The base URL of the one server.  Raises UserError."""
    from loadgen.plan import checked_targets

    targets = checked_targets(text)
    if len(targets) != 1:
        raise UserError(f"{len(targets)} targets", where="--target", remedy="check one replica at a time")
    return targets[0]


def _say(text: str) -> None:
    typer.echo(text, err=True)
