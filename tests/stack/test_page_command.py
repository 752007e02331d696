"""``tailspan page``: the pages alone, as the container runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from dashboards.processes import answers, choose_port

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_alone(tmp_path: Path) -> None:
    port = choose_port(0, "the page", "")
    words = [sys.executable, "-m", "tailspan", "page", "--port", str(port)]
    environment = {**os.environ, "TAILSPAN_RUNS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        while not answers(f"http://127.0.0.1:{port}/_stcore/health"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        assert not answers(f"http://127.0.0.2:{port}/_stcore/health"), "only this machine, and only its own address"
        process.terminate()
        process.wait(60)
