"""Each fault of the engine under load: is the run called wrong, and with the right kind?

Usage: python -m benchmarks.accept_faults [--model smollm2] [--canaries FILE] [--fault NAME …] [--healthy 4]
           [--requests 300] [--canary-share 0.1]
       python -m benchmarks.accept_faults --simulated [--seeds 5]
Real: one engine with ``--enable-faults``; canaries are recorded on it while it is healthy (or read from a file), then
each fault is put in force and ``tailspan run`` sends about 300 requests of at most 96 tokens in and 24 out, a tenth of
them canaries.  The healthy engine is asked ``--healthy`` times as well: none of its answers may be wrong, and no run.
Simulated: no weights, so only the faults of prompts and limits can be expressed; the load of five seeds.
Prints the confusion matrix as Markdown; exits with 1 where a call is not the right one.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.faulty_server import TAILSPAN, FaultyServer, serving
from telemetry import canary_report, wrong_cause
from telemetry.bundle import Bundle, newest
from telemetry.wrong_cause import DRIFT, NONE

HEALTHY: Final = "healthy"
#: Fault as /debug/faults takes it -> the kind that it has to be called.
REAL: Final[tuple[tuple[dict[str, Any], str], ...]] = (
    ({"name": "wrong_template"}, "template"),
    ({"name": "double_bos"}, "double BOS"),
    ({"name": "other_tokenizer"}, "tokenizer"),
    ({"name": "sampling_ignored"}, "sampling"),
    ({"name": "output_cap", "size": 6}, "truncated"),
    ({"name": "end_suppressed"}, "no end"),
    ({"name": "empty_output"}, "empty"),
    ({"name": "nan_layer", "size": 12}, "non-finite"),
    ({"name": "broken_cache"}, "cache"),
    ({"name": "race", "size": 16}, "concurrency"),
    ({"name": "weights", "size": 4}, DRIFT),
)
SIMULATED: Final = tuple(one for one in REAL if one[1] in ("template", "double BOS", "tokenizer", "truncated"))
REQUESTS: Final = 300
RATE: Final = 25.0  # a second: more than the engine carries, so that its batches are full
LONGEST_IN: Final = 96
LONGEST_OUT: Final = 24
CANARY_SHARE: Final = 0.1
SLO: Final = "classes: {default: {ttft: {base_s: 900}}}\nobjectives: [goodput >= 90 %]\n"


@dataclass(frozen=True, slots=True)
class Called:
    """fault and seed of a run, the kind it has to get and got, the labels of its requests, and the evidence."""

    fault: str
    expected: str
    kind: str
    labels: dict[str, int]
    evidence: str
    took_s: float


def write_trace(path: Path, seed: int, rate: float, requests: int) -> None:
    """Arrivals of a Poisson process in Azure's columns."""
    draw = random.Random(seed)
    at, lines = 0.0, ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(requests):
        at += draw.expovariate(rate)
        minute, second = divmod(at, 60)
        inputs, outputs = draw.randint(48, LONGEST_IN), draw.randint(8, LONGEST_OUT)
        lines.append(f"2031-02-03 04:{int(minute):02d}:{second:010.7f},{inputs},{outputs}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(server: FaultyServer, folder: Path, trace: Path, model: str, *words: str) -> Bundle:
    """One ``tailspan run``; its bundle."""
    runs = folder / "runs"
    command = [*TAILSPAN, "run", "--target", server.url, "--trace", str(trace), "--slo", str(folder / "slo.yaml")]
    command += ["--model", model, "--runs", str(runs), "--otlp-port", "0", "--json"]
    command += ["--first-token-timeout", "900", "--total-timeout", "1200", *words]
    with (folder / "runs.log").open("a") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False, timeout=1800)
    found = newest(runs)
    if found is None:
        raise SystemExit(f"no run was made; see {folder / 'runs.log'}")
    return Bundle.open(found)


def call(bundle: Bundle, fault: str, expected: str, began: float) -> Called:
    """What a finished run says."""
    report = canary_report.read(bundle.path)
    found = wrong_cause.cause(bundle.table("requests", wrong_cause.COLUMNS), report)
    show = subprocess.run(
        [*TAILSPAN, "runs", "show", str(bundle.path), "--json"], capture_output=True, check=False, text=True
    )
    labels = json.loads(show.stdout)["labels"]
    return Called(fault, expected, found.kind, labels, found.evidence, time.monotonic() - began)


def real(options: argparse.Namespace, folder: Path) -> Iterator[Called]:
    """Every fault once, and the healthy engine ``--healthy`` times, on one server."""
    words = ["--model", options.model, "--max-batch", "32"]
    with serving(folder / "server.log", *words) as server:
        canaries = options.canaries or folder / "canaries.json"
        if options.canaries is None:
            recording = ["--runs", "4", "--tokens", "24", "-o", str(canaries)]
            subprocess.run([*TAILSPAN, "canaries", "record", "--target", server.url, *recording], check=True)
        mix = ["--canaries", str(canaries), "--canary-share", str(options.canary_share)]
        cases: list[tuple[dict[str, Any] | None, str]] = [(None, NONE)] * options.healthy
        cases += [case for case in REAL if not options.fault or case[0]["name"] in options.fault]
        for seed, (fault, expected) in enumerate(cases):
            trace = folder / f"trace-{seed}.csv"
            write_trace(trace, seed, RATE, options.requests)
            began = time.monotonic()
            with server.fault(fault):
                bundle = run(server, folder, trace, options.model, *mix, "--seed", str(seed))
            yield call(bundle, HEALTHY if fault is None else fault["name"], expected, began)


def simulated(options: argparse.Namespace, folder: Path) -> Iterator[Called]:
    """The faults that need no logits, on a simulated engine, once for each seed."""
    words = ["--backend", "simulated", "--device", "h100", "--model", options.model]
    with serving(folder / "server.log", *words) as server:
        for seed in range(options.seeds):
            trace = folder / f"trace-{seed}.csv"
            write_trace(trace, 100 + seed, 4 * RATE, options.requests)
            cases: Sequence[tuple[dict[str, Any] | None, str]] = ((None, NONE), *SIMULATED)
            for fault, expected in cases:
                if fault is not None and options.fault and fault["name"] not in options.fault:
                    continue
                began = time.monotonic()
                with server.fault(fault):
                    bundle = run(server, folder, trace, options.model, "--seed", str(seed))
                yield call(bundle, HEALTHY if fault is None else fault["name"], expected, began)


def matrix(found: Sequence[Called]) -> list[str]:
    """The confusion matrix: a row for each fault, a column for each kind that was called."""
    kinds = list(dict.fromkeys([NONE, *(one.expected for one in found), *(one.kind for one in found)]))
    lines = ["| fault | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for fault in dict.fromkeys(one.fault for one in found):
        own = [one for one in found if one.fault == fault]
        counts = Counter(one.kind for one in own)
        cells = [f"**{counts[k]}**" if k == own[0].expected else str(counts[k]) if counts[k] else "" for k in kinds]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--canaries", type=Path, help="recorded before on the same engine")
    parser.add_argument("--fault", nargs="*", help="only these")
    parser.add_argument("--healthy", type=int, default=4, help="runs of the healthy engine")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of the load, in each run")
    parser.add_argument("--canary-share", type=float, default=CANARY_SHARE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build/accept-faults"))
    options = parser.parse_args()
    folder = options.folder / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    (folder / "slo.yaml").write_text(SLO, encoding="utf-8")
    found: list[Called] = []
    for one in (simulated if options.simulated else real)(options, folder):
        found.append(one)
        good = "" if one.kind == one.expected else f"   <-- {one.expected} expected"
        print(f"{one.fault}: {one.kind} after {one.took_s:.0f} s, {one.labels}: {one.evidence}{good}", flush=True)
    healthy = [one for one in found if one.fault == HEALTHY]
    asked = sum(sum(one.labels.values()) for one in healthy)
    wrong = sum(one.labels["wrong"] for one in healthy)
    called = sum(one.kind == one.expected for one in found)
    print("\n" + "\n".join(matrix(found)) + "\n\n| fault | labels | evidence |\n|---|---|---|")
    for one in found:
        labels = ", ".join(f"{count} {label}" for label, count in one.labels.items() if count)
        print(f"| {one.fault} | {labels} | {one.evidence.replace('|', '/')[:240]} |")
    print(f"\n{called} of {len(found)} runs called as expected; {wrong} of {asked} healthy requests wrong")
    return 0 if called == len(found) and wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
