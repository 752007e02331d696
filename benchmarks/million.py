"""A million requests through one worker: does its memory stay flat?

Usage: python -m benchmarks.million [--requests 1000000] [--rate 2500] [--after 50000] [--grow 50]

One sender with everything a run keeps, against the native stub with 4 tokens an answer.  Resident memory of the sender
and of the recorder that makes its rows is read each second; their sum may grow by `--grow` MB after the first `--after`
requests.  Exits with 1 if it grows more or rows are lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow.ipc as ipc

from loadgen.native_stub import NativeStub
from loadgen.recover import recover
from loadgen.roofline import SenderProcess
from models.tiny import write_tiny


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=2500.0)
    parser.add_argument("--after", type=int, default=50_000)
    parser.add_argument("--grow", type=float, default=50.0, help="MB")
    asked = parser.parse_args()
    samples: list[tuple[int, float, float]] = []  # (requests done, MB of the sender, MB of its recorder)
    with (
        tempfile.TemporaryDirectory(prefix="tailspan-million-") as name,
        NativeStub(chunks=4, ttft_ms=5, chunk_ms=2) as stub,
    ):
        folder = Path(name)
        (folder / "tiny").mkdir()
        plan = folder / "plan.json"
        words = {"target": stub.url, "rate": asked.rate, "seconds": asked.requests / asked.rate}
        plan.write_text(json.dumps({**words, "reference": str(write_tiny(folder / "tiny"))}))
        sender = SenderProcess(None)
        process = psutil.Process(sender.pid)
        try:
            sender.say(cmd="prepare", plan=str(plan), worker=0, workers=1, bundle=name)
            scheduled = sender.hear("ready")["requests"]
            (recorder,) = process.children()
            sender.say(cmd="start", zero_monotonic_ns=time.monotonic_ns() + 300_000_000)

            def sample(event: dict[str, object]) -> bool:
                own, rows = (one.memory_info().rss / 1e6 for one in (process, recorder))
                samples.append((int(str(event["done"])), own, rows))
                if len(samples) % 30 == 0:
                    print(f"   {samples[-1][0]:,} done, {own:.1f} MB, recorder {rows:.1f} MB", flush=True)
                return bool(event["finished"])

            sender.hear("progress", sample)
            sender.say(cmd="stop", grace_s=5.0)
            end = sender.hear("end")
        finally:
            sender.close()
        recover(folder)
        rows = 0
        for part in (folder / "requests").glob("*.arrow"):
            with ipc.open_stream(part) as stream:
                rows += sum(batch.num_rows for batch in stream)
    base = next((one for one in samples if one[0] >= asked.after), samples[-1])
    grown = max(sum(one[1:]) for one in samples if one[0] >= base[0]) - sum(base[1:])
    holds = grown < asked.grow and rows == scheduled == end["done"]
    print(
        f"{scheduled:,} requests at {asked.rate:,.0f}/s, {rows:,} rows, {base[1]:.1f} MB and {base[2]:.1f} MB of the "
        f"recorder after {asked.after:,}, grown by {grown:.1f} MB since; lag p99 {end['lag_p99_s'] * 1e3:.2f} ms: "
        f"{'holds' if holds else 'does NOT hold'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
