"""Run all tests, in two lanes side by side: a run under test waits for its own clock half of the time.

Usage: python scripts/test_all.py [PYTEST OPTIONS]

The first lane, which holds a load generator to its times, prints as it goes.  What only computes (BESIDE) runs at the
lowest priority, so that it takes no time from it; what it printed follows at the end.  Ends with the worse status;
Ctrl-C ends both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BESIDE: Final = tuple(
    f"tests/{name}"
    for name in ("kernels", "engine", "telemetry", "models", "adapters", "canaries", "lab", "watch", "commands")
)
LOWEST: Final = 19


def main(options: list[str]) -> int:
    """Run both lanes to their end; returns the exit status."""
    pytest = [sys.executable, "-m", "pytest", *options]
    print(f"== beside these, told at the end: {' '.join(BESIDE)}", flush=True)
    with tempfile.TemporaryFile() as printed:
        beside = subprocess.Popen(
            [*pytest, "-p", "no:cacheprovider", *BESIDE], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(LOWEST),
        )  # fmt: skip
        first = subprocess.Popen([*pytest, "tests", *(f"--ignore={folder}" for folder in BESIDE)], cwd=ROOT)
        try:
            status = first.wait()
            if beside.poll() is None:
                print("== waiting for those beside", flush=True)
            status = max(status, beside.wait(), key=abs)
        except KeyboardInterrupt:  # the terminal told them as well
            first.wait()
            beside.wait()
            return 130
        print("== those beside", flush=True)
        printed.seek(0)
        sys.stdout.buffer.write(printed.read())
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
