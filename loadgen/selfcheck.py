"""`tailspan selfcheck`: the roofline of this client on this machine, in under a minute."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def selfcheck_command(
    seconds: Annotated[float, typer.Option(min=1, max=60, help="Seconds at each rate.")] = 2.0,
    budget: Annotated[float, typer.Option(min=5, help="Seconds in all, about.")] = 45.0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Sender processes, on one core.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer counts the answers. [default: a tiny one, made here]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """How many requests and events a second this client sends and reads on one core before it is late itself."""
    from loadgen.roofline import LAG_S, Step, search
    from models.tiny import write_tiny
    from telemetry.names import EXIT_OK, EXIT_RUN_NOT_VALID

    with tempfile.TemporaryDirectory(prefix="tailspan-selfcheck-") as folder:
        reference = model or str(write_tiny(Path(folder)))
        if not as_json:
            print("streams of 16 tokens 10 ms apart, first token after 50 ms, from a native stub")
            print("   rate/s  events/s   lag p50   lag p99  TTFT p50   CPU  us/request")

        def tell(step: Step) -> None:
            if not as_json:
                print(
                    f"{step.rate:9,.0f} {step.events_per_s:9,.0f} {step.lag_p50_s * 1e3:6.2f} ms"
                    f" {step.lag_p99_s * 1e3:6.2f} ms"
                    f" {step.ttft_p50_s * 1e3:6.2f} ms {step.cpu_ratio:5.0%} {step.cpu_per_request_s * 1e6:11.0f}"
                    f"  {'held' if step.held else 'not held'}",
                    flush=True,
                )

        best, steps = search(reference, seconds, budget, tell, workers=workers)
    cores = len(os.sched_getaffinity(0))
    if as_json:
        result = {"best": best.to_dict() if best else None, "steps": [step.to_dict() for step in steps], "cores": cores}
        print(json.dumps(result, indent=2))
    elif best is None:
        print("no rate was held: this machine is busy, or too slow to be a load generator")
    else:
        print(
            f"\nroofline: {best.rate:,.0f} requests/s and {best.events_per_s:,.0f} events/s on one core with lag p99 < "
            f"{LAG_S * 1e3:g} ms; {best.cpu_per_request_s * 1e6:.0f} us of CPU a request"
        )
        if cores < 2:
            print("one core only: the stub shares it, so the client alone is faster")
    return EXIT_OK if best is not None else EXIT_RUN_NOT_VALID
