"""Does the server do what its own OpenAPI description says?  schemathesis asks it, with right and wrong requests.

Usage: python -m benchmarks.conformance [--url URL] [--examples 300] [--seed 1]
Without a URL it starts a server of its own on a tiny random model.  What counts: no 500, no hang, no status, body or
event that is not described, no wrong request that is taken.  The tests run it for a short while with a fixed seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUEST_TIMEOUT_S = 60
START_TIMEOUT_S = 120
#: Left out: ``positive_data_acceptance`` (a described request may still exceed the context, which only the running
#: server knows) and what needs a key or several operations that change something.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
)


def command(url: str, *, examples: int, seed: int) -> list[str]:
    """The schemathesis command line.  One worker: its generators recurse deeply, and a thread's stack is small."""
    return [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{url}/openapi.json",
        f"--url={url}",
        f"--checks={','.join(CHECKS)}",
        "--phases=examples,coverage,fuzzing",
        f"--max-examples={examples}",
        f"--seed={seed}",
        f"--request-timeout={REQUEST_TIMEOUT_S}",
        "--continue-on-failure",
        "--no-shrink",
        "--suppress-health-check=all",
        "--warnings=off",
        "--workers=1",
    ]


@contextmanager
def own_server(folder: Path) -> Iterator[str]:
    """A server on a tiny model with a short context (a request without a limit fills it); gives its URL."""
    from models.tiny import write_tiny

    ready = folder / "ready.json"
    model = write_tiny(folder / "tiny", max_context=64)
    options = ["--model", str(model), "--port", "0", "--ready-file", str(ready), "--no-spans", "--log-level", "error"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "engine.server", *options], cwd=ROOT, env=environment) as server:
        try:
            until = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the server did not start")
                time.sleep(0.1)
            yield str(json.loads(ready.read_text())["url"])
        finally:
            server.terminate()


def main() -> int:
    """Exit code of schemathesis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--examples", type=int, default=300, help="requests tried per operation")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()

    def run(url: str) -> int:
        line = command(url.rstrip("/"), examples=asked.examples, seed=asked.seed)
        return subprocess.run(line, cwd=folder, check=False).returncode  # it keeps its examples in the current folder

    with tempfile.TemporaryDirectory() as folder:
        if asked.url:
            return run(asked.url)
        with own_server(Path(folder)) as url:
            return run(url)


if __name__ == "__main__":
    sys.exit(main())
