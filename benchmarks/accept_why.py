"""Compare and explain on a million requests a side: compare under 10 s, explain under 60 s, memory under 4 GB.

Usage: python -m benchmarks.accept_why [--requests 1000000] [--root build/accept-why]

The two runs are written once (``benchmarks.big_bundle``: the same kind of load, B at a higher rate).  Each command runs
in a process of its own, whose peak of resident memory is what the kernel counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.big_bundle import write_bundle
from telemetry.bundle import Bundle, list_runs
from telemetry.slo import of_manifest
from telemetry.summary import summarize

LIMITS = {"compare": 10.0, "explain": 60.0}
MEMORY_GB = 4.0


def measured(words: list[str]) -> tuple[float, float, float, int, str]:
    """Wall seconds, CPU seconds, peak GB of resident memory, exit code and output of one command."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "tailspan", *words], stdout=subprocess.PIPE, text=True)
    out = process.stdout.read() if process.stdout is not None else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall, cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    return wall, cpu, usage.ru_maxrss / 1e6, process.returncode, out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--root", type=Path, default=Path("build/accept-why"))
    options = parser.parse_args()
    runs = [Bundle.open(path) for path in reversed(list_runs(options.root))]
    if len(runs) != 2 or any(one.scheduled != options.requests for one in runs):
        if runs:
            print(f"error: {options.root} holds other runs; empty it, or name another --root", file=sys.stderr)
            return 4
        print(f"writing two runs of {options.requests:,} requests to {options.root}", file=sys.stderr, flush=True)
        runs = [write_bundle(options.root, options.requests, seed, load) for seed, load in ((7, 0.6), (8, 0.95))]
        for one in runs:  # as `tailspan run` does at its end
            one.update(validity=summarize(one, of_manifest(one.manifest)).validity.to_dict())
    a, b = runs
    held = True
    print("| command | seconds | limit | of CPU | memory, GB | limit | said |\n|---|---|---|---|---|---|---|")
    for name, limit in LIMITS.items():
        more = ["--any-load"] if name == "compare" else []
        words = [name, str(a.path), str(b.path), *more, "--json"]
        measured(words)  # the verdicts are kept beside a run when it is first read
        seconds, cpu, memory, code, out = measured(words)
        found = json.loads(out) if out.strip() else {}
        said = found.get("sentence") or f"{found.get('label')}: {found.get('cause')}"
        good = code in (0, 2) and seconds < limit and memory < MEMORY_GB
        held = held and good
        cells = [f"{seconds:.1f}", f"{limit:.0f}", f"{cpu:.1f}", f"{memory:.2f}", f"{MEMORY_GB:.0f}", str(said)]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{options.requests:,} requests a side; within the limits: {'yes' if held else '**no**'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
