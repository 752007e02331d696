"""Run the demo many times; every run must be VALID and pass `tailspan runs check`.

Usage: python -m benchmarks.accept_demo [--runs 20] [--folder build/accept-demo]
Prints a line a run and a Markdown table at the end; exits with 1 when any run was not VALID or did not check out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("build/accept-demo"))
    options = parser.parse_args()
    tailspan = [sys.executable, "-m", "tailspan"]
    environment = {**os.environ, "UI": "0"}
    rows = []
    for i in range(options.runs):
        folder = options.folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{i:02d}"
        folder.mkdir(parents=True)
        environment["TAILSPAN_RUNS"] = str(folder)
        start = time.monotonic()
        with (folder / "demo.log").open("w") as log:
            code = subprocess.run([*tailspan, "demo"], env=environment, stdout=log, stderr=log, check=False).returncode
        took = time.monotonic() - start
        show = subprocess.run(
            [*tailspan, "runs", "show", "latest", "--json"], env=environment, capture_output=True, check=False
        )
        check = subprocess.run(
            [*tailspan, "runs", "check", "latest"], env=environment, capture_output=True, check=False
        )
        summary = json.loads(show.stdout)
        validity, counts = summary["validity"], summary["labels"]
        row = {
            "run": i + 1,
            "s": round(took),
            "demo": code,
            "validity": validity["verdict"],
            "check": check.returncode,
            **counts,
        }
        row["lag p99 ms"] = round(1e3 * validity["figures"]["lag_p99_s"], 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
    keys = list(rows[0])
    print("\n| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
    for row in rows:
        print("| " + " | ".join(str(row.get(key, 0)) for key in keys) + " |")
    good = sum(row["validity"] == "VALID" and row["check"] == 0 for row in rows)
    print(f"\n{good} of {len(rows)} VALID and checked; median {statistics.median(row['s'] for row in rows):.0f} s")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
