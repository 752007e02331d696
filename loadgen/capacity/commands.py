"""`tailspan capacity`: the options of `tailspan run`, those of a search, and where the result goes.

Its parameters are its own and those of `run`, so that a plan means the same in both.  The twin is handed in by
``tailspan.py`` (``capacity_command``), since the generator knows no engine.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from loadgen.commands import options_of, run_command, was_given
from models.errors import UserError
from models.wording import several

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.capacity.answer import Answer, Terms
    from loadgen.capacity.group import Group
    from loadgen.capacity.probe import Probe
    from loadgen.capacity.sweep import Sweep
    from loadgen.options import Options
    from telemetry.twin import Twin, TwinSetting

#: Parameters of `run` that make no sense here: a search makes its own runs, seeds and rates.
NOT_HERE: Final = (
    "context", "repeats", "web_ui", "baseline", "summary", "junit", "dry_run", "name", "metrics_port", "linger",
    "as_json", "salt", "remote_workers", "bind", "against", "find",
)  # fmt: skip
#: Of --virtual: an engine is simulated, so there is nothing to send to.
SENDING: Final = (
    "target", "workers", "header", "api_key_env", "proxy", "ca_file", "verify_tls", "max_concurrency", "fit",
    "served_model", "otlp_port", "api", "temperature", "exact_output", "keep_text", "connect_timeout",
    "first_token_timeout", "total_timeout",
)  # fmt: skip
ENGINE: Final = ("device", "weights", "max_batch", "token_budget", "kv_blocks", "sim_fit", "sweep")


def capacity_command(twin: Callable[[], Twin]) -> Callable[..., int]:
    """The command, with the twin that --virtual asks for."""

    def command(
        context: typer.Context,
        virtual: Annotated[
            bool, typer.Option("--virtual", help="Search in virtual time, on the engine's twin: --model and --device.")
        ] = False,
        device: Annotated[str | None, typer.Option(help="virtual: a100, h100, h200, l4 or cpu.")] = None,
        weights: Annotated[str, typer.Option(help="virtual: precision of the weights [bf16].")] = "auto",
        max_batch: Annotated[int, typer.Option(min=1, help="virtual: most requests that run at once.")] = 1024,
        token_budget: Annotated[int, typer.Option(min=1, help="virtual: most tokens computed in a step.")] = 8192,
        kv_blocks: Annotated[
            int | None, typer.Option(min=1, help="virtual: pages of 16 tokens in the KV pool [from memory].")
        ] = None,
        sim_fit: Annotated[Path | None, typer.Option(help="virtual: step times fitted to a real engine.")] = None,
        sweep: Annotated[
            str | None,
            typer.Option(
                metavar="KNOB=V1,V2",
                help="virtual: a search for each value of batch, token-budget or "
                "weight-bits; the latency-cost frontier.",
            ),
        ] = None,
        group: Annotated[
            str | None, typer.Option(help="Folder of this search under --runs; one that is there is gone on with.")
        ] = None,
        start_rate: Annotated[
            float | None,
            typer.Option(help="Requests/s to begin with [the plan's; virtual: half the iron law's]."),
        ] = None,
        precision: Annotated[float, typer.Option(help="Half of the 90 % interval, as a share.")] = 0.05,
        max_runs: Annotated[int, typer.Option(help="Most runs, 3 to 12.")] = 12,
        device_hour: Annotated[float | None, typer.Option(metavar="PRICE", help="Of one device for an hour.")] = None,
        devices: Annotated[int, typer.Option(help="Devices of one replica.")] = 1,
        user_requests: Annotated[float, typer.Option(help="Requests an hour of one active person: assumed.")] = 12.0,
        peak: Annotated[float | None, typer.Option(metavar="RATE", help="Requests/s to size for.")] = None,
        volume: Annotated[
            float | None, typer.Option(metavar="REQUESTS", help="Requests a day: what a millisecond of each costs.")
        ] = None,
        output: Annotated[Path | None, typer.Option("-o", "--output", help="Write Markdown to this file.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    ) -> int:
        """Find the highest rate that holds an SLO, and what it costs."""
        from rich.console import Console

        from loadgen.capacity.answer import Terms
        from loadgen.capacity.search import Bounds
        from loadgen.capacity.sweep import Sweep
        from telemetry.twin import TwinSetting

        own = tuple(inspect.signature(command).parameters)
        options = options_of(context, own)
        check_mode(context, virtual=virtual, device=device)
        Bounds(1.0 if start_rate is None else start_rate, precision, max_runs)
        terms = Terms(device_hour, devices, user_requests, peak, volume)
        setting = None
        if virtual:
            assert device is not None
            setting = TwinSetting(
                model=options.model, device=device, dtype=weights, max_batch=max_batch, token_budget=token_budget,
                kv_blocks=kv_blocks, prefix_cache=False, fit=None if sim_fit is None else read_fit(sim_fit),
            )  # fmt: skip
        asked = Asked(options, setting, twin(), group, start_rate, precision, max_runs, terms, Console(stderr=True))
        if sweep is not None:
            return _sweep(asked, Sweep.parse(sweep), output, as_json=as_json)
        return _one(asked, output, as_json=as_json)

    return with_plan_options(command)


def with_plan_options(command: Callable[..., int]) -> Callable[..., int]:
    """The command with the parameters of `tailspan run` behind its own."""
    own = inspect.signature(command).parameters
    theirs = inspect.signature(run_command).parameters
    added = [one for name, one in theirs.items() if name not in own and name not in NOT_HERE]

    def wrapped(**given: Any) -> int:
        return command(**{name: value for name, value in given.items() if name in own})

    hints = {**get_type_hints(run_command, include_extras=True), **get_type_hints(command, include_extras=True)}
    merged = sorted([*own.values(), *added], key=lambda one: one.name != "context")
    parameters = [one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY) for one in merged]
    wrapped.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    wrapped.__doc__ = command.__doc__
    return wrapped


def check_mode(context: typer.Context, *, virtual: bool, device: str | None) -> None:
    """Raises UserError for an option that the chosen way would not heed."""
    for name in SENDING if virtual else ENGINE:
        if was_given(context, name):
            option = "--" + name.replace("_", "-")
            if virtual:
                raise UserError("in virtual time nothing is sent", where=option, remedy="leave it out, or --virtual")
            remedy = "add --virtual --model … --device …"
            if name == "sweep":
                remedy += "; of a server, search each of its settings: tailspan capacity --group NAME"
            raise UserError("this is for the engine's twin", where=option, remedy=remedy)
    if virtual and device is None:
        raise UserError("no device is named", where="--virtual", remedy="name one, for example --device h100")


def read_fit(path: Path) -> dict[str, Any]:
    """A file of ``python -m engine.step_fit``.  Raises UserError."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not JSON"
        raise UserError(
            f"the fit cannot be read: {reason}",
            where=str(path),
            remedy="python -m engine.step_fit RUN -o FILE",
        ) from None
    if not isinstance(found, dict):
        raise UserError("no fit: it is no object with keys", where=str(path), remedy="python -m engine.step_fit RUN")
    return found


class Asked:
    """All that one search is asked."""

    def __init__(
        self,
        options: Options,
        setting: TwinSetting | None,
        twin: Twin,
        group: str | None,
        start_rate: float | None,
        precision: float,
        most_runs: int,
        terms: Terms,
        console: Console,
    ) -> None:
        self.options, self.setting, self.twin, self.group = options, setting, twin, group
        self.start_rate, self.precision, self.most_runs = start_rate, precision, most_runs
        self.terms, self.console = terms, console

    def question(self) -> dict[str, Any]:
        """What must be the same for a search to go on."""
        from dataclasses import asdict

        left_out = ("command", "runs", "name", "otlp_port")
        options = {key: value for key, value in asdict(self.options).items() if key not in left_out}
        engine = {} if self.setting is None else {"engine": asdict(self.setting)}
        return {**options, **engine, "start_rate": self.start_rate, "precision": self.precision}


def _one(asked: Asked, output: Path | None, *, as_json: bool) -> int:
    from loadgen.capacity.group import Group
    from loadgen.capacity.text import blocks, markdown, render
    from telemetry.terminal import show

    group = Group.open(asked.group, asked.options.runs, asked.question(), asked.options.command)
    found = search_in(asked, group, asked.setting)
    parts = list(blocks(found))
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(render(parts))
        typer.echo(f"search  {group.path}")
    if output is not None:  # last: what was found is printed, whatever becomes of the file
        write(markdown(parts), output)
    return int(found.exit_code)


def _sweep(asked: Asked, sweep: Sweep, output: Path | None, *, as_json: bool) -> int:
    from loadgen.capacity.group import Group
    from loadgen.capacity.sweep import frontier
    from loadgen.capacity.text import blocks, frontier_blocks, frontier_plot, headline, markdown, render
    from telemetry.names import EXIT_OK, EXIT_PRECEDENCE
    from telemetry.terminal import show

    base = asked.setting
    assert base is not None
    whole = Group.open(asked.group, asked.options.runs, asked.question() | {"sweep": sweep.knob}, asked.options.command)

    def search(value: int) -> Answer:
        setting = sweep.setting(base, value)
        one = Asked(
            asked.options, setting, asked.twin, f"{sweep.knob}-{value}", asked.start_rate, asked.precision,
            asked.most_runs, asked.terms, asked.console,
        )  # fmt: skip
        group = Group.open(one.group, str(whole.path), one.question(), asked.options.command)
        found = search_in(one, group, setting)
        asked.console.print(f"{sweep.knob} {value}: {headline(found)}", highlight=False, markup=False, soft_wrap=True)
        return found

    found = frontier(sweep, search)
    parts = list(frontier_blocks(found))
    plot = frontier_plot(found)
    whole.answer = found.to_dict()
    whole.save()
    if output is not None:
        details = "\n".join(markdown(list(blocks(one))) for one in found.answers)
        write(markdown(parts) + f"\n```text\n{plot}\n```\n\n{details}", output)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(render(parts))
        typer.echo(plot)
        typer.echo(f"search  {whole.path}")
    codes = {one.exit_code for one in found.answers}
    return next((code for code in EXIT_PRECEDENCE if code in codes), EXIT_OK)


def search_in(asked: Asked, group: Group, setting: TwinSetting | None) -> Answer:
    """Search, or go on with it, and answer."""
    from loadgen.capacity.answer import answer
    from loadgen.capacity.search import Bounds
    from loadgen.capacity.seek import seek

    probe, shape, replicas = _probe(asked, group, setting)
    start = asked.start_rate or probe.first_rate()
    bounds = Bounds(start, asked.precision, asked.most_runs)
    try:
        seek(probe, group, bounds, asked.console)
    except KeyboardInterrupt:
        asked.console.print(
            f"interrupted after {several(len(group.points), 'run')}; "
            f"go on with the same command and --group {group.path.name}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        raise
    found = answer(
        group.points, bounds, asked.terms, probe.slo, group.path, probe.limits, probe.cost, probe.utilisation, shape,
        replicas,
    )  # fmt: skip
    group.answer = found.to_dict()
    group.save()
    return found


def _probe(asked: Asked, group: Group, setting: TwinSetting | None) -> tuple[Probe, Any, int]:
    """What runs a rate; the model's shape; replicas behind the targets."""
    from loadgen.capacity.server import ServerProbe
    from loadgen.capacity.virtual import VirtualProbe

    if setting is not None:
        virtual = VirtualProbe(asked.options, asked.twin, setting, group.path, asked.console)
        return virtual, virtual.cost.shape, 1
    from loadgen.plan import checked_targets
    from loadgen.prepare import model_reference
    from models.store import load_reference

    probe = ServerProbe(asked.options, group.path, asked.console, group.begun)
    if group.begun is None:
        group.begun = probe.begun
        group.save()
    shape = load_reference(model_reference(asked.options.model)).shape
    return probe, shape, len(set(checked_targets(asked.options.targets)))


def write(text: str, path: Path) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        raise UserError(
            f"cannot be written: {problem.strerror}", where=str(path), remedy="give a file in a folder you may write to"
        ) from None
