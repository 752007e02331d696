"""Half of what the bundled engine carries, then several times that rate: does the queue take it, and nothing else?

Usage: python -m benchmarks.accept_overload [--times 3] [--duration 60] [--folder build/accept-overload]
Holds when the second run breaks its SLO (exit code 1), is valid, the queue makes at least 80 % of the growth of the
TTFT's p90 through it, and a step of equal batch takes as long late in it as early, within 15 %, once the batch is full.
Prints a Markdown table; exits with 1 when anything does not hold.  It measures time: quiet the machine first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from telemetry.bundle import Bundle, newest
from telemetry.phases import Growth, Split

FIT: Final = "0.5"
QUEUE_SHARE: Final = 0.8
STEP_CHANGE: Final = 0.15
ENGINE_NICE: Final = "15"
LEAST_STEPS: Final = 5  # of one kind on each side, for their median to say something
TAILSPAN: Final = (sys.executable, "-m", "tailspan")


def run(url: str, runs: Path, duration: str, *load: str) -> tuple[int, dict[str, Any], Path]:
    """One `tailspan run`: its exit code, its summary and its bundle."""
    environment = {**os.environ, "TAILSPAN_RUNS": str(runs)}
    words = ["run", "--trace", "azure-2023-conv", "--duration", duration, "--slo", "demo", "--target", url, *load]
    code = subprocess.run([*TAILSPAN, *words], env=environment, check=False).returncode
    show = subprocess.run(
        [*TAILSPAN, "runs", "show", "latest", "--json"], env=environment, capture_output=True, check=False
    )
    return code, json.loads(show.stdout), newest(runs)


def queue_share(growth: dict[str, Any] | None) -> float:
    """The queue's share of the growth of the TTFT's p90; 0 where nothing grew."""
    if growth is None:
        return 0.0
    return Growth(growth["p"], Split(**growth["first"]), Split(**growth["last"])).share("queue") or 0.0


def step_change(steps: pa.Table) -> tuple[float, int]:
    """Median of late/early step time over kinds of step (decodes, prefill to 16 tokens), and the steps compared.

    Looks at the steps after the batch was first full; early and late are the halves of those.
    """
    column = {name: steps.column(name).to_numpy() for name in ("start_ns", "end_ns", "decode_seqs", "prefill_tokens")}
    running = steps.column("running").to_numpy()
    full = np.flatnonzero(running == running.max())[0]
    half = full + (len(running) - full) // 2
    took = column["end_ns"] - column["start_ns"]
    kind = column["decode_seqs"] * 10_000 + column["prefill_tokens"] // 16
    ratios, weights = [], []
    for one in np.unique(kind[full:]):
        early, late = took[full:half][kind[full:half] == one], took[half:][kind[half:] == one]
        if min(len(early), len(late)) >= LEAST_STEPS:
            ratios.append(float(np.median(late) / np.median(early)))
            weights.append(min(len(early), len(late)))
    if not ratios:
        return float("nan"), 0
    order = np.argsort(ratios)
    heavy = np.cumsum(np.asarray(weights)[order])
    middle = order[int(np.searchsorted(heavy, heavy[-1] / 2))]
    return ratios[int(middle)], int(heavy[-1]) * 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--duration", default="60")
    parser.add_argument("--folder", type=Path, default=Path("build/accept-overload"))
    options = parser.parse_args()
    runs = options.folder / time.strftime("%Y%m%d-%H%M%S")
    runs.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, (runs / "engine.log").open("w") as log:
        ready = Path(folder) / "ready.json"
        words = ["serve", "--port", "0", "--ready-file", str(ready), "--nice", ENGINE_NICE]
        engine = subprocess.Popen([*TAILSPAN, *words], stdout=log, stderr=log)
        try:
            while not ready.exists():
                if engine.poll() is not None:
                    sys.exit(f"the engine ended with {engine.returncode}; see {log.name}")
                time.sleep(0.1)
            url = json.loads(ready.read_text())["url"]
            calm_code, _, calm_run = run(url, runs, options.duration, "--fit", FIT)
            load = Bundle.open(calm_run).manifest["plan"]
            rate, length = load["rate_scale"] * options.times, load["length_scale"]
            scales = ["--rate-scale", str(rate), "--length-scale", str(length)]
            code, hot, hot_run = run(url, runs, options.duration, *scales)
        finally:
            engine.terminate()
            engine.wait()
    share = queue_share(hot["growth"])
    change, compared = step_change(Bundle.open(hot_run).table("steps"))
    verdict = hot["validity"]["verdict"]
    held = [
        ("exit code", f"{calm_code} at 1x, {code} at {options.times:g}x", code == 1),
        ("valid", verdict, verdict == "VALID"),
        ("queue's share of the growth of TTFT p90", f"{share:.1%}", share >= QUEUE_SHARE),
        ("late / early step time at equal batch", f"{change:.3f} ({compared} steps)", abs(change - 1) <= STEP_CHANGE),
    ]
    print(f"\n{hot['sentence']}\n\n| what | measured | holds |\n|---|---|---|")
    for what, measured, holds in held:
        print(f"| {what} | {measured} | {'yes' if holds else 'NO'} |")
    return 0 if all(holds for _, _, holds in held) else 1


if __name__ == "__main__":
    sys.exit(main())
