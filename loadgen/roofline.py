"""How fast can this client be on this machine?  One rate after another against the native stub, until it is late.

Everything that a real run keeps is kept: rows with every chunk's moment, usage, token counts of our own, text facts.
The rows are made by the recorder as in a run: on the sender's core, where that has nothing to send, and behind the last
request; their CPU is told apart.
Bodies are ready before the start, since a run builds them ahead of time too.  A rate is held when the lag p99 is under
LAG_S, all was sent in its time, and the TTFT that the rows say is the stub's within TTFT_ERROR_S at the median.

    python -m loadgen.roofline       is the sender process (loadgen.sender) with this load in the place of a plan
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from loadgen import sender
from loadgen.bodies import CHAT, PATHS
from loadgen.job import Call, CallSource, SendSettings
from loadgen.native_stub import NativeStub
from loadgen.recover import recover
from models.errors import UserError

LAG_S: Final = 0.005
TTFT_ERROR_S: Final = 0.001
ACHIEVED: Final = 0.99
TTFT_MS: Final = 50
CHUNK_MS: Final = 10
CHUNKS: Final = 16
EVENTS: Final = CHUNKS + 3  # of a stream: the tokens, the finish, the usage and [DONE]
FIRST_RATE: Final = 500.0
LEAST_RATE: Final = 50.0  # below it the machine is no place for a load generator
START_NS: Final = 1_000_000_000  # as in a real run


@dataclass(frozen=True, slots=True)
class Step:
    """One rate (requests per second over all workers) and what became of it; times in seconds."""

    rate: float
    workers: int
    sent: int
    scheduled: int
    errors: int
    lag_p50_s: float
    lag_p99_s: float
    ttft_p50_s: float
    cpu_ratio: float  # of the busiest sender, in cores
    cpu_per_request_s: float  # of the senders
    rows_cpu_per_request_s: float  # of making the rows, which yields to the senders
    stub_late_p99_s: float

    @property
    def held(self) -> bool:
        """Was this rate held?"""
        return (
            self.lag_p99_s < LAG_S
            and self.sent >= ACHIEVED * self.scheduled
            and self.errors == 0
            and abs(self.ttft_p50_s - TTFT_MS / 1e3) < TTFT_ERROR_S
        )

    @property
    def events_per_s(self) -> float:
        return self.rate * EVENTS

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.held, "events_per_s": self.events_per_s}


class Constant:
    """Calls at a constant rate with bodies that are ready."""

    def __init__(self, rate: float, seconds: float, worker: int, workers: int) -> None:
        self._rate = rate
        self._indexes = range(worker, int(rate * seconds), workers)
        text = "The ferry leaves the harbor at six, and the last passengers run down the ramp with their bags open. "
        self._bodies = [self._body(f"{n} {text * 8}") for n in range(512)]

    @staticmethod
    def _body(text: str) -> bytes:
        body = {
            "model": "stub", "messages": [{"role": "user", "content": text}], "max_tokens": CHUNKS, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 1.0, "seed": 7,
        }  # fmt: skip
        return json.dumps(body, separators=(",", ":")).encode()

    def __len__(self) -> int:
        return len(self._indexes)

    def __iter__(self) -> Iterator[Call]:
        for n in self._indexes:
            yield Call(
                index=n,
                trace_row=n,
                klass="default",
                intended_s=n / self._rate,
                body=self._bodies[n % len(self._bodies)],
                path=PATHS[CHAT],
                input_tokens=200,
                expected_output_tokens=CHUNKS,
                prompt_tokens_expected=200,
                trace_id=f"{n + 1:032x}",
                span_id=f"{n + 1:016x}",
                sampled=False,
            )


def load(plan: Path, worker: int, workers: int) -> tuple[SendSettings, CallSource]:
    """The loader of the sender process."""
    asked = json.loads(plan.read_text(encoding="utf-8"))
    settings = SendSettings(targets=(asked["target"],), tokenizer_ref=asked["reference"])
    return settings, Constant(asked["rate"], asked["seconds"], worker, workers)


def measure(rate: float, seconds: float, reference: str, *, workers: int = 1, cpus: list[int] | None = None) -> Step:
    """Send at this rate against a stub of its own.  cpus: the senders' core, then the stub's; None: nothing pinned."""
    with (
        tempfile.TemporaryDirectory(prefix="tailspan-roofline-") as folder,
        NativeStub(cpu=cpus[1] if cpus else None, chunks=CHUNKS, ttft_ms=TTFT_MS, chunk_ms=CHUNK_MS) as stub,
    ):
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps({"target": stub.url, "rate": rate, "seconds": seconds, "reference": reference}))
        senders = [SenderProcess(cpus[0] if cpus else None) for _ in range(workers)]
        try:
            for n, one in enumerate(senders):
                one.say(cmd="prepare", plan=str(plan), worker=n, workers=workers, bundle=folder)
            scheduled = sum(one.hear("ready")["requests"] for one in senders)
            zero = time.monotonic_ns() + START_NS
            for one in senders:
                one.say(cmd="start", zero_monotonic_ns=zero)
            for one in senders:
                one.hear("progress", lambda event: bool(event["finished"]))
                one.say(cmd="stop", grace_s=5.0)
            ends = [one.hear("end") for one in senders]
        finally:
            for one in senders:
                one.close()
        recover(Path(folder))
        rows = _rows(Path(folder))
    return Step(
        rate=rate,
        workers=workers,
        sent=sum(end["sent"] for end in ends),
        scheduled=scheduled,
        errors=rows["errors"],
        lag_p50_s=max(end["lag_p50_s"] or 0.0 for end in ends),
        lag_p99_s=max(end["lag_p99_s"] or 0.0 for end in ends),
        ttft_p50_s=rows["ttft_p50_s"],
        cpu_ratio=max(end["cpu_ratio"] for end in ends),
        cpu_per_request_s=sum(end["cpu_s"] for end in ends) / max(1, scheduled),
        rows_cpu_per_request_s=sum(end["recorder_cpu_s"] or 0.0 for end in ends) / max(1, scheduled),
        stub_late_p99_s=stub.report.get("late_us_p99", 0) / 1e6,
    )


def search(
    reference: str,
    seconds: float,
    budget_s: float,
    tell: Callable[[Step], None],
    *,
    workers: int = 1,
    precision: float = 0.06,
) -> tuple[Step | None, list[Step]]:
    """The highest rate held: doubled until one is not, then halved in between while there is time.

    precision: how near the rate held and the rate not held must come, as a share of the latter.
    """
    available = sorted(os.sched_getaffinity(0))
    cpus = available[:2] if len(available) >= 2 else None
    began = time.monotonic()
    steps: list[Step] = []
    best: Step | None = None
    low, high, rate = 0.0, 0.0, FIRST_RATE
    cost = 0.0
    while time.monotonic() - began + cost < budget_s:
        since = time.monotonic()
        step = measure(rate, seconds, reference, workers=workers, cpus=cpus)
        cost = time.monotonic() - since
        steps.append(step)
        tell(step)
        if step.held:
            low, best = rate, step
        else:
            high = rate
            if rate <= LEAST_RATE:
                break
        if high and high - low <= precision * high:
            break
        rate = rate * 2 if not high else (low + high) / 2
    return best, steps


def _rows(folder: Path) -> dict[str, Any]:
    from telemetry.parts import read_table
    from telemetry.schema import REQUESTS

    table = read_table(folder / "requests", REQUESTS, ["first_token_s", "sent_s", "error"]).table
    first, sent = (table.column(name).to_numpy() for name in ("first_token_s", "sent_s"))
    ttft = float(np.nanmedian(first - sent)) if len(first) else float("nan")
    return {"ttft_p50_s": ttft, "errors": table.num_rows - table.column("error").null_count}


class SenderProcess:
    """A sender process, spoken to as its Locust worker would; module: this one's load, or loadgen.sender for a plan."""

    def __init__(self, cpu: int | None, module: str = "loadgen.roofline") -> None:
        root = str(Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        self.pid = self._process.pid
        if cpu is not None:
            os.sched_setaffinity(self.pid, {cpu})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout

    def say(self, **words: Any) -> None:
        self._in.write(json.dumps(words).encode() + b"\n")
        self._in.flush()

    def hear(self, kind: str, until: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, Any]:
        for line in self._out:
            event: dict[str, Any] = json.loads(line)
            if event["ev"] == "error":
                raise UserError(event["message"], where=event["where"], remedy=event["remedy"])
            if event["ev"] == kind and until(event):
                return event
        raise RuntimeError("the sender ended without a word")

    def close(self) -> None:
        self._in.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()


if __name__ == "__main__":
    sys.exit(sender.main(load))
