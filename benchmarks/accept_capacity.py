"""Does a search for the capacity find the same again?  In virtual time over seeds, and twice on the real engine.

Usage: python -m benchmarks.accept_capacity virtual [--seeds 5] [--duration 300] [--folder build/accept-capacity]
       python -m benchmarks.accept_capacity real [--duration 45] [--fit 0.5]     quiet the machine first

virtual: Llama-3.1-8B on a simulated H100 under Poisson arrivals with the lengths of the Azure conversation trace, one
search a seed, beside the iron law's bound; holds when all lie within 5 % of their middle.  real: SmolLM2 on this
machine's CPU under the same kind of load, its lengths scaled once; holds when two searches with two seeds agree within
15 % on goodput and each took less than 30 minutes.  Their SLO asks for goodput alone: of a hundred answers of so small
a model one is a loop now and then, at any rate, and that is no matter of capacity.  Searches go on where they were
interrupted, given the same folder and --group.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

SAME: Final = 0.05
SAME_REAL: Final = 0.15
LIMIT_S: Final = 30 * 60.0
ENGINE_NICE: Final = "15"
TAILSPAN: Final = (sys.executable, "-m", "tailspan")
SLO: Final = "classes: {default: {ttft: {base_s: 2}}}\nobjectives: [goodput >= 90 %]\n"
LOAD: Final = ("--trace", "azure-2023-conv", "--arrivals")
MODEL: Final = ("--virtual", "--model", "llama-3.1-8b", "--device", "h100")


def tailspan(*words: str) -> dict[str, Any]:
    """One command that answers in JSON; ends this process where it fails."""
    done = subprocess.run([*TAILSPAN, *words, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"tailspan {words[0]} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spent() -> float:
    """CPU seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def virtual(options: argparse.Namespace) -> bool:
    """One search a seed."""
    load = [*LOAD, "poisson:rate=1", "--duration", str(options.duration)]
    found = []
    for seed in range(options.seeds):
        words = [*MODEL, *load, "--seed", str(seed), "--precision", "0.03", "--runs", str(options.folder)]
        began = spent()
        answer = tailspan("capacity", *words, "--group", f"seed-{seed}")
        found.append(answer)
        print(f"seed {seed}: {answer['rate']:.2f}/s, {spent() - began:.0f} s of CPU", file=sys.stderr, flush=True)
    print(f"{found[0]['simulated']}; Poisson, {options.duration:g} s a run\n")
    print("| seed | requests/s | 90 % | runs | good requests/s | iron law's bound | reached | binds |")
    print("|---|---|---|---|---|---|---|---|")
    for seed, one in enumerate(found):
        law = one["theory"]["iron_law"]
        print(
            f"| {seed} | {one['rate']:.2f} | {one['low']:.2f} .. {one['high']:.2f} | {one['runs']} | "
            f"{one['goodput']:.2f} | {law['rate']:.2f} ({law['binds']}) | {one['theory']['reached']:.0%} | "
            f"{one['binding']['binds']} |"
        )
    rates = [one["rate"] for one in found]
    middle = (max(rates) + min(rates)) / 2
    spread = max(abs(rate / middle - 1) for rate in rates)
    above = max(one["theory"]["reached"] for one in found)
    print(f"\nall within {spread:.1%} of their middle, {middle:.2f}/s (5 % asked); at most {above:.0%} of the bound")
    return spread <= SAME and above <= 1.0


def real(options: argparse.Namespace) -> bool:
    """Two searches with one load and two seeds on the bundled engine."""
    folder = options.folder / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place, (folder / "engine.log").open("w") as log:
        ready = Path(place) / "ready.json"
        words = ["serve", "--port", "0", "--ready-file", str(ready), "--nice", ENGINE_NICE]
        engine = subprocess.Popen([*TAILSPAN, *words], stdout=log, stderr=log)
        try:
            while not ready.exists():
                if engine.poll() is not None:
                    sys.exit(f"the engine ended with {engine.returncode}; see {log.name}")
                time.sleep(0.1)
            slo = Path(place) / "slo.yaml"
            slo.write_text(SLO, encoding="utf-8")
            target = ["--target", json.loads(ready.read_text())["url"], "--slo", str(slo)]
            # short requests and many of them: a run of a minute then says more about its rate
            load = [*LOAD, "poisson:rate=4", "--duration", str(options.duration)]
            plan = tailspan("run", *target, *load, "--fit", str(options.fit), "--dry-run")["plan"]
            scales = ["--rate-scale", str(plan["rate_scale"]), "--length-scale", str(plan["length_scale"])]
            found, took = [], []
            for seed in (1, 2):
                began = time.monotonic()
                more = ["--seed", str(seed), "--runs", str(folder), "--group", f"search-{seed}", "--precision", "0.08"]
                found.append(tailspan("capacity", *target, *load, *scales, *more))
                took.append(time.monotonic() - began)
        finally:
            engine.terminate()
            engine.wait()
    print("\n| search | requests/s | 90 % | good requests/s | output token/s | runs | minutes | binds |")
    print("|---|---|---|---|---|---|---|---|")
    for number, (one, seconds) in enumerate(zip(found, took, strict=True), start=1):
        print(
            f"| {number} | {one['rate']:.2f} | {one['low']:.2f} .. {one['high']:.2f} | {one['goodput']:.2f} | "
            f"{one['tokens']:.0f} | {one['runs']} | {seconds / 60:.1f} | {one['binding']['binds']} |"
        )
    apart = found[1]["goodput"] / found[0]["goodput"] - 1
    print(f"\nthe second search's goodput is {apart:+.1%} off the first's (15 % asked)")
    return abs(apart) <= SAME_REAL and max(took) < LIMIT_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("virtual", "real"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--duration", type=float, help="seconds of a run [virtual: 300, real: 45]")
    parser.add_argument("--fit", type=float, default=0.5, help="real: share of the machine that the first rate takes")
    parser.add_argument("--folder", type=Path, default=Path("build/accept-capacity"))
    options = parser.parse_args()
    options.duration = options.duration or (300.0 if options.which == "virtual" else 45.0)
    options.folder.mkdir(parents=True, exist_ok=True)
    return 0 if {"virtual": virtual, "real": real}[options.which](options) else 1


if __name__ == "__main__":
    sys.exit(main())
