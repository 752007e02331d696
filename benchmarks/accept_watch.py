"""`tailspan watch` beside a real server for an hour, with a fault in the middle: is it seen in time and named?

Usage: python -m benchmarks.accept_watch [--minutes 60] [--rate 3] [--fault slow_step:40]

A simulated engine (llama-3.1-8b on an A100, spans on) serves a steady Poisson load as production does; half-way the
fault is switched on over /debug/faults and stays for a fifth of the time.  Passed when the breach is called within two
minutes of the fault, its comparison says *late* and names the fault's cause, memory grows by less than 64 MB after
the quiet first half, and the windows stay below the disk limit.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
SEEN_S = 120.0
GROWTH_MB = 64.0
DISK_MB = 256
CAUSES = {"slow_step": "engine_speed", "stalled_loop": "host_stall"}
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SLO = """\
name: watched
classes:
  default: {ttft: {base_s: 5.0}}
objectives:
  - tpot p90 <= BOUND ms
  - dropped <= 5 %
"""


def post(url: str, body: dict[str, Any], method: str = "POST") -> int:
    """Status of a request; 0 without an answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except OSError:
        return 0


class Load:
    """Users that ask at random moments, each in a thread of its own; bounded in number."""

    def __init__(self, url: str, model: str, rate: float) -> None:
        self._url, self._model, self._rate = url, model, rate
        self._stop = threading.Event()
        self._places = threading.Semaphore(64)
        self.sent = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        draw = random.Random(1)
        while not self._stop.wait(draw.expovariate(self._rate)):
            if self._places.acquire(blocking=False):
                self.sent += 1
                words = " ".join(f"word{draw.randrange(1000)}" for _ in range(draw.randrange(30, 200)))
                threading.Thread(target=self._ask, args=(words, draw.randrange(20, 90)), daemon=True).start()

    def _ask(self, words: str, tokens: int) -> None:
        try:
            body = {"model": self._model, "messages": [{"role": "user", "content": words}], "max_tokens": tokens}
            post(f"{self._url}/v1/chat/completions", {**body, "ignore_eos": True})
        finally:
            self._places.release()

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def served(folder: Path, otlp: int) -> tuple[subprocess.Popen[bytes], str]:
    """The server, its spans going to the watch."""
    ready = folder / "ready.json"
    words = ["serve", "--backend", "simulated", "--device", "a100", "--model", "llama-3.1-8b", "--port", "0"]
    words += ["--enable-faults", "--ready-file", str(ready), "--log-level", "error", "--max-batch", "32"]
    words += ["--token-budget", "512", "--otlp-endpoint", f"http://127.0.0.1:{otlp}"]
    process = subprocess.Popen([sys.executable, "-m", "tailspan", *words], cwd=ROOT)
    end = time.monotonic() + 180
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit("the server did not start")
        time.sleep(0.2)
    return process, str(json.loads(ready.read_text())["url"])


def breaches(folder: Path) -> list[dict[str, Any]]:
    """What lies in the folder of breaches, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("breaches/*/breach.json"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--fault", default="slow_step:40", help="NAME:SIZE of tailspan serve's faults")
    parser.add_argument("--bound-ms", type=float, default=40.0, help="of the time per output token, p90")
    options = parser.parse_args()
    name, _, size = options.fault.partition(":")
    length = 60 * options.minutes
    folder = Path(tempfile.mkdtemp(prefix="accept-watch-"))
    slo = folder / "slo.yaml"
    slo.write_text(SLO.replace("BOUND", f"{options.bound_ms:g}"))
    from benchmarks.engine_peers import free_port

    otlp, metrics = free_port(), free_port()
    server, url = served(folder, otlp)
    watch: subprocess.Popen[bytes] | None = None
    memory: list[tuple[float, float]] = []
    disk = 0.0
    fault_unix = 0
    try:
        words = ["watch", "--target", url, "--slo", str(slo), "--runs", str(folder / "w"), "--otlp-port", str(otlp)]
        words += ["--metrics-port", str(metrics), "--period", f"{max(30.0, length / 6):g}", "--disk-mb", str(DISK_MB)]
        words += ["--look", f"{min(60.0, length / 20):g}", "--duration", f"{length:g}", "--keep", "8"]
        watch = subprocess.Popen([sys.executable, "-m", "tailspan", *words], cwd=ROOT)
        began = time.monotonic()
        with Load(url, "llama-3.1-8b", options.rate) as load:
            while watch.poll() is None and time.monotonic() - began < length + 120:
                at = time.monotonic() - began
                if not fault_unix and at >= length / 2:
                    fault_unix = time.time_ns()
                    post(f"{url}/debug/faults", {"name": name, "size": float(size)}, "PUT")
                    print(f"== {at:.0f} s: {options.fault} is on", flush=True)
                if fault_unix and length * 0.7 <= at < length * 0.7 + 1:
                    post(f"{url}/debug/faults?name={name}", {}, "DELETE")
                memory.append((at, psutil.Process(watch.pid).memory_info().rss / 2**20))
                disk = max(disk, sum(f.stat().st_size for f in (folder / "w" / "windows").rglob("*.parquet")) / 2**20)
                time.sleep(1.0)
        found = breaches(folder / "w")
        after = [one for one in found if one["seen_unix_ns"] >= fault_unix]
        seen = (after[0]["seen_unix_ns"] - fault_unix) / 1e9 if after else float("inf")
        told = (after[0].get("explanation") or {}) if after else {}
        cause = told.get("cause")
        # several windows have closed by then, and nothing has happened yet
        base = max(mb for at, mb in memory if at < 0.45 * length)
        growth = max(mb for _, mb in memory) - base
        early = len(found) - len(after)
        print(f"{load.sent} requests in {options.minutes:g} minutes; {len(found)} breaches, {early} before the fault")
        print(f"the fault was seen after {seen:.0f} s ({SEEN_S:.0f} allowed): {told.get('label')} · {cause}")
        print(f"memory {base:.0f} MB before the fault, grew by {growth:.0f} MB ({GROWTH_MB:.0f} allowed)")
        print(f"windows {disk:.1f} MB of {DISK_MB}")
        good = seen <= SEEN_S and not early and told.get("label") == "late" and cause == CAUSES.get(name)
        good = good and growth < GROWTH_MB and disk < DISK_MB
        print("passed" if good else f"FAILED; see {folder}")
        if good:
            shutil.rmtree(folder, ignore_errors=True)
        return 0 if good else 1
    finally:
        for process in (watch, server):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
