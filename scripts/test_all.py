"""Run all tests, in lanes side by side: a run under test waits for its own clock half of the time.

Usage: python scripts/test_all.py [PYTEST OPTIONS]

The first lane, which holds a load generator to its times, prints as it goes.  Those of BESIDE have lower priorities, so
that they take no time from it; what they printed follows at the end.  Ends with the worst status; Ctrl-C ends all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: Niceness and folders of each lane: those that compute and start no load.
BESIDE: Final = (
    (
        19,
        (
            "tests/kernels", "tests/engine", "tests/telemetry", "tests/models", "tests/adapters", "tests/canaries",
            "tests/lab", "tests/watch", "tests/commands",
        ),
    ),
)  # fmt: skip


def main(options: list[str]) -> int:
    """Run all lanes to their end; returns the exit status."""
    pytest = [sys.executable, "-m", "pytest", *options]
    with ExitStack() as stack:
        lanes = []
        for niceness, folders in BESIDE:
            printed = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [*pytest, "-p", "no:cacheprovider", *folders], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT,
                preexec_fn=lambda by=niceness: os.nice(by),
            )  # fmt: skip
            lanes.append((process, folders, printed))
        others = [f"--ignore={folder}" for _, folders in BESIDE for folder in folders]
        first = subprocess.Popen([*pytest, "tests", *others], cwd=ROOT)
        processes = [first, *(process for process, _, _ in lanes)]
        try:
            statuses = [process.wait() for process in processes]
        except KeyboardInterrupt:  # the terminal told them as well
            for process in processes:
                process.wait()
            return 130
        for _, folders, printed in lanes:
            print(f"== beside these: {' '.join(folders)}", flush=True)
            printed.seek(0)
            sys.stdout.buffer.write(printed.read())
            sys.stdout.flush()
    return max(statuses, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
