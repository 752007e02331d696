"""Run `tailspan run` in a container: ends with 0 when there is a verdict, whatever it is.

load.py run OPTIONS…      the words of the command line behind `tailspan`

Compose starts the load again when it fails (the engine is away, a bug), but a run whose SLO broke has not failed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

VERDICTS = (0, 1, 2, 3, 130)  # held, SLO broken, regression, run not valid, interrupted


def main() -> int:
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # came while the process was being started

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    process = subprocess.Popen(["tailspan", *sys.argv[1:]])
    for number in early:
        process.send_signal(number)
    code = process.wait()
    return 0 if code in VERDICTS else abs(code)


if __name__ == "__main__":
    sys.exit(main())
