"""Tell Prometheus to scrape another server: writes a file_sd file for the server at a base URL.

scrape_target.py URL[,URL] FILE      FILE lists each URL's host, port and scheme, with /metrics as the path

Then it stays until it is ended, so that the container counts as up.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit


def groups(url: str) -> list[dict[str, object]]:
    """The target groups of a base URL.  Raises ValueError for one that names no host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"TARGET is {url!r}, but must be a base URL such as http://host.docker.internal:8000")
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    labels = {"__scheme__": parts.scheme, "__metrics_path__": f"{parts.path.rstrip('/')}/metrics"}
    return [{"targets": [f"{host}:{port}"], "labels": labels}]


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 4
    try:
        found = [group for url in sys.argv[1].split(",") for group in groups(url)]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    path = Path(sys.argv[2])
    made = path.with_suffix(".tmp")
    made.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    made.replace(path)
    print(f"Prometheus scrapes {', '.join(map(str, (group['targets'] for group in found)))}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main())
