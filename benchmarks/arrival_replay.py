"""Does the server see the trace?  Real arrivals at real speed against the native stub, judged by the stub's own log.

Usage: python -m benchmarks.arrival_replay [--minutes 10] [--traces azure-2023-code,mooncake-conversation]

The sender sends as in a run (real schedule, exact prompts of a tiny tokenizer, rows written); the k-th arrival in the
stub's log is set against the k-th intended send of the schedule.  Holds when the error's p99 is under 2 ms and its
p99.9 under 20 ms.  Exits with 1 when it does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from loadgen.native_stub import NativeStub
from loadgen.plan import Plan, load_schedule, prompt_maker
from loadgen.roofline import SenderProcess
from loadgen.schedule import build
from loadgen.traces import find, registry
from models.store import load_reference
from models.tiny import write_tiny

P99_S, P999_S = 0.002, 0.020
LENGTH_SCALE = 0.1
CONTEXT = 1 << 20


def plan_of(trace: str, minutes: float, reference: str, target: str) -> Plan:
    """The plan of one replay."""
    loaded = load_reference(reference)
    found = find.locate(trace)
    read = registry.read(found.path, found.name, duration_s=minutes * 60)
    plan = Plan(
        run_id="replay",
        seed=0,
        salt=f"replay {time.time_ns()}",
        trace_name=read.name,
        trace_path=str(found.path),
        trace_format=read.format,
        trace_sha256=read.sha256,
        reference=reference,
        served_model="stub",
        max_context=CONTEXT,
        min_input=prompt_maker(loaded, "chat", seed=0, salt="x").minimum,
        requests=0,
        targets=(target,),
        duration_s=minutes * 60,
        length_scale=LENGTH_SCALE,
        keep_text="none",
    )
    return replace(plan, requests=len(build(read, plan.transforms)))


def replay(trace: str, minutes: float, folder: Path, cpus: list[int] | None) -> bool:
    """One trace; prints its line and returns whether it holds."""
    log = folder / f"{trace}.log"
    reference = str(write_tiny(folder / "tiny")) if not (folder / "tiny").exists() else str(folder / "tiny")
    with NativeStub(cpu=cpus[1] if cpus else None, chunks=4, ttft_ms=20, chunk_ms=5, log=str(log)) as stub:
        plan = plan_of(trace, minutes, reference, stub.url)
        path = folder / f"{trace}.json"
        plan.write(path)
        sender = SenderProcess(cpus[0] if cpus else None, module="loadgen.sender")
        try:
            sender.say(cmd="prepare", plan=str(path), worker=0, workers=1, bundle=str(folder / trace))
            sender.hear("ready")
            zero = time.monotonic_ns() + 1_000_000_000
            sender.say(cmd="start", zero_monotonic_ns=zero)
            sender.hear("progress", lambda event: bool(event["finished"]))
            sender.say(cmd="stop", grace_s=5.0)
            end = sender.hear("end")
        finally:
            sender.close()
    arrivals = np.sort([int(line.split()[0]) for line in log.read_text().splitlines()])
    intended = zero + np.round(load_schedule(plan).intended_s * 1e9)
    if len(arrivals) != len(intended):
        print(f"{trace}: {len(arrivals)} arrivals of {len(intended)} requests: does not hold")
        return False
    error = np.abs(arrivals - intended) / 1e9
    p50, p99, p999 = (float(np.quantile(error, q)) for q in (0.5, 0.99, 0.999))
    holds = p99 < P99_S and p999 < P999_S
    print(
        f"{plan.trace_name}: {len(arrivals):,} arrivals in {minutes:g} min, error p50 {p50 * 1e3:.3f} ms, p99 "
        f"{p99 * 1e3:.3f} ms, p99.9 {p999 * 1e3:.3f} ms, max {error.max() * 1e3:.2f} ms; sender's own lag p99 "
        f"{end['lag_p99_s'] * 1e3:.3f} ms: {'holds' if holds else 'does NOT hold'}",
        flush=True,
    )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--traces", default="azure-2023-code,mooncake-conversation")
    asked = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    cpus = available[:2] if len(available) > 1 else None
    with tempfile.TemporaryDirectory(prefix="tailspan-replay-") as name:
        held = [replay(trace, asked.minutes, Path(name), cpus) for trace in asked.traces.split(",")]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
