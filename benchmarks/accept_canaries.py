"""The engine's faults, one after another, against canaries recorded on the healthy engine: what is each called?

Usage: python -m benchmarks.accept_canaries [--model smollm2] [--runs 4] [--goldens 15] [--every 3] [--fault NAME …]
Starts ``tailspan serve --enable-faults``, records, checks the healthy engine twice, then puts each fault in force and
checks again.  ``--every``: each so-many-th of the questions that were right is asked.  Prints a Markdown table; exits
with 1 where a verdict is not the expected one.  int4 weights have to be numeric drift, not broken; the healthy engine
has to be the same.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from loadgen.canaries.check import BROKEN, NUMERIC, SAME, check
from loadgen.canaries.client import Client
from loadgen.canaries.record import record
from models.errors import UserError

#: Fault as /debug/faults takes it -> the verdict it has to get.
FAULTS: Final[tuple[tuple[dict[str, Any], str], ...]] = (
    ({"name": "wrong_template"}, BROKEN),
    ({"name": "double_bos"}, BROKEN),
    ({"name": "other_tokenizer"}, BROKEN),
    ({"name": "sampling_ignored"}, BROKEN),
    ({"name": "output_cap", "size": 64}, BROKEN),
    ({"name": "empty_output"}, BROKEN),
    ({"name": "nan_layer", "size": 12}, BROKEN),
    ({"name": "broken_cache"}, BROKEN),
    ({"name": "weights", "size": 4}, NUMERIC),
)
READY_S: Final = 180.0


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
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        words = [sys.executable, "-m", "tailspan", "serve", "--model", options.model, "--port", "0", "--enable-faults"]
        with (Path(folder) / "server.log").open("w") as log:
            server = subprocess.Popen([*words, "--ready-file", str(ready)], stdout=log, stderr=log)
        try:
            url = _wait(ready, server)
            client = Client(url, options.model, {})
            say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
            recorded = record(client, runs=options.runs, tokens=options.tokens, say=say)
            right_ones = [key for key, right in recorded.scores.items() if right]  # the others could not be lost
            kept = dict.fromkeys(right_ones[:: options.every], True)
            step = max(1, len(recorded.goldens) // options.goldens)
            short = replace(recorded, goldens=recorded.goldens[::step][: options.goldens], scores=kept)
            admitted, left, right = len(recorded.goldens), len(recorded.left), sum(recorded.scores.values())
            print(f"{admitted} goldens admitted, {left} left out, noise {recorded.noise:.2g} nats", flush=True)
            print(f"{right} of {len(recorded.scores)} questions right", flush=True)
            wanted = [(None, SAME), (None, SAME), *((f, v) for f, v in FAULTS)]
            for fault, expected in wanted:
                if fault is not None and options.fault and fault["name"] not in options.fault:
                    continue
                name = "healthy" if fault is None else fault["name"]
                if fault is not None:
                    _faults(url, "PUT", fault)
                began = time.monotonic()
                try:
                    found = check(client, short)
                    verdict, why = found.verdict, "; ".join(s for k, s in found.findings if k == found.verdict)
                except UserError as problem:
                    verdict, why = BROKEN, problem.message
                if fault is not None:
                    _faults(url, "DELETE", None)
                rows.append((name, expected, verdict, why))
                print(
                    f"{name}: {verdict} ({expected} expected) after {time.monotonic() - began:.0f} s: {why}", flush=True
                )
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    print("\n| fault | expected | called | evidence |\n|---|---|---|---|")
    for name, expected, verdict, why in rows:
        print(f"| {name} | {expected} | {verdict} | {why.replace('|', '/')[:300]} |")
    called = sum(expected == verdict for _, expected, verdict, _ in rows)
    print(f"\n{called} of {len(rows)} called as expected")
    return 0 if called == len(rows) else 1


def _wait(ready: Path, server: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}")
        if ready.is_file():
            return str(json.loads(ready.read_text())["url"])
        time.sleep(0.2)
    raise SystemExit("the server was not ready in time")


def _faults(url: str, method: str, fault: dict[str, Any] | None) -> None:
    data = None if fault is None else json.dumps(fault).encode()
    request = urllib.request.Request(f"{url}/debug/faults", data=data, method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
