"""How fast the load generator is on one core, beside its floor and its peers, in one run.

Usage: python -m benchmarks.loadgen [--seconds 5] [--peers bare,locust,aiperf,guidellm,inference-perf] [--out FILE.md]

A native stub has one core, the client the other: 50 ms to the first token, 16 tokens 10 ms apart.  tailspan's rate is
held when lag p99 < 5 ms, all was sent in time and the median TTFT of its rows is the stub's within 1 ms; everything a
real run keeps is kept.  A peer's rate is held when the stub saw 98 % of it in every second of the middle; that of
the bare loop and of the Locust script, which are ours and tell their lag and TTFT, when these keep tailspan's bounds
too.  AIPerf, GuideLLM and inference-perf tell no such times and are judged by the stub alone, which favours them.  The
searches of the peers begin near what they hold; tailspan's and the bare loop's go on to 3 %, the others' to 15 %.
Targets: at least 5,000 requests/s and 90,000 events/s, 75 % of the bare loop, ten times AIPerf, five times that
Locust, and two workers on one core at 0.9 of one.  Figures of a busy machine are no figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.load_clients import BARE, LOCUST, OTHERS, Client, Seen, send
from loadgen.roofline import EVENTS, Step, search
from models.tiny import write_tiny

FIRST: dict[str, float] = {"bare loop": 4000, "locust": 800, "aiperf": 200, "guidellm": 40, "inference-perf": 200}
FINE = 0.03
#: How near the rate held and the rate not held must be.  The ratio to the bare loop is judged finely.
PRECISION: dict[str, float] = {"bare loop": FINE}
COARSE = 0.15
TARGET_RATE, TARGET_EVENTS, OF_BARE, OF_AIPERF, OF_LOCUST, OF_ONE = 5000.0, 90_000.0, 0.75, 10.0, 5.0, 0.9


def highest(client: Client, measure: Callable[[float], Seen]) -> Seen | None:
    """The highest rate held: doubled, then halved in between; None where not even the first is."""
    best: Seen | None = None
    low, high, rate = 0.0, 0.0, FIRST[client.name]
    while not high or high - low > PRECISION.get(client.name, COARSE) * high:
        seen = measure(rate)
        print(f"   {client.name}: {seen}", flush=True)
        if seen.held:
            low, best = rate, seen
        elif rate <= FIRST[client.name] / 16:
            return best
        else:
            high = rate
        rate = (low + high) / 2 if low and high else rate * 2 if low else rate / 2
    return best


def tell(step: Step) -> None:
    print(
        f"   tailspan x {step.workers} {step.rate:,.0f}/s: lag p99 {step.lag_p99_s * 1e3:.2f} ms, "
        f"TTFT p50 {step.ttft_p50_s * 1e3:.2f} ms, {step.cpu_ratio:.0%} of a core, {step.errors} errors, "
        f"{'held' if step.held else 'not held'}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for each search of ours")
    parser.add_argument("--peers", default="bare,locust,aiperf,guidellm,inference-perf")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    cpus = available[:2] if len(available) > 1 else None
    lines = [
        f"| client, one core | requests/s held | events/s | us of CPU a request |{'' if cpus else ' (shared core)'}"
    ]
    lines.append("|---|---|---|---|")
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tailspan-bench-") as name:
        folder = Path(name)
        model = folder / "tiny-model"
        model.mkdir()
        reference = str(write_tiny(model))
        for workers in (1, 2):
            best, _ = search(reference, asked.seconds, asked.budget, tell, workers=workers, precision=FINE)
            label = "tailspan" if workers == 1 else "tailspan, 2 workers"
            if best is None:
                lines.append(f"| {label} | none | | |")
                continue
            rates[label] = best.rate
            cost = f"{best.cpu_per_request_s * 1e6:.0f}, {best.cpu_per_request_s / EVENTS * 1e6:.1f} an event"
            lines.append(f"| {label} | {best.rate:,.0f} | {best.events_per_s:,.0f} | {cost} |")
        wanted = set(asked.peers.split(","))
        for client in (BARE, LOCUST, *OTHERS):
            if client.name.split()[0] not in wanted:
                continue
            try:
                seen = highest(client, lambda rate, one=client: send(one, rate, asked.seconds, folder, cpus))  # type: ignore[misc]
            except RuntimeError as error:
                lines.append(f"| {client.name} | not measured: {error} | | |")
                continue
            if seen is None:
                lines.append(f"| {client.name} | none | | |")
                continue
            rates[client.name] = seen.delivered
            cost = f"{seen.cpu_per_request_s * 1e6:.0f}"
            lines.append(f"| {client.name} | {seen.delivered:,.0f} | {seen.delivered * EVENTS:,.0f} | {cost} |")
    lines += ["", "| target | found | holds |", "|---|---|---|", *judged(rates)]
    text = "\n".join(lines)
    print(f"\n{text}")
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text + "\n", encoding="utf-8")
    return 0


def judged(rates: dict[str, float]) -> list[str]:
    """A line for each target that can be judged."""
    own = rates.get("tailspan", 0.0)
    targets = [
        (f">= {TARGET_RATE:,.0f} requests/s", own, own >= TARGET_RATE),
        (f">= {TARGET_EVENTS:,.0f} events/s", own * EVENTS, own * EVENTS >= TARGET_EVENTS),
    ]
    for name, factor in (("bare loop", OF_BARE), ("aiperf", OF_AIPERF), ("locust", OF_LOCUST)):
        if rates.get(name):
            targets.append((f">= {factor:g} x {name}", own / rates[name], own >= factor * rates[name]))
    if own and "tailspan, 2 workers" in rates:
        ratio = rates["tailspan, 2 workers"] / own
        targets.append((f"2 workers on one core >= {OF_ONE:g} of one", ratio, ratio >= OF_ONE))
    return [f"| {what} | {found:,.3g} | {'yes' if holds else 'NO'} |" for what, found, holds in targets]


if __name__ == "__main__":
    raise SystemExit(main())
