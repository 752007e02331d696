"""`tailspan run`: options in, `loadgen.run` called, the result printed.

Results go to stdout (a table, or JSON with --json), the course of things to stderr.  Heavy modules are imported in the
commands, so that `tailspan --help` stays fast.  Exit codes are those of telemetry.names.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from loadgen.run import Prepared

SAMPLE_ROWS = 5  # requests that a dry run prints


def run_command(
    target: Annotated[str, typer.Option(help="Base URL of the server, or several separated by commas.")],
    trace: Annotated[str, typer.Option(help="A known trace (tailspan traces list) or a file.")] = "azure-2023-conv",
    slo: Annotated[str, typer.Option(help="SLO file in YAML, or a preset: chat, demo.")] = "chat",
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
        str | None, typer.Option(metavar="MODEL", help="Other times: poisson:rate=5, gamma:rate=5,cv=3, ramp:from=1,to=9 …")
    ] = None,
    trace_format: Format = None,
    columns: Columns = None,
    time_unit: TimeUnit = None,
    block_size: BlockSize = None,
    failures: Failures = "drop",
    restart: Restart = "fail",
    trace_seed: Seed = 0,
    workers: Annotated[int, typer.Option(help="Sender processes.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of thinning, texts and sampling.")] = 0,
    salt: Annotated[
        str | None, typer.Option(help="Repeat the prompts of a run (meets the prefix cache). [default: the run's id]")
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Limit in flight; the run is then not open loop.")] = None,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to connect.")] = 10.0,
    first_token_timeout: Annotated[float, typer.Option(help="Seconds from the send to the first token.")] = 120.0,
    total_timeout: Annotated[float, typer.Option(help="Seconds from the send to the end.")] = 600.0,
    keep_text: Annotated[str, typer.Option(help="Texts kept in the bundle: none, wrong or all.")] = "wrong",
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
    otlp_port: Annotated[int, typer.Option(min=0, max=65535, help="Where spans are received (OTLP/HTTP).")] = 4318,
    runs: Annotated[str | None, typer.Option(help="Folder of run bundles. [default: $TAILSPAN_RUNS or runs]")] = None,
    name: Annotated[str | None, typer.Option(help="A name for this run, kept in its manifest.")] = None,
    web_ui: Annotated[bool, typer.Option("--web-ui", help="Show Locust's web page, which can stop it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent; send nothing of it.")] = False,
) -> int:
    """Replay a trace against a server, open loop, and judge every request."""
    from rich.console import Console

    from loadgen.arrivals import ArrivalModel
    from loadgen.run import Options, prepare, run
    from telemetry.terminal import render, show

    start_s, duration_s = time_window(window, start, duration)
    options = Options(
        targets=target,
        trace=trace,
        slo=slo,
        model=model,
        served_model=served_model,
        start_s=start_s,
        duration_s=duration_s,
        speed=speed,
        rate_scale=rate_scale,
        length_scale=length_scale,
        fit=fit,
        over_limit=over_limit,
        dequantise_s=dequantise,
        loop=loop,
        arrivals=None if arrivals is None else ArrivalModel.parse(arrivals, "--arrivals"),
        choices=choices_of(trace_format, columns, time_unit, block_size, failures, restart, trace_seed),
        workers=workers,
        seed=seed,
        salt=salt,
        max_concurrency=max_concurrency,
        connect_timeout_s=connect_timeout,
        first_token_timeout_s=first_token_timeout,
        total_timeout_s=total_timeout,
        keep_text=keep_text,
        exact_output=exact_output,
        temperature=temperature,
        headers=header or [],
        api_key_env=api_key_env,
        otlp_port=otlp_port,
        runs=runs,
        name=name,
        web_ui=web_ui,
        command=" ".join(["tailspan", *sys.argv[1:]]),
    )
    prepared = prepare(options, Console(stderr=True))
    if dry_run:
        print_plan(prepared, as_json=as_json)
        return 0
    _, summary = run(options, prepared, Console(stderr=True))
    if as_json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        show(render(summary))
    return int(summary.exit_code)


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
    from loadgen.calls import Calls, Sampling
    from loadgen.prompts import PromptMaker

    plan, reference = prepared.plan, prepared.reference
    maker = PromptMaker(reference.tokenizer, reference.template, seed=plan.seed, salt=plan.salt or "dry run")
    sampling = Sampling(plan.served_model, plan.seed, plan.temperature, plan.top_p, plan.exact_output)
    calls = Calls(prepared.schedule, maker, sampling, "dry-run", plan.sampling_ratio)
    first = [calls.at(index) for index in range(min(SAMPLE_ROWS, len(prepared.schedule)))]
    if as_json:
        rows = [
            {
                "index": call.index,
                "trace_row": call.trace_row,
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
    print(f"\nthe first {len(first)} of {len(prepared.schedule):,} requests to {', '.join(plan.targets)}:")
    for call in first:
        text = json.loads(call.body)["messages"][0]["content"]
        lengths = f"in {call.input_tokens:>6,}  out {call.expected_output_tokens:>5,}"
        print(f"  {call.intended_s:9.4f} s  {lengths}  {text[:70]}{'…' if len(text) > 70 else ''}")
