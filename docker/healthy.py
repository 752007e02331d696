"""The health check of our containers: exit code 0 when the part does its work, 1 with a reason otherwise.

healthy.py answers URL      an HTTP server here answers 200
healthy.py connected PORT   some process here holds a TCP connection to that port of another machine

Needs nothing but Python; must be fast, since it runs every few seconds beside a measurement.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

ESTABLISHED = "01"  # of /proc/net/tcp


def answers(url: str) -> str | None:
    """What is wrong with the server at ``url``; None when it answers 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=3) as reply:
            return None if reply.status == 200 else f"{url} answered {reply.status}"
    except OSError as error:
        return f"{url}: {error}"


def connected(port: int, tables: tuple[str, ...] = ("/proc/net/tcp", "/proc/net/tcp6")) -> str | None:
    """What is wrong; None while a connection to ``port`` is established."""
    for table in tables:
        lines = Path(table).read_text(encoding="ascii").splitlines()[1:] if Path(table).exists() else []
        for line in lines:
            _, _, remote, state, *_ = line.split()
            if state == ESTABLISHED and int(remote.rpartition(":")[2], 16) == port:
                return None
    return f"no connection to port {port}"


def main() -> int:
    match sys.argv[1:]:
        case ["answers", url]:
            wrong = answers(url)
        case ["connected", port] if port.isdecimal():
            wrong = connected(int(port))
        case _:
            wrong = "usage: healthy.py answers URL | connected PORT"
    if wrong is not None:
        print(wrong)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
