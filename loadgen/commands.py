"""`tailspan run`: options in, `loadgen.run` called, the result printed.

Results go to stdout (a table, or JSON with --json), the course of things to stderr.  Heavy modules are imported in the
commands, so that `tailspan --help` stays fast.  Exit codes are those of telemetry.names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loadgen.traces.commands import (
    BlockSize,
    Columns,
    Failures,
    Format,
    Restart,
    Seed,
    TimeUnit,
    choices_of,
)
from models.errors import UserError
from models.wording import several

if TYPE_CHECKING:
    from loadgen.options import Options
    from loadgen.prepare import Prepared

SAMPLE_ROWS: Final = 5  # requests that a dry run prints


#: Parameter of the command -> option of loadgen.options, where the names differ.
OPTION_OF: Final = {
    "target": "targets",
    "dequantise": "dequantise_s",
    "connect_timeout": "connect_timeout_s",
    "first_token_timeout": "first_token_timeout_s",
    "total_timeout": "total_timeout_s",
    "header": "headers",
    "linger": "linger_s",
}
#: Parameters that say how a trace is read, in the order of choices_of.
READING: Final = ("trace_format", "columns", "time_unit", "block_size", "failures", "restart", "trace_seed")
#: Parameters that are no option by themselves.
NOT_OPTIONS: Final = (
    "plan", "window", "start", "duration", "arrivals", "trace_format", "columns", "time_unit", "block_size", "failures",
    "restart", "trace_seed", "as_json", "dry_run", "baseline", "summary", "junit",
    "against", "find",
)  # fmt: skip


def run_command(
    context: typer.Context,
    plan: Annotated[str | None, typer.Argument(help="A plan in YAML, or one that ships; options given win.")] = None,
    target: Annotated[str, typer.Option(help="Base URL of the server, or several separated by commas.")] = "",
    trace: Annotated[str, typer.Option(help="A known trace (tailspan traces list) or a file.")] = "azure-2023-conv",
    slo: Annotated[str, typer.Option(help="SLO file in YAML, or a preset (tailspan slo list).")] = "chat",
    model: Annotated[str, typer.Option(help="Reference model: its tokenizer and template count tokens.")] = "smollm2",
    served_model: Annotated[str | None, typer.Option(help="Model name to send. [default: what is served]")] = None,
    window: Annotated[str | None, typer.Option(metavar="START:END", help="Part of the trace, in its seconds.")] = None,
    start: Annotated[float | None, typer.Option(help="Start in the trace, seconds. [default: 0]")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of the trace. [default: to its end]")] = None,
    speed: Annotated[float, typer.Option(help="Time scale: 1.5 replays 1.5 times as fast.")] = 1.0,
    rate_scale: Annotated[
        float | None, typer.Option(help="Below 1: seeded thinning. Above: superposition. [default: 1]")
    ] = None,
    length_scale: Annotated[float | None, typer.Option(help="Factor on input and output tokens. [default: 1]")] = None,
    fit: Annotated[
        float | None, typer.Option(metavar="UTILISATION", help="Measure the target, then scale to this share of it.")
    ] = None,
    over_limit: Annotated[str, typer.Option(help="Requests beyond the context: skip, clip or fail.")] = "skip",
    dequantise: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Spread arrivals over the tick of the recorder's clock.")
    ] = None,
    loop: Annotated[int, typer.Option(help="How often the window is sent, one after the other.")] = 1,
    arrivals: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Other times: poisson:rate=5, gamma:rate=5,cv=3, ramp:from=1,to=9 …"),
    ] = None,
    trace_format: Format = None,
    columns: Columns = None,
    time_unit: TimeUnit = None,
    block_size: BlockSize = None,
    failures: Failures = "drop",
    restart: Restart = "fail",
    trace_seed: Seed = 0,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes/--no-share-prefixes", help="Prompts begin alike where the trace says so.")
    ] = True,
    api: Annotated[str, typer.Option(help="chat, completions or responses.")] = "chat",
    workers: Annotated[int, typer.Option(help="Sender processes here; 0 with --remote-workers.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of thinning, texts and sampling.")] = 0,
    salt: Annotated[
        str | None,
        typer.Option(
            "--reuse-prompts",
            "--salt",
            help="Salt of a run, to send its prompts again (meets the cache). [default: the run's id]",
        ),
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Limit in flight; the run is then not open loop.")] = None,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to connect.")] = 10.0,
    first_token_timeout: Annotated[float, typer.Option(help="Seconds from the send to the first token.")] = 120.0,
    total_timeout: Annotated[float, typer.Option(help="Seconds from the send to the end.")] = 600.0,
    keep_text: Annotated[str, typer.Option(help="Texts kept in the bundle: none, wrong or all.")] = "wrong",
    canaries: Annotated[
        str | None, typer.Option(metavar="FILE", help="Mix in canaries of this file (tailspan canaries record).")
    ] = None,
    canary_share: Annotated[float, typer.Option(help="Share of the requests that are canaries.")] = 0.02,
    exact_output: Annotated[
        bool, typer.Option("--exact-output/--no-exact-output", help="Send min_tokens and ignore_eos (vLLM's).")
    ] = True,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the requests.")] = 1.0,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Extra header; write secrets as $VARIABLE.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable that holds the API key.")
    ] = None,
    proxy: Annotated[str | None, typer.Option(metavar="URL", help="HTTP proxy; its password as $VARIABLE.")] = None,
    ca_file: Annotated[str | None, typer.Option(metavar="PEM", help="Certificates to trust, not the system's.")] = None,
    verify_tls: Annotated[
        bool, typer.Option("--verify-tls/--no-verify-tls", help="Check the target's certificate.")
    ] = True,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Run it so often, each with its own prompts.")] = 1,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Send each repeat to this server too (A B A B …), and compare.")
    ] = None,
    find: Annotated[
        float | None,
        typer.Option(metavar="CHANGE", help="With --against: as many pairs as find a change of 0.1 = 10 % with 95 %."),
    ] = None,
    otlp_port: Annotated[int, typer.Option(min=0, max=65535, help="Where spans are received (OTLP/HTTP).")] = 4318,
    listen: Annotated[
        str, typer.Option(metavar="HOST", help="Address on which spans are received and /metrics is served.")
    ] = "127.0.0.1",
    forward_spans: Annotated[
        str | None, typer.Option(metavar="URL", help="OTLP/HTTP collector that gets a copy of every span.")
    ] = None,
    runs: Annotated[str | None, typer.Option(help="Folder of run bundles. [default: $TAILSPAN_RUNS or runs]")] = None,
    name: Annotated[str | None, typer.Option(help="A name for this run, kept in its manifest.")] = None,
    web_ui: Annotated[bool, typer.Option("--web-ui", help="Show Locust's web page, which can stop it.")] = False,
    baseline: Annotated[str | None, typer.Option(help="Compare with this baseline, or with a run.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Write Markdown for a pull request to this file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    remote_workers: Annotated[
        int,
        typer.Option(min=0, max=256, help="Workers on other machines, beside --workers: tailspan worker --master …"),
    ] = 0,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the master listens for them.")
    ] = "127.0.0.1:5557",
    unencrypted: Annotated[
        bool, typer.Option("--unencrypted", help="Let --bind be an address of a network: all goes in plain text.")
    ] = False,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where the master serves /metrics. [default: a free port]")
    ] = 0,
    linger: Annotated[float, typer.Option(help="Seconds for which /metrics stays after the end.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent; send nothing of it.")] = False,
) -> int:
    """Replay a trace against a server, open loop, and judge every request."""
    from rich.console import Console

    from loadgen.pairs import Pairs
    from loadgen.pairs import tell as tell_pairs
    from loadgen.prepare import prepare
    from loadgen.run import run
    from telemetry.baseline import Load, require_same_load, resolve_baseline
    from telemetry.gate import gate
    from telemetry.gate_command import deliver, tell
    from telemetry.names import EXIT_INTERRUPTED, EXIT_OK, EXIT_PRECEDENCE
    from telemetry.terminal import render, show

    options = options_of(context)
    if (options.repeats > 1 or against is not None) and (summary or junit):
        raise UserError(
            "several runs would write one file",
            where="--summary" if summary else "--junit",
            remedy="leave it out, and write one for each with: tailspan gate RUN",
        )
    # a baseline that cannot be had is refused before any load
    others = resolve_baseline(baseline, Path(options.runs) if options.runs else None) if baseline else []
    if find is not None and against is None:
        raise UserError("has no other side", where="--find", remedy="name the other server with --against")
    pairs = Pairs(options, against, find) if against is not None else None
    turns = pairs.turns() if pairs is not None else ((options, None) for _ in range(options.repeats))
    several = options.repeats > 1 or pairs is not None
    codes: set[int] = set()
    for repeat, (asked, pairing) in enumerate(turns):
        prepared = prepare(asked, Console(stderr=True))
        load = Load(prepared.trace.sha256, len(prepared.schedule), prepared.schedule.length_s)
        require_same_load(others, load, baseline)
        if dry_run:
            print_plan(prepared, as_json=as_json)
            return EXIT_OK
        if pairs is not None and pairing is not None:
            pairs.prepared(prepared)
            repeat = pairing.pair
        bundle, _ = run(asked, prepared, Console(stderr=True), repeat=repeat, pairing=pairing)
        found = gate(bundle, prepared.objective, baseline, others)
        if as_json:
            print(json.dumps(found.to_dict(), indent=None if several else 2))
        else:
            show(render(found.summary))
            if others:
                tell(found)
        deliver(found, summary, junit)  # last: what was found is printed, whatever becomes of the files
        codes.add(int(found.exit_code))
        if EXIT_INTERRUPTED in codes:
            return EXIT_INTERRUPTED
        if pairs is not None and pairing is not None:
            pairs.ended(pairing, bundle)
    compared = pairs.comparison() if pairs is not None else None
    if pairs is not None and compared is not None:
        codes.add(tell_pairs(pairs, compared, as_json=as_json))
    return next((code for code in EXIT_PRECEDENCE if code in codes), EXIT_OK)


def options_of(context: typer.Context, own: Sequence[str] = ()) -> Options:
    """What the plan and the command line ask for together.  own: parameters of the command that are no option of a run.

    Raises UserError.
    """
    from loadgen.arrivals import ArrivalModel
    from loadgen.options import Options
    from loadgen.plan_file import read

    asked = context.params
    given = {name: value for name, value in asked.items() if was_given(context, name) and name not in own}
    values = read(asked["plan"]) if asked["plan"] is not None else {}
    values |= {OPTION_OF.get(name, name): value for name, value in given.items() if name not in NOT_OPTIONS}
    if given.keys() & {"window", "start", "duration"}:
        values["start_s"], values["duration_s"] = time_window(asked["window"], asked["start"], asked["duration"])
    if asked["arrivals"] is not None:
        values["arrivals"] = ArrivalModel.parse(asked["arrivals"], "--arrivals")
    if given.keys() & set(READING):
        values["choices"] = choices_of(*(asked[name] for name in READING))
    return Options(**values, command=" ".join(["tailspan", *sys.argv[1:]]))


def was_given(context: typer.Context, name: str) -> bool:
    """Was this parameter set on the command line?  Then it wins over the plan."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def time_window(window: str | None, start: float | None, duration: float | None) -> tuple[float, float | None]:
    """Start and duration in seconds of trace time from --window, or from --start and --duration.  Raises UserError."""
    if window is None:
        return start or 0.0, duration
    if start is not None or duration is not None:
        raise UserError("given together with --start or --duration", where="--window", remedy="use one or the other")
    first, colon, last = window.partition(":")
    try:
        start_s = float(first) if first else 0.0
        end_s = float(last) if last else None
    except ValueError:
        colon = ""
    if not colon:
        raise UserError(
            f"{window!r} is not a window", where="--window", remedy="write seconds as START:END, e.g. 60:120"
        )
    if end_s is not None and end_s <= start_s:
        raise UserError(f"{window!r} ends before it starts", where="--window", remedy="write START:END, e.g. 60:120")
    return start_s, None if end_s is None else end_s - start_s


def print_plan(prepared: Prepared, *, as_json: bool) -> None:
    """What would be sent: the transforms, and the first requests with their real bodies."""
    from loadgen.plan import calls_of

    plan = replace(prepared.plan, salt=prepared.plan.salt or "dry run", run_id="dry-run")
    calls = calls_of(plan, prepared.schedule, prepared.reference)
    first = [calls.at(index) for index in range(min(SAMPLE_ROWS, len(prepared.schedule)))]
    if as_json:
        rows = [
            {
                "index": call.index,
                "trace_row": call.trace_row,
                "class": call.klass,
                "intended_s": call.intended_s,
                "input_tokens": call.input_tokens,
                "output_tokens": call.expected_output_tokens,
                "body": json.loads(call.body),
            }
            for call in first
        ]
        print(json.dumps({"plan": plan.to_dict(), "transforms": prepared.records, "first": rows}, indent=2))
        return
    for record in prepared.records:
        print(
            "  ".join([f"{record['name']:<12}", *(f"{key} {value}" for key, value in record.items() if key != "name")])
        )
    print(f"\nthe first {len(first)} of {several(len(prepared.schedule), 'request')} to {', '.join(plan.targets)}:")
    for call in first:
        text = prompt_text(json.loads(call.body))
        lengths = f"in {call.input_tokens:>6,}  out {call.expected_output_tokens:>5,}  {call.klass}"
        print(f"  {call.intended_s:9.4f} s  {lengths}  {text[:70]}{'…' if len(text) > 70 else ''}")


def prompt_text(body: dict[str, Any]) -> str:
    """What the user says last in a body of any API."""
    messages = body.get("messages") or body.get("input")
    return str(messages[-1]["content"] if messages else body["prompt"])
