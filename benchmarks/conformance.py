"""Does the server do what its own OpenAPI description says?  schemathesis asks it, with right and wrong requests.

What counts: no 500, no hang, no status or body that is not described, no wrong request that is taken.  Run by
``make accept-conformance`` for long, and by the tests for a short while with a fixed seed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

REQUEST_TIMEOUT_S = 60
#: Left out: ``positive_data_acceptance`` (a described request may still exceed the context or the vocabulary, which
#: only the running server knows) and what needs a key or several operations that change something.
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
    """The schemathesis command line."""
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


def main() -> int:
    """Exit code of schemathesis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="where the server is")
    parser.add_argument("--examples", type=int, default=300, help="requests tried per operation")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # schemathesis keeps its examples in the current folder
        line = command(asked.url.rstrip("/"), examples=asked.examples, seed=asked.seed)
        return subprocess.run(line, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
