"""The native stub server: compiled once into the cache, started on a free port, its own account read at the end.

It streams on an absolute schedule with less than a tenth of the sender's cost per event, so that what is measured
against it is the sender.  Options are at the top of native/sse_stub.c.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from models.compiled import compiled

SOURCE: Final = Path(__file__).parent / "native" / "sse_stub.c"
FLAGS: Final = ("-O2", "-Wall", "-Wextra")
HOST: Final = "127.0.0.1"
START_S: Final = 5.0


def built() -> Path:
    """The stub's program.  Raises UserError where it cannot be compiled."""
    return compiled(SOURCE, FLAGS)


class NativeStub:
    """A running stub.  options: of the program, "ttft_ms" for --ttft-ms.  report: its account, once it has ended."""

    def __init__(self, *, cpu: int | None = None, **options: Any) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = int(probe.getsockname()[1])
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self._command = [str(built()), "--port", str(self.port), *flags]
        self._cpu = cpu
        self._process: subprocess.Popen[str] | None = None
        self.report: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> NativeStub:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        if self._cpu is not None:
            os.sched_setaffinity(self._process.pid, {self._cpu})
        end = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((HOST, self.port), timeout=0.2).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end:
                    self._process.kill()
                    raise RuntimeError("the stub does not start") from None
                time.sleep(0.01)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            out, _ = self._process.communicate(timeout=10)
            self.report = json.loads(out)
        except (subprocess.TimeoutExpired, ValueError):
            self._process.kill()
            self._process.communicate()
