"""Run all tests, in two lanes side by side: a run under test waits for its own clock half of the time.

Usage: python scripts/test_all.py [PYTEST OPTIONS]

The first lane prints as it goes.  The second one has the folders of BESIDE, which compute and start no load, at the
lowest priority, so that it takes no time from the first; what it printed follows at the end.  Ends with the worse of
both statuses; Ctrl-C ends both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BESIDE: Final = ("tests/kernels", "tests/engine", "tests/telemetry", "tests/models", "tests/adapters", "tests/canaries")
LOWEST: Final = 19


def main(options: list[str]) -> int:
    """Run both lanes to their end; returns the exit status."""
    pytest = [sys.executable, "-m", "pytest", *options]
    with tempfile.TemporaryFile() as printed:
        second = subprocess.Popen(
            [*pytest, "-p", "no:cacheprovider", *BESIDE], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(LOWEST),
        )  # fmt: skip
        first = subprocess.Popen([*pytest, "tests", *(f"--ignore={folder}" for folder in BESIDE)], cwd=ROOT)
        try:
            status, other = first.wait(), second.wait()
        except KeyboardInterrupt:  # the terminal told them as well
            first.wait()
            second.wait()
            return 130
        print(f"== beside these: {' '.join(BESIDE)}", flush=True)
        printed.seek(0)
        sys.stdout.buffer.write(printed.read())
        sys.stdout.flush()
    return max(status, other, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
