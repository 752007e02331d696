"""A server of ours with its faults switched on one at a time, for the checks that look for them.

Owns its life: started with ``--enable-faults`` on a free port, ended with its block.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

READY_S: Final = 300.0
APPLY_S: Final = 120.0  # packing other weights takes seconds, minutes on a busy machine
TAILSPAN: Final = (sys.executable, "-m", "tailspan")


class FaultyServer:
    """url: its address.  process: to be looked at, not ended by others."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self.process = url, process

    @contextmanager
    def fault(self, body: Mapping[str, Any] | None) -> Iterator[None]:
        """With a fault in force (as /debug/faults takes it); None: healthy."""
        if body is not None:
            self.put(body)
        try:
            yield
        finally:
            if body is not None:
                self._ask("DELETE", None)

    def put(self, body: Mapping[str, Any]) -> None:
        """A fault that stays in force to the end."""
        self._ask("PUT", body)

    def _ask(self, method: str, body: Mapping[str, Any] | None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/debug/faults", data=data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=APPLY_S) as answer:
            answer.read()


@contextmanager
def serving(log: Path, *words: str) -> Iterator[FaultyServer]:
    """``tailspan serve`` with these words; its output goes to ``log``.  SystemExit where it does not come up."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        ready = Path(folder) / "ready.json"
        command = [*TAILSPAN, "serve", "--port", "0", "--enable-faults", "--ready-file", str(ready), *words]
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            yield FaultyServer(_url(ready, process, log), process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # a drain that waits for a frozen step
                process.kill()
                process.wait()


def _url(ready: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}; see {log}")
        if ready.is_file():
            return str(json.loads(ready.read_text())["url"])
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {READY_S:.0f} s; see {log}")
