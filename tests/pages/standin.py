"""Stands in for ``python -m tailspan`` where a test is about starting and ending processes, not about what they do.

``serve`` writes the ready file and sleeps, ``models pull`` says one line, ``run`` exits with $STANDIN_RUN (a number, or
``sleep``: it writes its pid to $STANDIN_PIDS and, on SIGINT, exits with 130 as the real one does).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    with Path(os.environ["STANDIN_PIDS"]).open("a") as file:
        file.write(f"{words[0]} {os.getpid()}\n")
    if words[0] == "models":
        print(f"stand-in: {' '.join(words)}")
        return int(os.environ.get("STANDIN_PULL", "0"))
    if words[0] == "serve":
        if os.environ.get("STANDIN_SERVE") == "fail":
            print("error: --model: no model of that name")
            return 4
        options = dict(zip(words[1::2], words[2::2], strict=True))
        ready = Path(options["--ready-file"])
        ready.with_suffix(".new").write_text(json.dumps({"url": f"http://127.0.0.1:{options['--port']}"}))
        ready.with_suffix(".new").rename(ready)
        time.sleep(600)
    if os.environ["STANDIN_RUN"] == "sleep":
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        print("stand-in: run goes on", flush=True)
        time.sleep(600)
    print(f"stand-in: {' '.join(words)}")
    return int(os.environ["STANDIN_RUN"])


sys.exit(main(sys.argv[1:]))
