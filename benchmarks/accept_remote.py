"""A worker on another host behind a bad line: does every one of its rows arrive, and what it sent was the plan?

Usage: python -m benchmarks.accept_remote [--delay-ms 40] [--jitter-ms 20] [--loss 0.02] [--outage 3]
       [--duration 30] [--tunnel]

Two network namespaces and a link between them that delays and loses packets (benchmarks.lossy_link).  The master and
one worker are in one, the other worker in the other; each has a native stub on the same loopback address, so that the
control connection alone crosses the line.  Holds when the run is complete, every request has one row, both workers
sent their halves, each stub's log has as many arrivals as its worker has rows, the bundle checks out, the clocks of the
two (which are one) differ by no more than the line explains, and packets were lost.  Exits with 1 when one does not.
The exit code of the run is not judged: the stub counts tokens in a way of its own, and a busy machine sends late.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lossy_link import NEAR_HOST, LossyLink
from loadgen.native_stub import built
from models.tiny import write_tiny
from telemetry.bundle import COMPLETE, Bundle, newest

ROOT = Path(__file__).resolve().parents[1]
PORT, MASTER_PORT = 8437, 5557  # in namespaces of their own: nothing else is there
TAILSPAN = (sys.executable, "-m", "tailspan")


def started(namespace: str, folder: Path, command: list[str], **pipes: Any) -> subprocess.Popen[str]:
    """A command in a namespace and a folder."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(LossyLink.inside(namespace, command), cwd=folder, env=environment, text=True, **pipes)


def tunnelled(link: LossyLink, folder: Path, sshd: str) -> list[subprocess.Popen[str]]:
    """An SSH server in the near namespace, and in the far one the tunnel of docs/load-generator.md to it."""
    keys = {name: folder / name for name in ("host_key", "user_key")}
    for key in keys.values():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (folder / "authorized").write_text(keys["user_key"].with_suffix(".pub").read_text())
    config = {"ListenAddress": NEAR_HOST, "HostKey": keys["host_key"], "AuthorizedKeysFile": folder / "authorized"}
    config |= {"StrictModes": "no", "UsePAM": "no", "PidFile": "none", "PermitRootLogin": "prohibit-password"}
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in config.items()))
    Path("/run/sshd").mkdir(exist_ok=True)  # where it keeps nothing
    server = started(link.near, folder, [sshd, "-D", "-e", "-f", str(folder / "sshd_config")])
    time.sleep(1.0)
    trust = ["-i", str(keys["user_key"]), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    way = ["ssh", "-N", "-L", f"{MASTER_PORT}:127.0.0.1:{MASTER_PORT}", *trust, NEAR_HOST]
    return [server, started(link.far, folder, way)]


def run(link: LossyLink, folder: Path, rate: float, duration: float, sshd: str | None) -> tuple[int, dict[str, int]]:
    """The run; returns its exit code and the arrivals that each stub logged.  sshd: through a tunnel of this server."""
    model = write_tiny(folder / "model") if not (folder / "model").exists() else folder / "model"
    stubs, logs = {}, {name: folder / f"{name}.log" for name in ("near", "far")}
    stub = [str(built()), "--port", str(PORT), "--ttft-ms", "20", "--chunk-ms", "5", "--chunks", "8"]
    load = ["--arrivals", f"poisson:rate={rate:g}", "--duration", f"{duration:g}", "--keep-text", "all"]
    load += ["--trace", "synthetic-conv", "--length-scale", "0.1", "--otlp-port", "0", "--runs", str(folder / "runs")]
    host, plain = (NEAR_HOST, ["--unencrypted"]) if sshd is None else ("127.0.0.1", [])
    workers = ["--workers", "1", "--remote-workers", "1", "--bind", f"{host}:{MASTER_PORT}", *plain]
    tunnel: list[subprocess.Popen[str]] = []
    target = ["--target", f"http://127.0.0.1:{PORT}", "--model", str(model)]
    try:
        for name, namespace in (("near", link.near), ("far", link.far)):
            words = [*stub, "--log", str(logs[name])]
            stubs[name] = started(namespace, folder, words, stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        master = started(link.near, folder / "near", [*TAILSPAN, "run", *target, *load, *workers])
        if sshd is not None:
            tunnel = tunnelled(link, folder, sshd)
        far = ["worker", "--master", f"{host}:{MASTER_PORT}", *plain]
        worker = started(link.far, folder / "far", [*TAILSPAN, *far])
        code = master.wait(duration * 3 + 240)
        worker.wait(60)
    finally:
        for process in (*stubs.values(), *tunnel):
            process.terminate()
            process.wait(10)
    return code, {name: len(log.read_text(encoding="ascii").splitlines()) for name, log in logs.items()}


def judged(
    bundle: Bundle, code: int, arrivals: dict[str, int], link: LossyLink, way_s: float
) -> list[tuple[str, str, bool]]:
    """(what, measured, does it hold) of each demand.  way_s: the longest that one way takes without loss."""
    rows = bundle.table("requests").to_pylist()
    indexes = Counter(row["index"] for row in rows)
    by_worker = Counter(row["worker"] for row in rows)
    planned = bundle.manifest["plan"]["requests"]
    half = {0: (planned + 1) // 2, 1: planned // 2}
    check = subprocess.run(
        [*TAILSPAN, "runs", "check", str(bundle.path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    clocks = [abs(int(one["clock"]["offset_ns"])) / 1e9 for one in bundle.manifest["workers"] if one.get("clock")]
    sent = sum(row["sent_s"] is not None for row in rows)
    return [
        (f"status (exit code {code})", str(bundle.manifest["status"]), bundle.manifest["status"] == COMPLETE),
        ("rows of requests planned", f"{len(rows):,} of {planned:,}", len(rows) == planned == len(indexes)),
        ("rows of each worker", json.dumps(by_worker), dict(by_worker) == half),
        ("arrivals at each stub", json.dumps(arrivals), sorted(arrivals.values()) == sorted(half.values())),
        ("sent and answered", f"{sent:,}", sent == planned and all(row["error"] is None for row in rows)),
        ("texts shipped", str(sum(bool(row["text"]) for row in rows)), all(row["text"] for row in rows)),
        ("tailspan runs check", (check.stdout.strip().splitlines() or [""])[-1], check.returncode == 0),
        ("clock offset found (true: 0)", f"{max(clocks) * 1e3:.1f} ms", bool(clocks) and max(clocks) <= way_s / 2),
        ("packets carried, lost", f"{link.carried:,}, {link.lost:,}", link.lost > 0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=40.0)
    parser.add_argument("--jitter-ms", type=float, default=20.0)
    parser.add_argument("--loss", type=float, default=0.02)
    parser.add_argument("--outage", type=float, default=3.0, help="seconds without any packet, from 25 s on; 0: none")
    parser.add_argument("--tunnel", action="store_true", help="through ssh -L, with Debian's openssh-server")
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--duration", type=float, default=30.0)
    asked = parser.parse_args()
    sshd = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"])) if asked.tunnel else None
    if asked.tunnel and sshd is None:
        print("no sshd here: apt-get install openssh-server")
        return 1
    outage = (25.0, asked.outage) if asked.outage else None
    with (
        tempfile.TemporaryDirectory(prefix="tailspan-remote-") as name,
        LossyLink(delay_s=asked.delay_ms / 1e3, jitter_s=asked.jitter_ms / 1e3, loss=asked.loss, outage=outage) as link,
    ):
        folder = Path(name)
        code, arrivals = run(link, folder, asked.rate, asked.duration, sshd)
        path = newest(folder / "runs")
        if path is None:
            print(f"exit code {code}, and no bundle: does not hold")
            return 1
        held = judged(Bundle.open(path), code, arrivals, link, (asked.delay_ms + asked.jitter_ms) / 1e3)
    print("\n| what | measured | holds |\n|---|---|---|")
    for what, measured, holds in held:
        print(f"| {what} | {measured} | {'yes' if holds else 'NO'} |")
    return 0 if all(holds for _, _, holds in held) else 1


if __name__ == "__main__":
    sys.exit(main())
