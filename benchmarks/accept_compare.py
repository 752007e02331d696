"""Does compare keep its promise?  Unchanged pairs must not alarm, a 10 % slower prefill must be found; in virtual time.

Usage: python -m benchmarks.accept_compare [--pairs 2000] [--requests 300] [--used 0.5,0.8,0.9] [--fit FILE]
           [--workers 2] [--most 16] [--out FILE.md]

Step times and their noise are fitted to the real CPU engine first (about 40 s; --fit reads a file of
``python -m engine.step_fit`` instead), and everything else runs on the engine's virtual-time twin.  Utilisation is the
arrival rate over the rate at which a full engine finishes.  Each case has a load of its own (Poisson arrivals, lengths
of the anchor benchmark) which is replayed K times a side with other noise.

1. Power first: --tries cases of up to --most pairs against a prefill that takes 10 % longer; K is the smallest number
   of pairs with which at least 95 % are found.
2. A/A: --pairs cases with K pairs a side, nothing changed.  An alarm is any figure that is called changed, without the
   tolerance that the tool has by default.  The one-sided 95 % upper bound of the rate must not exceed 6 %.
3. The approximate modes on the same runs: one replay a side, and the two halves of one run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.replay import TWIN
from models.errors import UserError
from telemetry import names
from telemetry.compare import Comparison, Facts, compare_facts
from telemetry.compare.blocks import compare_blocks
from telemetry.compare.figures import FIGURES
from telemetry.compare.max_t import LEAST_FLIPPED
from telemetry.distributions import upper_bound
from telemetry.twin import TwinLoad, TwinRun, TwinSetting

BOUND = 0.06
POWER = 0.95
SLOWER = 1.10
SETTING = TwinSetting(model="smollm2", device="h100", max_batch=16, token_budget=128, kv_blocks=1024)


@dataclass(frozen=True)
class Plan:
    """rate: requests/s at the utilisation; requests: of a replay."""

    setting: TwinSetting
    rate: float
    requests: int
    most: int


def load_of(seed: int, rate: float, n: int) -> TwinLoad:
    """Poisson arrivals; prompts of 16 to 220 tokens, answers of 6 to 60, as in ``benchmarks.anchor``."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, n))
    return TwinLoad(
        at_s=at - at[0],
        input_tokens=np.round(16 * 13.75 ** rng.random(n)).astype(np.int64),
        output_tokens=np.round(6 * 10 ** rng.random(n)).astype(np.int64),
    )


def capacity(setting: TwinSetting) -> float:
    """Requests/s of a full engine."""
    load = load_of(1, 1.0, 600)
    run = TWIN.replay(replace(load, at_s=np.zeros(len(load))), setting)
    return len(load) / run.length_s


def facts(run: TwinRun, name: str) -> Facts:
    """A run as compare sees it."""
    n = len(run.load)
    return Facts(
        name, np.arange(n), np.asarray(run.load.at_s), np.asarray(run.load.input_tokens),
        np.asarray(run.load.output_tokens), np.full(n, names.LABELS.index(names.GOOD), dtype=np.int8),
        {"ttft": run.ttft_s, "e2e": run.e2e_s, "tpot": run.tpot_s}, float(run.load.at_s[-1]),
    )  # fmt: skip


def replays(plan: Plan, case: int, pairs: int, prefill: float) -> tuple[list[Facts], list[Facts]]:
    """Both sides of one case: its own load, and other noise in each of the 2 K runs."""
    load = load_of(10_000 + case, plan.rate, plan.requests)
    sides: tuple[list[Facts], list[Facts]] = ([], [])
    for k in range(pairs):
        for which, side in enumerate(sides):
            setting = replace(plan.setting, seed=1_000 * (10_000 + case) + 2 * k + which)
            if which and prefill != 1:
                setting = replace(setting, prefill_speed=1 / prefill)
            side.append(facts(TWIN.replay(load, setting), f"{'ab'[which]}{k}"))
    return sides


def found_by(plan: Plan, case: int) -> list[bool]:
    """With 6, 7, … pairs: is the slower prefill found, as a time to first token that got worse?"""
    a, b = replays(plan, case, plan.most, SLOWER)
    found = []
    for pairs in range(LEAST_FLIPPED, plan.most + 1):
        compared = compare_facts(a[:pairs], b[:pairs], tolerance=0.0)
        found.append(any(one.figure.startswith("ttft") for one in compared.worse))
    return found


def alarms(plan: Plan, pairs: int, case: int) -> dict[str, bool]:
    """Nothing changed: which ways of comparing call it a change?"""
    a, b = replays(plan, case, pairs, 1.0)
    strict = compare_facts(a, b, tolerance=0.0)
    half = a[0].length_s / 2
    single = _blocks(a[0], b[0], paired=True)
    windows = _blocks(a[0].between(0.0, half), a[0].between(half, np.inf), paired=False)
    five = compare_facts(a[:5], b[:5], tolerance=0.0)
    return {
        "pairs": bool(strict.changed),
        "with the default tolerance": bool(compare_facts(a, b).changed),
        "five pairs": bool(five.changed),
        "one pair": bool(single.changed),
        "two windows": bool(windows.changed),
    }


def _blocks(a: Facts, b: Facts, *, paired: bool) -> Comparison:
    return compare_blocks(a, b, paired=paired, alpha=0.05, tolerance=0.0, figures=FIGURES)


def fitted(path: Path | None) -> dict[str, Any]:
    """Step times of the real engine: from a file, or made now from four short runs of it."""
    if path is not None:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    from benchmarks.anchor import capacity as real_capacity
    from benchmarks.anchor import requests, run_real
    from engine.backends import build
    from engine.config import EngineConfig
    from engine.step_fit import fit
    from models.store import load

    model = load("smollm2")
    engine = build(EngineConfig(kv_blocks=1024, prefix_cache=False), model)
    engine.start()
    try:
        most = real_capacity(engine, 4.0)
        before = engine.counts.steps - 1
        for number, used in enumerate((0.4, 0.6, 0.8)):
            run_real(engine, requests(number, used * most, 10.0), f"fit-{number}")
        return fit(engine.steps.since(before), f"{model.name} on this CPU").to_dict()
    finally:
        engine.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000, help="A/A cases at each utilisation")
    parser.add_argument("--tries", type=int, default=300, help="cases of the slower prefill at each utilisation")
    parser.add_argument("--requests", type=int, default=300, help="of a replay; 736 certify p99 too")
    parser.add_argument("--used", default="0.5,0.8,0.9", help="utilisations")
    parser.add_argument("--most", type=int, default=16, help="pairs, at most")
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    try:
        fit = fitted(options.fit)
    except (UserError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    setting = replace(SETTING, fit=fit)
    full = capacity(setting)
    rows, held = [], True
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for used in (float(one) for one in options.used.split(",")):
            plan = Plan(setting, used * full, options.requests, options.most)
            found = np.array(pool.map(partial(found_by, plan), range(options.tries), chunksize=4))
            power = found.mean(axis=0)
            enough = np.flatnonzero(power >= POWER)
            pairs = LEAST_FLIPPED + int(enough[0] if len(enough) else len(power) - 1)
            said = f"{used:.0%}: K = {pairs}, power {power[pairs - LEAST_FLIPPED]:.1%}"
            print(f"{said} (6 pairs: {power[0]:.1%}), {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            cases = range(100_000, 100_000 + options.pairs)
            seen = pool.map(partial(alarms, plan, pairs), cases, chunksize=8)
            rates = {name: sum(one[name] for one in seen) for name in seen[0]}
            bound = upper_bound(rates["pairs"], len(seen))
            held = held and bound <= BOUND and bool(len(enough))
            rows.append((used, pairs, float(power[pairs - LEAST_FLIPPED]), rates, bound, len(seen)))
            print(f"{used:.0%}: {rates} of {len(seen)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    text = report(rows, fit, full, options, time.monotonic() - began)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if held else 1


def report(rows: list[Any], fit: dict[str, Any], full: float, options: argparse.Namespace, seconds: float) -> str:
    """As Markdown."""
    noise = fit["noise"]
    lines = [
        "| utilisation | K | 10 % slower prefill found | A/A alarms | 95 % bound | with the tolerance | five pairs "
        "| one pair | two windows |",
        "|---" * 9 + "|",
    ]
    for used, pairs, power, rates, bound, n in rows:
        cells = [f"{used:.0%}", str(pairs), f"{power:.1%}", f"{rates['pairs'] / n:.2%}", f"{bound:.2%}"]
        cells += [
            f"{rates[one] / n:.1%}" for one in ("with the default tolerance", "five pairs", "one pair", "two windows")
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{rows[0][5]} unchanged cases and {options.tries} of the slower prefill at each utilisation, "
        f"{options.requests} requests a replay; capacity {full:.1f} requests/s; fit of {fit['steps']} steps "
        f"({fit['about']}): error {fit['error']:.0%}, sigma {noise['sigma']:.2f}, rho {noise['autocorrelation']:.2f}, "
        f"stalls {noise['stall_rate']:.2f}/s of {1e3 * noise['stall_s']:.0f} ms; {seconds / 60:.0f} minutes",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
