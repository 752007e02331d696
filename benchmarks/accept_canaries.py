"""The engine's faults, one after another, against canaries recorded on the healthy engine: what is each called?

Usage: python -m benchmarks.accept_canaries [--model smollm2] [--runs 4] [--goldens 15] [--every 3] [--fault NAME …]
Without load, by the function of ``tailspan canaries check``; under load: ``benchmarks.accept_faults``.  Records, checks
the healthy engine twice, then puts each fault in force and checks again.  ``--every``: each so-many-th question is
asked, right or wrong: of the right ones alone McNemar's test would count losses and no gains.  Prints a Markdown table;
exits with 1 where a verdict is not the expected one.  int4 weights have to be numeric drift, not broken; the healthy
engine has to be the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.faulty_server import serving
from loadgen.canaries.check import check
from loadgen.canaries.client import Client
from loadgen.canaries.record import record
from loadgen.canaries.verdict import BROKEN, NUMERIC, SAME
from models.errors import UserError

#: Fault as /debug/faults takes it -> the verdict it has to get.
FAULTS: Final[tuple[tuple[dict[str, Any], str], ...]] = (
    ({"name": "wrong_template"}, BROKEN),
    ({"name": "double_bos"}, BROKEN),
    ({"name": "other_tokenizer"}, BROKEN),
    ({"name": "sampling_ignored"}, BROKEN),
    ({"name": "output_cap", "size": 64}, BROKEN),
    ({"name": "end_suppressed"}, BROKEN),
    ({"name": "empty_output"}, BROKEN),
    ({"name": "nan_layer", "size": 12}, BROKEN),
    ({"name": "broken_cache"}, BROKEN),
    ({"name": "weights", "size": 4}, NUMERIC),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=4, help="baseline runs (the command's default is 20)")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--goldens", type=int, default=15, help="of those admitted")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--fault", nargs="*", help="only these")
    options = parser.parse_args()
    rows: list[tuple[str, str, str, str]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "server.log", "--model", options.model) as server,
    ):
        client = Client(server.url, options.model, {})
        say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
        recorded = record(client, runs=options.runs, tokens=options.tokens, say=say)
        # Every so-many-th of all of them: those that were right by luck can be lost, the others can be won.
        kept = {key: recorded.scores[key] for key in list(recorded.scores)[:: options.every]}
        step = max(1, len(recorded.goldens) // options.goldens)
        short = replace(recorded, goldens=recorded.goldens[::step][: options.goldens], scores=kept)
        admitted, left, right = len(recorded.goldens), len(recorded.left), sum(recorded.scores.values())
        print(f"{admitted} goldens admitted, {left} left out, noise {recorded.noise:.2g} nats", flush=True)
        print(f"{right} of {len(recorded.scores)} questions right", flush=True)
        for fault, expected in [(None, SAME), (None, SAME), *((f, v) for f, v in FAULTS)]:
            if fault is not None and options.fault and fault["name"] not in options.fault:
                continue
            name = "healthy" if fault is None else fault["name"]
            began = time.monotonic()
            with server.fault(fault):
                try:
                    found = check(client, short)
                    verdict, why = (
                        found.verdict,
                        "; ".join(f.said for f in found.findings if f.verdict == found.verdict),
                    )
                except UserError as problem:
                    verdict, why = BROKEN, problem.message
            rows.append((name, expected, verdict, why))
            print(f"{name}: {verdict} ({expected} expected) after {time.monotonic() - began:.0f} s: {why}", flush=True)
    print("\n| fault | expected | called | evidence |\n|---|---|---|---|")
    for name, expected, verdict, why in rows:
        print(f"| {name} | {expected} | {verdict} | {why.replace('|', '/')[:300]} |")
    called = sum(expected == verdict for _, expected, verdict, _ in rows)
    print(f"\n{called} of {len(rows)} called as expected")
    return 0 if called == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
