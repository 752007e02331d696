"""``tailspan lab list | run | blind | reveal | proxy``: options in, trials and their scores out.

The engine's twin is handed in by the command line: this folder does not know the engine.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from models.errors import UserError

if TYPE_CHECKING:
    from telemetry.twin import Twin

Ids = Annotated[list[str] | None, typer.Argument(help="Scenarios by id (tailspan lab list), or files.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The first seed; sizes, server, load and times are drawn.")]
Pairs = Annotated[int, typer.Option("--pairs", min=1, max=50, help="Replays of each side, in pairs.")]
Requests = Annotated[int, typer.Option("--requests", min=50, max=100_000, help="Requests of a virtual replay.")]
Root = Annotated[Path, typer.Option("--runs", help="Where the bundles of trials go.")]


def app_of(twin: Callable[[], Twin]) -> typer.Typer:
    """The commands.  twin: called where it is needed, since it loads the engine."""
    app = typer.Typer(no_args_is_help=True, help="Faults with known causes: is the diagnosis right?")

    @app.command("list")
    def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """The scenarios that ship."""
        from loadgen.lab.scenario import shipped

        found = shipped()
        if as_json:
            typer.echo(json.dumps([one.to_dict() for one in found], indent=2))
            return
        for one in found:
            loads = ", ".join(f"{load:g}" for load in one.loads)
            trap = f" (not: {one.trap})" if one.trap else ""
            truth = f"{one.label} · {one.cause}"
            typer.echo(f"{one.id:<5}{truth:<26}{one.title}{trap}; {', '.join(one.ways)}; loads {loads}")

    @app.command("run")
    def run_command(
        scenarios: Ids = None,
        every: Annotated[bool, typer.Option("--all", help="All that can be played this way.")] = False,
        way: Annotated[str, typer.Option("--way", help="virtual, simulated (a server process) or real.")] = "virtual",
        seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Trials of each scenario and load.")] = 5,
        seed: Seed = 0,
        load: Annotated[
            list[float] | None,
            typer.Option("--load", min=0.01, max=20, help="Shares of capacity. [default: its own]"),
        ] = None,
        pairs: Annotated[
            int | None,
            typer.Option(
                "--pairs",
                min=1,
                max=50,
                help="Replays of each side, in pairs. [default: 5, on servers, whose noise is real, 7]",
            ),
        ] = None,
        requests: Requests = 400,
        runs: Root = Path("runs/lab"),
        keep: Annotated[str, typer.Option("--keep", help="Bundles kept: all, wrong or none.")] = "wrong",
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on: trials in RUNS/trials.jsonl are not played again.")
        ] = False,
        markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the matrix to this file.")] = None,
        through_twin: Annotated[
            bool, typer.Option("--twin", help="Explain through the engine's own scheduler (slower).")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Play scenarios, explain each, and score the explanations against the truth."""
        from functools import partial

        from loadgen.lab import matrix
        from loadgen.lab.kept import Kept
        from loadgen.lab.run import PAIRS, chosen, trials
        from telemetry.explain import explain

        asked = chosen(scenarios or [], every=every, way=way)
        known = twin()
        kept = Kept(runs, resume=resume)
        found = []
        try:
            for trial in trials(
                asked,
                known,
                partial(explain, twin=known if through_twin else None),
                runs,
                way=way,
                seeds=range(seed, seed + seeds),
                loads=load,
                pairs=pairs or PAIRS[way],
                requests=requests,
                keep=keep,
                kept=kept,
                through_twin=through_twin,
                say=_say,
            ):
                found.append(trial)
        except KeyboardInterrupt:
            every_one = seeds * sum(len(load or one.loads) for one in asked)
            _say(
                f"interrupted: {len(found)} of {every_one} trials are done and kept in {kept.path}; the one under way "
                "is lost; the same command with --resume goes on"
            )
            raise
        place = {one.id: at for at, one in enumerate(asked)}
        found.sort(key=lambda one: (place[one.scenario], one.load, one.seed))
        if markdown is not None:
            markdown.write_text(matrix.markdown(found) + "\n", encoding="utf-8")
        typer.echo(json.dumps(matrix.to_dict(found), indent=2) if as_json else matrix.text(found))

    @app.command("blind")
    def blind_command(
        seed: Seed = 0,
        pairs: Pairs = 5,
        requests: Requests = 400,
        runs: Root = Path("runs/blind"),
        truth: Annotated[Path, typer.Option("--truth", help="Where the truth is kept: do not look.")] = Path(
            "runs/blind-truth.json"
        ),
    ) -> None:
        """Inject a fault without telling which, for training people on call."""
        from loadgen.lab.blind import inject

        name, _, _ = inject(twin(), runs, truth, seed=seed, pairs=pairs, requests=requests)
        here = f"TAILSPAN_RUNS={shlex.quote(str(runs / name))} tailspan"
        typer.echo(f"trial {name}: something is different in B, or nothing is")
        typer.echo(f"look:  {here} compare {name}")
        typer.echo(f"why:   {here} explain {name}")
        typer.echo(f"see:   {here} page")
        typer.echo(f"say:   tailspan lab reveal {name} --truth {shlex.quote(str(truth))} --label LABEL --cause CAUSE")

    @app.command("reveal")
    def reveal_command(
        trial: Annotated[str, typer.Argument(help="The trial's name.")],
        label: Annotated[str, typer.Option("--label", help="late, dropped, wrong, invalid or none.")],
        cause: Annotated[str, typer.Option("--cause", help="A cause as tailspan lab list prints it.")],
        truth: Annotated[Path, typer.Option("--truth", help="Where the truth was kept.")] = Path(
            "runs/blind-truth.json"
        ),
    ) -> None:
        """What it was, after you have said what you think."""
        from loadgen.lab.blind import reveal

        typer.echo(reveal(trial, (label, cause), truth))

    @app.command("proxy")
    def proxy_command(
        target: Annotated[str, typer.Option("--target", help="Server, or several separated by commas.")],
        fault: Annotated[list[str], typer.Option("--fault", metavar="KIND[:SHARE[:SIZE]]", help="May be repeated.")],
        port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Where it listens. [default: any]")] = 0,
        seed: Seed = 0,
        replica: Annotated[int | None, typer.Option("--replica", min=0, help="Only answers of this target.")] = None,
    ) -> None:
        """Stand in front of any server and spoil its answers until Ctrl-C."""
        import asyncio

        from loadgen.lab.proxy import Proxy, parse
        from loadgen.plan import checked_targets

        targets = list(checked_targets(target))
        if replica is not None and replica >= len(targets):
            raise UserError(f"replica {replica} of {len(targets)} targets", where="--replica")
        faults = tuple(parse(text, seed, replica) for text in fault)

        async def serve() -> None:
            async with Proxy(targets, faults, port) as proxy:
                typer.echo(f"{proxy.url} -> {', '.join(targets)}")
                await asyncio.Event().wait()

        asyncio.run(serve())

    return app


def _say(text: str, **_: Any) -> None:
    typer.echo(text, err=True)
