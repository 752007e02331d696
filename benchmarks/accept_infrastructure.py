"""Faults of infrastructure on a simulated engine (a real server process): is each called late or dropped, and why?

Usage: python -m benchmarks.accept_infrastructure [--case NAME …]
Overload, a KV pool cut to little, a queue limit, cut streams, a frozen scheduler; then the retry storm: users who give
up after 2 s and try three times more, and one stall of 10 s.  Without a budget for retries the storm must amplify the
load and outlive its cause; with one it must pass.  Prints a Markdown table; exits with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from benchmarks.faulty_server import TAILSPAN, FaultyServer, serving
from telemetry import names
from telemetry.bundle import Bundle, newest
from telemetry.slo import of_manifest
from telemetry.summary import Summary, summarize

MODEL: Final = "smollm2"  # whose tokenizer serves the simulated shape
ENGINE: Final = ("--backend", "simulated", "--device", "h100", "--model", "llama-3.1-8b")
SLO: Final = "classes: {default: {ttft: {base_s: 1.0}}}\nobjectives: [goodput >= 90 %]\n"
PROMPT, ANSWER = 96, 24
#: A step takes this much longer, so that a few requests a second fill eight places: 24 tokens take about 0.9 s.
SLOW: Final = {"name": "slow_step", "size": 30}
STALL: Final = {"name": "stalled_loop", "size": 10_000, "every_s": 3600}  # one, at once
STALL_AT_S: Final = 10.0
PLENTY: Final = "patience: {total_s: 2, retries: 3, backoff_s: 0.1, budget: 10}"  # as good as no limit
SCARCE: Final = "patience: {total_s: 2, retries: 3, backoff_s: 0.1, budget: 0.1}"
STARTED_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """serve: words of the server.  rate: requests a second.  faults: in force all the time.  stall: in mid-run.

    holds: from the summary and the bundle, what was measured and whether it is right.
    """

    name: str
    serve: Sequence[str]
    rate: float
    faults: Sequence[Mapping[str, Any]]
    holds: Callable[[Summary, Bundle], tuple[str, bool]]
    plan: str = ""
    stall: bool = False
    seconds: float = 15.0


def mostly(label: str, reason: str, least: float, also: str = "") -> Callable[[Summary, Bundle], tuple[str, bool]]:
    """At least this share has the label, for the reason (of the dropped) or with ``also`` in the sentence."""

    def look(summary: Summary, bundle: Bundle) -> tuple[str, bool]:
        found = summary.reasons[label]
        share = found.get(reason, 0) / summary.attempted
        named = next(iter(found), None) == reason
        return f"{share:.0%} {label} ({reason}); {summary.sentence}", share >= least and named and also in str(summary)

    return look


def late_share(summary: Summary, bundle: Bundle) -> float:
    """Share of good among the requests of the last third of the run."""
    verdicts = bundle.verdicts(of_manifest(bundle.manifest))
    rows = bundle.table("requests", ["index", "intended_s"])
    last = rows.filter(pc.greater(rows.column("intended_s"), 2 / 3 * float(bundle.manifest["length_s"])))
    chosen = verdicts.filter(pc.is_in(verdicts.column("index"), last.column("index").combine_chunks()))
    good = pc.equal(chosen.column("label"), names.GOOD).to_numpy()
    return float(np.mean(good)) if len(good) else 0.0


def storm(*, recovers: bool) -> Callable[[Summary, Bundle], tuple[str, bool]]:
    def look(summary: Summary, bundle: Bundle) -> tuple[str, bool]:
        retries, good = summary.retries, late_share(summary, bundle)
        if retries is None:
            return "no attempts", False
        said = f"{retries.sentence()}; {good:.0%} good in the last third"
        if recovers:
            return said, good >= 0.9 and not retries.still_failing and retries.amplification <= 1.2
        return said, good <= 0.2 and retries.still_failing and retries.amplification >= 2.0

    return look


def calm(summary: Summary, bundle: Bundle) -> tuple[str, bool]:
    good = late_share(summary, bundle)
    return f"{summary.sentence}; {good:.0%} good in the last third", good >= 0.95


SMALL: Final = ("--max-batch", "8")
CASES: Final = (
    Case("overload", SMALL, 30.0, (SLOW,), mostly(names.LATE, "ttft", 0.5, "queue")),
    Case("KV cut", (*SMALL, "--kv-blocks", "256"), 6.0, ({"name": "kv_pool", "size": 0.02},),
         mostly(names.DROPPED, names.KV_OOM, 0.9)),
    Case("queue limit", SMALL, 30.0, (SLOW, {"name": "queue_limit", "size": 16}),
         mostly(names.DROPPED, names.REJECTED, 0.3)),
    Case("cut streams", SMALL, 10.0, ({"name": "cut_stream", "share": 0.1},),
         mostly(names.DROPPED, names.STREAM_CUT, 0.04)),
    Case("frozen scheduler", SMALL, 6.0, ({"name": "frozen_scheduler"},), mostly(names.DROPPED, names.HANG, 0.5),
         "send: {first_token_timeout: 8, total_timeout: 10}"),
    Case("before the storm", SMALL, 6.0, (SLOW,), calm, PLENTY, False, 30.0),
    Case("storm without a budget", SMALL, 6.0, (SLOW,), storm(recovers=False), PLENTY, True, 60.0),
    Case("storm with a budget", SMALL, 6.0, (SLOW,), storm(recovers=True), SCARCE, True, 60.0),
)  # fmt: skip


def write_trace(path: Path, rate: float, seconds: float) -> None:
    """Evenly spaced arrivals in Azure's columns: what is seen is the fault's doing, not a burst's."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for n in range(int(rate * seconds)):
        minute, second = divmod(n / rate, 60)
        lines.append(f"2031-02-03 04:{int(minute):02d}:{second:010.7f},{PROMPT},{ANSWER}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(case: Case, folder: Path) -> Bundle:
    """One case on a server of its own."""
    trace, plan, runs = (folder / f"{case.name.replace(' ', '-')}{end}" for end in (".csv", ".yaml", "-runs"))
    write_trace(trace, case.rate, case.seconds)
    plan.write_text(f"trace: {trace}\nslo: {folder / 'slo.yaml'}\nmodel: {MODEL}\n{case.plan}\n", encoding="utf-8")
    with serving(folder / f"{case.name.replace(' ', '-')}.log", *ENGINE, *case.serve) as server:
        for fault in case.faults:
            server.put(fault)
        command = [*TAILSPAN, "run", str(plan), "--target", server.url, "--runs", str(runs), "--otlp-port", "0"]
        with (folder / "runs.log").open("a") as log:
            process = subprocess.Popen([*command, "--json"], stdout=log, stderr=log)
            if case.stall:
                stall(server, process)
            process.wait(timeout=600)
    found = newest(runs)
    if found is None:
        raise SystemExit(f"no run was made; see {folder / 'runs.log'}")
    return Bundle.open(found)


def stall(server: FaultyServer, process: subprocess.Popen[bytes]) -> None:
    """STALL_AT_S after the first request: one stall."""
    end = time.monotonic() + STARTED_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and time.monotonic() < end:
        with opener.open(f"{server.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        started = [line for line in text.splitlines() if line.startswith(f"{names.M_GENERATION_TOKENS}_total")]
        if any(float(line.rsplit(" ", 1)[1]) > 0 for line in started):
            break
        time.sleep(0.1)
    time.sleep(STALL_AT_S)
    server.put(STALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", help="only these")
    parser.add_argument("--folder", type=Path, default=Path("build/accept-infrastructure"))
    options = parser.parse_args()
    folder = (options.folder / time.strftime("%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    (folder / "slo.yaml").write_text(SLO, encoding="utf-8")
    rows = []
    for case in CASES:
        if options.case and case.name not in options.case:
            continue
        bundle = run(case, folder)
        measured, holds = case.holds(summarize(bundle, of_manifest(bundle.manifest)), bundle)
        rows.append((case.name, measured, holds))
        print(f"{case.name}: {measured}{'' if holds else '   <-- DOES NOT HOLD'}", flush=True)
    print("\n| case | measured | holds |\n|---|---|---|")
    for name, measured, holds in rows:
        print(f"| {name} | {measured.replace('|', '/')} | {'yes' if holds else 'NO'} |")
    return 0 if all(holds for _, _, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
