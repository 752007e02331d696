"""`tailspan worker`: one more sender for a run whose master is on another machine.

It gets plan and trace from the master and sends its rows back; nothing is left here.  The reference model must be known
here by the name that the plan gives (a known model is pulled).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def worker_command(
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the master of `tailspan run` listens.")],
    unencrypted: Annotated[
        bool, typer.Option("--unencrypted", help="Let --master be an address of a network: all goes in plain text.")
    ] = False,
) -> int:
    """Send a part of a run whose master is on another machine: tailspan run --remote-workers N."""
    from loadgen.control.remote import REMOTE_VARIABLE
    from loadgen.locust_runner import LOCUSTFILE, ROOT, address_of, checked_network
    from telemetry.names import EXIT_OK, EXIT_RUN_NOT_VALID

    host, port = address_of(master, "--master")
    checked_network(host, "--master", unencrypted)
    with tempfile.TemporaryDirectory(prefix="tailspan-worker-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_")} | {
            "PYTHONPATH": path,
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            REMOTE_VARIABLE: "1",
            "TAILSPAN_BUNDLE": name,
            "TAILSPAN_PLAN": str(folder / "plan.json"),
            "TAILSPAN_WORKER": "remote",
        }
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--worker", "--headless", "--only-summary"]
        where = ["--master-host", host, "--master-port", str(port)]
        log = folder / "logs" / "locust.log"
        print(f"waiting for the run of {host}:{port} (Ctrl-C ends this worker)", flush=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *where],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment,
                cwd=folder / "logs",
            )
            try:
                status = process.wait()
            finally:
                assert process.stdin is not None
                process.stdin.close()  # means: end, and write your last rows
                process.wait()
        if status:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
            print("\n".join(tail), file=sys.stderr)
        return EXIT_OK if status == 0 else EXIT_RUN_NOT_VALID
