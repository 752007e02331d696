"""Simulated Llama-3.1-8B on one H100 under ten minutes of the real Azure conversation trace, in virtual time.

Usage: python -m benchmarks.virtual_azure [--minutes 10] [--used 0.9] [--budget 8192] [--out FILE.md]

The rate (a superposition of the trace, as ``tailspan run --rate-scale`` makes it) is searched at which the KV pool is
used to ``--used`` in the mean.  Printed are phases, steps, floors and Little's law at that rate, and what doubling the
pool or the token budget changes, beside what theory says: the iron law in steady state (models/steady_load.py).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.simulated import Simulation, open_reference
from engine.step_load import StepLoad
from engine.step_model import UTILISATION, RooflineTime
from engine.tally import Tally, tally
from engine.virtual import Arrival, VirtualEngine
from loadgen.schedule import Schedule, Transforms, build
from loadgen.traces.find import locate
from loadgen.traces.registry import read
from loadgen.traces.trace import Trace
from models.devices import find_device
from models.errors import UserError
from models.steady_load import SteadyLoad

WARM_UP: float = 0.1  # of the window, before which nothing is counted
CLOSE = 0.005  # of the pool: the search ends when the mean use is as near as that
TRIES = 12


@dataclass(frozen=True)
class Setting:
    """One engine.  share: of the device's pool."""

    used: float
    pool_pages: int
    budget: int


@dataclass(frozen=True)
class Found:
    """A run: its rate, what it showed, CPU seconds and virtual seconds that it took."""

    scale: float
    rate: float
    shown: Tally
    cpu_s: float
    virtual_s: float


class Twin:
    """The simulated engine under the trace at any rate, with any pool and budget."""

    def __init__(self, trace: Trace, what: Simulation, minutes: float, batch: int, seed: int) -> None:
        self.trace, self.what, self.seconds, self.batch, self.seed = trace, what, 60 * minutes, batch, seed
        self.runs = 0

    def schedule(self, scale: float) -> Schedule:
        """Ten minutes of the trace at a rate."""
        asked = Transforms(self.seed, duration_s=self.seconds, rate_scale=scale, max_context=131_072)
        return build(self.trace, asked)

    def run(self, scale: float, setting: Setting) -> Found:
        """One run in virtual time."""
        schedule = self.schedule(scale)
        config = EngineConfig(
            model=self.what.model.name,
            backend="simulated",
            device=self.what.device.name,
            max_batch=self.batch,
            token_budget=setting.budget,
            kv_blocks=setting.pool_pages,
            prefix_cache=False,  # the trace knows no shared prefixes
            queue_limit=1 << 30,
            step_log=1 << 20,
            check_every=1000,
        )
        twin = VirtualEngine(config, self.what)
        twin.feed(arrivals(schedule))
        gc.collect()
        gc.disable()  # records of a million steps are walked again and again for nothing
        start = time.process_time()
        try:
            twin.run()
        finally:
            took = time.process_time() - start
            gc.enable()
        end_ns = round(schedule.length_s * 1e9)
        if twin.engine.laws.violations:
            raise RuntimeError(f"laws broken: {twin.engine.laws.first}")
        shown = tally(twin.lives, twin.engine.steps.since(-1), setting.pool_pages, round(WARM_UP * end_ns), end_ns)
        self.runs += 1
        found = Found(scale, schedule.rate_per_s, shown, took, twin.clock() / 1e9)
        print(
            f"  run {self.runs}: {found.rate:6.2f}/s, pool {setting.pool_pages} pages, budget {setting.budget}: "
            f"KV {shown.kv_mean:.1%}, {found.virtual_s / took:.0f} times real time",
            file=sys.stderr,
            flush=True,
        )
        return found

    def search(self, setting: Setting, guess: float) -> Found:
        """The rate at which the pool is used as wanted: bisection, from a guess of the scale."""
        low, high = 0.0, 0.0
        scale = guess
        best: Found | None = None
        for _ in range(TRIES):
            found = self.run(scale, setting)
            off = found.shown.kv_mean - setting.used
            if best is None or abs(off) < abs(best.shown.kv_mean - setting.used):
                best = found
            if abs(off) < CLOSE:
                break
            if off < 0:
                low = scale
            else:
                high = scale
            scale = (low + high) / 2 if low and high else scale * (1.06 if off < 0 else 0.94)
        assert best is not None
        return best


def arrivals(schedule: Schedule) -> Iterator[Arrival]:
    """Requests of the schedule's lengths; no two prompts have a page in common."""
    stamps = np.round(schedule.intended_s * 1e9).astype(np.int64).tolist()
    inputs, outputs = schedule.input_tokens.tolist(), schedule.output_tokens.tolist()
    for at, (stamp, tokens, answer) in enumerate(zip(stamps, inputs, outputs, strict=True)):
        prompt = [at % 32_768, at // 32_768, *[7] * max(0, tokens - 2)][: max(1, tokens)]
        yield Arrival(stamp, prompt, SamplingParams(answer, ignore_eos=True, seed=at))


def report(twin: Twin, theory: SteadyLoad, base: Setting) -> str:
    """Search, double, compare."""
    pages, tokens = base.pool_pages, base.pool_pages * 16
    mean_rate = len(twin.schedule(1.0)) / twin.schedule(1.0).length_s
    guess = theory.rate(tokens, base.used) / mean_rate
    at = twin.search(base, guess)
    wide = twin.run(at.scale, replace(base, pool_pages=2 * pages))
    wide_at = twin.search(replace(base, pool_pages=2 * pages), theory.rate(2 * tokens, base.used) / mean_rate)
    deep = twin.run(at.scale, replace(base, budget=2 * base.budget))
    tight_budget = base.budget // 4
    tight = twin.run(1.25 * at.scale, replace(base, pool_pages=2 * pages, budget=tight_budget))
    plain = twin.run(1.0, base)
    n = theory.residents(tokens, base.used)
    waiting = at.shown.queue_inside.residents
    longest = RooflineTime(twin.what.cost)

    def full(budget: int) -> float:
        """Seconds of a step of a whole budget beside n decodes."""
        prompt = max(0, budget - round(n))
        seen = round(n * theory.context)
        return longest.seconds(StepLoad(prompt, round(n), seen + prompt, round(n), seen + prompt * prompt // 2))

    def row(what: str, said: str, found: str) -> str:
        return f"| {what} | {said} | {found} |"

    def in_steps(found: Found) -> float:
        """Mean number of requests in a step."""
        return found.shown.steps.batch

    def served(found: Found) -> float:
        """Requests/s that it finished."""
        return found.shown.served_rate

    rate_1, rate_2 = theory.rate(tokens, base.used), theory.rate(2 * tokens, base.used)
    lines = [
        f"{twin.what.label}; pool {pages} pages ({tokens} tokens), budget {base.budget}, trace {twin.trace.name}, "
        f"{twin.seconds:.0f} s at {at.scale:.3f} times its rate",
        "",
        at.shown.text(),
        "",
        "| what | theory | simulated |",
        "|---|---|---|",
        row(f"rate served where {base.used:.0%} of the pool are used", f"{rate_1:.2f}/s", f"{served(at):.2f}/s"),
        row("requests in a step there", f"{n:.0f}", f"{in_steps(at):.0f}"),
        row("mean step there", f"{1e3 * theory.step_s(n):.1f} ms", f"{1e3 * at.shown.steps.mean_s:.1f} ms"),
        row(
            "pool doubled, same rate: share used",
            f"who waited for pages runs now: {(in_steps(at) + waiting) * theory.context / (2 * tokens):.0%}",
            f"{wide.shown.kv_mean:.1%}",
        ),
        row(
            "pool doubled, same rate: mean time in queue, preemptions",
            "next to none (nobody waits for pages), none",
            f"{1e3 * at.shown.phases['queue']:.0f} ms -> {1e3 * wide.shown.phases['queue']:.0f} ms, "
            f"{at.shown.preemptions} -> {wide.shown.preemptions}",
        ),
        row(
            f"pool doubled, rate served at {base.used:.0%}",
            f"x {rate_2 / rate_1:.2f} (not 2: steps get longer, compute is the wall)",
            f"x {served(wide_at) / served(at):.2f}",
        ),
        row(
            "budget doubled, same rate: share of the pool used",
            "the same (a token costs what it costs)",
            f"{at.shown.kv_mean:.1%} -> {deep.shown.kv_mean:.1%}",
        ),
        row(
            "budget doubled, same rate: longest steps (p99)",
            f"{1e3 * full(base.budget):.0f} -> at most {1e3 * full(2 * base.budget):.0f} ms",
            f"{1e3 * at.shown.steps.p99_s:.0f} -> {1e3 * deep.shown.steps.p99_s:.0f} ms",
        ),
        row(
            f"budget {tight_budget}, pool doubled, rate x 1.25: requests in a step",
            f"at most {theory.most(tight_budget):.0f}, so at most "
            f"{theory.most(tight_budget) * theory.context / (2 * tokens):.0%} of the pool",
            f"{in_steps(tight):.0f}, {tight.shown.kv_mean:.0%}",
        ),
        row(
            "budget doubled, same rate: TTFT p90",
            "hardly shorter: the budget is no wall here",
            f"{1e3 * at.shown.latencies['TTFT'][1]:.0f} -> {1e3 * deep.shown.latencies['TTFT'][1]:.0f} ms",
        ),
        "",
        f"{twin.runs} runs; the first line's took {at.cpu_s:.1f} s of CPU for {at.virtual_s:.0f} virtual seconds: "
        f"{at.virtual_s / at.cpu_s:.0f} times real time; at the trace's own rate ({plain.rate:.2f}/s) "
        f"{plain.virtual_s / plain.cpu_s:.0f} times",
    ]
    held = at.shown.queue.error < 0.02 and at.shown.system.error < 0.02
    lines.append(f"Little's law within 2 %: {'yes' if held else '**no**'}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="azure-2023-conv", help="a known trace or a file")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--used", type=float, default=0.9, help="share of the KV pool in use, in the mean")
    parser.add_argument("--budget", type=int, default=8192, help="tokens in a step; vLLM's default on an H100")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result there as well")
    options = parser.parse_args()
    try:
        found = locate(options.trace)
        trace = read(found.path, found.name)
        what = Simulation(open_reference("llama-3.1-8b"), find_device(options.device), "bf16")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    print(found.sentence, file=sys.stderr)
    twin = Twin(trace, what, options.minutes, options.batch, options.seed)
    lengths = twin.schedule(1.0)
    theory = SteadyLoad(what.cost, lengths.input_tokens, lengths.output_tokens, UTILISATION)
    text = report(twin, theory, Setting(options.used, what.kv_tokens // 16, options.budget))
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if text.endswith("yes") else 1


if __name__ == "__main__":
    sys.exit(main())
