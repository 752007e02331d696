"""How many times faster than real the twin is, by load, step by step and leaping; and that both say the same.

Usage: python -m benchmarks.virtual_speed [--rounds 3] [--only NAME] [--out FILE.md]

Times are CPU seconds of this process, the best of the rounds; virtual seconds are those of the whole run, from the
first arrival to the last token.  Exit code 1 where the two ways differ in anything that a replay tells.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.replay import TWIN, EngineTwin
from telemetry.twin import TwinLoad, TwinRun, TwinSetting

#: A small machine: coefficients chosen by hand in the range of SmolLM2 on two cores (steps of 7 to 80 ms); noise and
#: gap as ``make bench-anchor`` found them.
CPU_FIT = {
    "kind": "tailspan step fit", "version": 1, "about": "made up, like a 135M on 2 cores",
    "steps": 11_154, "error": 0.05,
    "gap_s": 90e-6,
    "coefficients": {
        "step": 6e-3, "tokens_8": 1e-3, "tokens_32": 3e-4, "prefill_tokens": 4e-4, "decode_seqs": 1e-4,
        "context_tokens": 1e-6, "attended": 1e-8,
    },
    "noise": {"sigma": 0.08, "autocorrelation": 0.76, "stall_rate": 0.648, "stall_s": 0.007},
}  # fmt: skip
H100 = TwinSetting(prefix_cache=False, max_batch=1024)
CPU = TwinSetting(
    model="smollm2", device="l4", max_batch=16, token_budget=128, kv_blocks=1024, prefix_cache=False, fit=CPU_FIT
)
QUIET = (0.0, 0.0, 0.0, 0.0)
FITTED = (0.08, 0.76, 0.648, 0.007)


@dataclass(frozen=True)
class Case:
    """Poisson arrivals with exponential lengths of these means."""

    name: str
    setting: TwinSetting
    rate: float
    requests: int
    prompt: int
    answer: int

    def load(self) -> TwinLoad:
        draw = np.random.default_rng(0)

        def lengths(mean: int) -> np.ndarray:
            return np.maximum(1, draw.exponential(mean, self.requests)).astype(np.int64)

        at = np.cumsum(draw.exponential(1 / self.rate, self.requests))
        return TwinLoad(at, lengths(self.prompt), lengths(self.answer))


CASES = (
    Case("8B on an H100, 0.1/s", H100, 0.1, 200, 1155, 211),
    Case("8B on an H100, 0.5/s", H100, 0.5, 500, 1155, 211),
    Case("8B on an H100, 2/s", H100, 2.0, 1000, 1155, 211),
    Case("8B on an H100, 5/s", H100, 5.0, 2000, 1155, 211),
    Case("8B on an H100, 10/s", H100, 10.0, 3000, 1155, 211),
    Case("8B on an H100, 19/s: full", H100, 19.0, 6000, 1155, 211),
    Case("8B on an H100, 4/s, answers of 1500", H100, 4.0, 1500, 600, 1500),
    Case("8B on an H100, 2/s, noise", replace(H100, noise=FITTED), 2.0, 1000, 1155, 211),
    Case("8B on an H100, 2/s, prefix cache", replace(H100, prefix_cache=True), 2.0, 1000, 1155, 211),
    Case("135M on two cores, 1/s", CPU, 1.0, 500, 64, 32),
    Case("135M on two cores, 5/s", CPU, 5.0, 1500, 64, 32),
    Case("135M on two cores, 10/s", CPU, 10.0, 2000, 64, 32),
    Case("135M on two cores, 5/s, no noise", replace(CPU, noise=QUIET), 5.0, 1500, 64, 32),
)


def timed(case: Case, twin: EngineTwin, rounds: int) -> tuple[float, TwinRun]:
    """CPU seconds of the best round, and what came of it."""
    load, times = case.load(), []
    for _ in range(rounds):
        start = time.process_time()
        run = twin.replay(load, case.setting)
        times.append(time.process_time() - start)
    return min(times), run


def same(a: TwinRun, b: TwinRun) -> bool:
    """To the last bit."""
    told = [(a.ttft_s, b.ttft_s), (a.e2e_s, b.e2e_s), (a.tpot_s, b.tpot_s)]
    told += [(a.phases[name], b.phases[name]) for name in a.phases]
    told += [(a.facts[name], b.facts[name]) for name in a.facts]
    return a.length_s == b.length_s and all(np.array_equal(one, other, equal_nan=True) for one, other in told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, help="write the table there as well")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    TWIN.replay(TwinLoad(np.zeros(1), np.ones(1, dtype=int), np.ones(1, dtype=int)), H100)  # opens the tokenizer
    lines = [
        "| load | virtual s | steps' batch | step by step | leaping | times real time |",
        "|---|---|---|---|---|---|",
    ]
    equal = True
    for case in CASES:
        if options.only not in case.name:
            continue
        fast, run = timed(case, TWIN, options.rounds)
        slow, plain = timed(case, EngineTwin(leaping=False), 1)
        equal = equal and same(run, plain)
        lines.append(
            f"| {case.name} | {run.length_s:.0f} | {run.facts['batch_size_mean'].mean():.1f} | {slow:.2f} s, "
            f"x {run.length_s / slow:.0f} | {fast:.2f} s | x {run.length_s / fast:.0f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", f"the same to the last bit: {'yes' if equal else '**no**'}"]
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
