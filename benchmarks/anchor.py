"""Is the simulated twin true?  Fitted on a run of the real CPU engine, it predicts another run that it never saw.

Usage: python -m benchmarks.anchor [--rounds 3] [--seconds 40] [--model smollm2] [--save-fit FILE] [--out FILE.md]

A round is two runs of the real engine, in this process, at real times: one that the twin is fitted on (its step log is
all that the fit sees) and a held-out one, with other requests at another rate.  The twin then replays the held-out
arrivals in virtual time, with several seeds of its noise.  Compared are p50 and p90 of TTFT and of the whole answer;
the figure of a round is predicted / measured, and the verdict is their median over the rounds: rounds alternate, so
that a machine whose speed drifts hurts neither side alone.  Rates are shares of what a full batch was measured to do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.backends import build
from engine.config import EngineConfig
from engine.core import Engine
from engine.phase_clock import PhaseClock
from engine.request import Output, Request, SamplingParams
from engine.simulated import Simulation
from engine.step_fit import StepFit, fit
from engine.virtual import Arrival, VirtualEngine
from models.errors import UserError
from models.store import load

BOUND = 0.15
FITTED_AT, HELD_OUT_AT = 0.45, 0.65  # shares of the measured capacity
SEEDS = 9
MEASURES = ("TTFT p50", "TTFT p90", "end to end p50", "end to end p90")


@dataclass(frozen=True)
class Times:
    """Of one request, seconds."""

    ttft: float
    e2e: float


def requests(seed: int, rate: float, seconds: float) -> list[Arrival]:
    """Poisson arrivals; prompts of 16 to 220 random tokens, answers of 6 to 60."""
    draw, at, made = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        prompt = [draw.randrange(300, 20_000) for _ in range(round(16 * 13.75 ** draw.random()))]
        tokens = round(6 * 10 ** draw.random())
        made.append(Arrival(round(at * 1e9), prompt, SamplingParams(tokens, temperature=0.0, ignore_eos=True)))
    return made


def run_real(engine: Engine, arrivals: Sequence[Arrival], name: str) -> list[Times]:
    """Submit at real times, wait for all."""
    left, over = len(arrivals), threading.Event()
    clocks: list[PhaseClock] = []

    def heard(output: Output) -> None:
        nonlocal left
        if output.finish_reason is not None:
            left -= 1
            if left == 0:
                over.set()

    zero = time.monotonic_ns() + 50_000_000
    for at, arrival in enumerate(arrivals):
        time.sleep(max(0.0, (zero + arrival.at_ns - time.monotonic_ns()) / 1e9))
        now = time.monotonic_ns()
        clock = PhaseClock(now)
        clock.parsed(now)
        clock.tokenized(now)
        clocks.append(clock)
        engine.submit(Request(f"{name}-{at}", arrival.prompt_ids, arrival.params, clock, heard))
    if not over.wait(300):
        raise RuntimeError("the engine did not finish within five minutes")
    return [_times(clock) for clock in clocks]


def _times(clock: PhaseClock) -> Times:
    first, last = clock.first_token_ns, clock.last_token_ns
    if first is None or last is None:
        raise RuntimeError("a request without an answer")
    return Times((first - clock.head_ns) / 1e9, (last - clock.head_ns) / 1e9)


def run_twin(config: EngineConfig, what: Simulation, arrivals: Sequence[Arrival], gap_ns: int) -> list[Times]:
    """The same arrivals in virtual time."""
    twin = VirtualEngine(config, what, gap_ns=gap_ns)
    twin.feed(arrivals)
    twin.run()
    if len(twin.lives) != len(arrivals):
        raise RuntimeError("the twin lost requests")
    return [_times(life.clock) for life in twin.lives if life.clock is not None]


def figures(times: Sequence[Times]) -> list[float]:
    """MEASURES in seconds."""
    found = []
    for values in ([one.ttft for one in times], [one.e2e for one in times]):
        found += [float(np.percentile(values, p)) for p in (50, 90)]
    return found


def capacity(engine: Engine, seconds: float) -> float:
    """Requests/s that a full batch answers; the machine's speed at this hour."""
    crowd = requests(0, 4.0, 3.0 * seconds)[: max(16, round(3 * seconds))]
    at_once = [replace(arrival, at_ns=0) for arrival in crowd]
    start = time.monotonic()
    run_real(engine, at_once, "capacity")
    return len(at_once) / (time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, or 'tiny' for a random tiny model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each of the two runs of a round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--save-fit", type=Path, help="keep the last round's fit there, for --sim-fit")
    parser.add_argument("--out", type=Path, help="write the result there as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "tiny":
            from models.tiny import write_tiny

            options.model = str(write_tiny(Path(folder) / "tiny", vocab=20_000))
        try:
            return compare(options)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 4


def compare(options: argparse.Namespace) -> int:
    """All rounds; 0 when every median is within the bound."""
    config = EngineConfig(model=options.model, threads=options.threads, kv_blocks=1024, prefix_cache=False)
    model = load(options.model)
    engine = build(config, model)
    if engine.floors.cost is None:
        raise RuntimeError("the engine does not know its device")
    device, name = engine.floors.cost.device, f"{model.name} on this CPU"
    twin_config = replace(config, backend="simulated", device=device.name, threads=None)
    engine.start()
    rows: list[list[float]] = []
    lines = ["| round | requests | " + " | ".join(MEASURES) + " | fit |", "|---" * (len(MEASURES) + 3) + "|"]
    made: StepFit | None = None
    try:
        most = capacity(engine, 4.0)
        print(f"capacity {most:.2f} requests/s", file=sys.stderr, flush=True)
        for number in range(options.rounds):
            before = engine.counts.steps - 1
            seed = 1000 * options.seed + 2 * number
            run_real(engine, requests(seed, FITTED_AT * most, options.seconds), f"fit-{number}")
            made = fit(engine.steps.since(before), name)
            held_out = requests(seed + 1, HELD_OUT_AT * most, options.seconds)
            measured = figures(run_real(engine, held_out, f"held-out-{number}"))
            guesses = []
            for twin_seed in range(SEEDS):
                what = Simulation(model, device, "fp32", made, twin_seed)
                guesses.append(figures(run_twin(twin_config, what, held_out, round(made.gap_s * 1e9))))
            predicted = [statistics.median(column) for column in zip(*guesses, strict=True)]
            rows.append([p / m for p, m in zip(predicted, measured, strict=True)])
            cells = [f"{1e3 * p:.0f} / {1e3 * m:.0f} ms" for p, m in zip(predicted, measured, strict=True)]
            noise = made.noise
            about = (
                f"{made.steps} steps, error {made.error:.0%}, sigma {noise.sigma:.2f}, "
                f"rho {noise.autocorrelation:.2f}, stalls {noise.stall_rate:.2f}/s of {1e3 * noise.stall_s:.0f} ms, "
                f"gap {1e6 * made.gap_s:.0f} us"
            )
            lines.append(f"| {number + 1} | {len(held_out)} | " + " | ".join(cells) + f" | {about} |")
            print(lines[-1], file=sys.stderr, flush=True)
    finally:
        engine.stop()
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    held = all(abs(ratio - 1) <= BOUND for ratio in medians)
    lines.append("| predicted / measured, median | | " + " | ".join(f"{ratio:.2f}" for ratio in medians) + " | |")
    lines.append("")
    lines.append(f"capacity {most:.2f} requests/s; fitted at {FITTED_AT:.0%} of it, held out at {HELD_OUT_AT:.0%}")
    lines.append(f"within {BOUND:.0%}: {'yes' if held else '**no**'}")
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.save_fit is not None and made is not None:
        made.save(options.save_fit)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
