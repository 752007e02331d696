"""What the accounting costs: phase clocks, step log, laws and the step-time model, on and off in one process.

Usage: python -m benchmarks.accounting [--model smollm2] [--pairs 40] [--batch 8] [--steps 40]
Two engines share one runner: the real one, and ``Bare``, whose steps schedule, compute, sample and hand over the
same tokens and account for nothing.  Blocks of decode steps alternate (real, bare, bare, real, ...), so that a
machine that drifts hurts both; a block counts as its median step, so that what else the machine does, which hits a
few steps, hurts neither.  The check of the laws, which comes once in ``--check-every`` steps, is timed by itself and
its share added.  Printed: the median loss of tokens/s over the pairs, with the upper end of its 95 % interval (order
statistics: no pair that the machine disturbed can move it far), and the microseconds that a step's accounting takes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.backends import build
from engine.config import EngineConfig
from engine.core import Engine
from engine.logprobs import sampled_rows
from engine.phase_clock import PhaseClock
from engine.request import Output, Request, SamplingParams
from engine.sampling import sample
from models.store import LoadedModel, load

PROMPT = 64
BOUND = 0.02


class Bare(Engine):
    """An engine that keeps no account: no clock, no step log, no facts, no laws, no model of its steps."""

    def step(self) -> None:
        """Schedule, compute, sample, hand over."""
        plan = self.scheduler.schedule(0)
        logits = sampled_rows(self.runner.forward(plan.slices), plan.slices)
        sampling = [piece.request for piece in plan.slices if piece.sample]
        tokens, finite = sample(logits, sampling, self.end_tokens) if sampling else ([], [])
        news = iter(zip(tokens, finite, strict=True))
        for piece in plan.slices:
            request = piece.request
            if not piece.sample:
                self.scheduler.commit(piece)
                continue
            token, _ok = next(news)
            self.scheduler.commit(piece)
            text, reason = self.commit.append(request, token)
            if reason is not None:
                self.scheduler.finish(request)
                del self.live[request.id]
            request.emit(Output(request.id, text, (token,), reason, None, 0))


def fill(engine: Engine, batch: int, tokens: int, heard: Callable[[Output], None]) -> None:
    """``batch`` requests, prefilled: the next steps are decodes."""
    for k in range(batch):
        now = time.monotonic_ns()
        clock = PhaseClock(now)
        clock.parsed(now)
        clock.tokenized(now)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit(Request(f"r{k}-{now}", [5 + k] * PROMPT, params, clock, heard))
    engine._drain(wait=False)
    while any(one.generated == 0 for one in engine.live.values()):
        engine.step()


def block(engine: Engine, batch: int, steps: int) -> float:
    """Seconds of the median step of one block of decodes."""
    heard: list[Output] = []
    fill(engine, batch, steps + 8, heard.append)
    took = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - start)
    while engine.scheduler.has_work:
        engine.step()
    return statistics.median(took)


def check_seconds(engine: Engine) -> float:
    """Seconds of one check of the laws: the best of twenty."""
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        found = engine.check()
        best = min(best, time.perf_counter() - start)
        if found:
            raise RuntimeError(f"laws broken: {found}")
    return best


def measure(model: LoadedModel, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds per step of every pair of blocks: with and without."""
    blocks = options.batch * -(-(PROMPT + options.steps + 16) // 16) + 8
    config = EngineConfig(
        kv_blocks=blocks, max_batch=options.batch, prefix_cache=False, dtype=options.dtype, check_every=0
    )
    real = build(config, model)
    bare = Bare(config, model, real.runner)
    engines: tuple[Engine, Engine] = (real, bare)
    for engine in engines:
        block(engine, options.batch, options.steps)
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(options.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            times[which].append(block(engines[which], options.batch, options.steps))
    rare = check_seconds(real) / options.check_every
    print(f"a check of the laws takes {1e6 * rare * options.check_every:.0f} us, once in {options.check_every} steps")
    return [seconds + rare for seconds in times[0]], times[1]


def upper(values: list[float]) -> float:
    """Upper end of the two-sided 95 % interval of the median: an order statistic, whatever the distribution."""
    n, below = len(values), 0.0
    for k in range(n):  # P(the median lies above the k-th smallest) falls to 2.5 %
        below += math.comb(n, k) / 2.0**n
        if below >= 0.975:
            return sorted(values)[k]
    return max(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, or 'tiny' for a random tiny model")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--check-every", type=int, default=EngineConfig().check_every)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    if options.pairs < 40:
        parser.error("fewer than 40 pairs say little")
    with TemporaryDirectory() as folder:
        if options.model == "tiny":
            from models.tiny import write_tiny

            options.model = str(write_tiny(Path(folder) / "tiny"))
        on, off = measure(load(options.model), options)
    losses = [1 - without / with_ for with_, without in zip(on, off, strict=True)]
    costs = [1e6 * (with_ - without) for with_, without in zip(on, off, strict=True)]
    bound = upper(losses)
    print(f"batch {options.batch}, {options.pairs} pairs of blocks of {options.steps} decode steps")
    print(f"step {1e3 * statistics.median(on):.2f} ms with, {1e3 * statistics.median(off):.2f} ms without accounting")
    print(f"accounting: {statistics.median(costs):.0f} us a step, 95 % bound {upper(costs):.0f}")
    print(f"loss of tokens/s: {statistics.median(losses):.2%}, 95 % bound {bound:.2%} (must be below {BOUND:.0%})")
    return 0 if bound < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
