"""What a run in virtual time shows: latencies, phases, steps, floors, KV use, and whether Little's law holds.

Everything is counted inside one window of the run, so that filling up and draining do not count as the load.

    Little's law    L = lambda W       L from arrivals and the step log (when who was where)
                                       lambda and W from the requests' phase clocks
Two accounts of the same run that share nothing but the clock: where they differ, one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.phase_clock import PhaseClock
from engine.request import LENGTH, STOP
from engine.steplog import StepRecord
from engine.virtual import Life
from telemetry.names import PHASES, QUEUE

PERCENTILES: Final = (50.0, 90.0, 99.0)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Little:
    """residents: mean number there, by the step log.  rate_times_stay: arrivals/s times mean stay, by the clocks."""

    residents: float
    rate_times_stay: float

    @property
    def error(self) -> float:
        """How far apart, as a share of the first."""
        return abs(self.rate_times_stay / self.residents - 1.0) if self.residents else abs(self.rate_times_stay)


@dataclass(frozen=True, slots=True)
class Steps:
    """Of the steps in the window.  Times in seconds; shares 0 .. 1 of the time in steps.

    efficiency: floors over durations.  walls: share of the time by what bounds a step's floor, overhead where most
    of its time lies beyond it.
    """

    count: int
    mean_s: float
    p99_s: float
    batch: float
    prefill_tokens: float
    floor_s: float
    efficiency: float
    walls: dict[str, float]


@dataclass(frozen=True, slots=True)
class Tally:
    """window_s: its length.  Per request that arrived in it and was answered: seconds; kv: share of the pool in use.

    latencies: measure -> percentiles (PERCENTILES).  phases: mean seconds.  floor_ttft_s, floor_tpot_s: medians of
    the floors of requests, alone on the device.
    """

    window_s: float
    arrived: int
    answered: int
    refused: int
    preemptions: int
    latencies: dict[str, tuple[float, ...]]
    phases: dict[str, float]
    kv_mean: float
    kv_peak: float
    steps: Steps
    queue: Little
    system: Little
    floor_ttft_s: float
    floor_tpot_s: float

    def text(self) -> str:
        """For people: Markdown."""
        rows = [f"| {'measure':<10} | " + " | ".join(f"p{p:g}" for p in PERCENTILES) + " |", "|---|---|---|---|"]
        for measure, values in self.latencies.items():
            rows.append(f"| {measure} | " + " | ".join(f"{1e3 * value:.1f} ms" for value in values) + " |")
        total = sum(self.phases.values())
        phases = ", ".join(f"{name} {1e3 * s:.1f} ms ({s / total:.1%})" for name, s in self.phases.items() if s > 0)
        walls = ", ".join(f"{wall} {share:.0%}" for wall, share in sorted(self.steps.walls.items()))
        steps = self.steps
        return "\n".join(
            [
                f"{self.arrived} requests in {self.window_s:.0f} s ({self.arrived / self.window_s:.2f}/s), "
                f"{self.answered} answered, {self.refused} refused, {self.preemptions} preemptions",
                "",
                *rows,
                "",
                f"phases (mean): {phases}",
                f"steps: {steps.count}, mean {1e3 * steps.mean_s:.2f} ms, p99 {1e3 * steps.p99_s:.2f} ms, "
                f"batch {steps.batch:.1f}, prefill {steps.prefill_tokens:.0f} tokens",
                f"floors: step {1e3 * steps.floor_s:.2f} ms (efficiency {steps.efficiency:.0%}; bound by {walls}), "
                f"request alone: TTFT {1e3 * self.floor_ttft_s:.1f} ms, TPOT {1e3 * self.floor_tpot_s:.2f} ms",
                f"KV pool: mean {self.kv_mean:.1%}, peak {self.kv_peak:.1%}",
                f"Little, queue: L = {self.queue.residents:.3f}, lambda W = {self.queue.rate_times_stay:.3f} "
                f"(apart by {self.queue.error:.2%})",
                f"Little, system: L = {self.system.residents:.2f}, lambda W = {self.system.rate_times_stay:.2f} "
                f"(apart by {self.system.error:.2%})",
            ]
        )


def tally(lives: Sequence[Life], records: Sequence[StepRecord], kv_total: int, start_ns: int, end_ns: int) -> Tally:
    """Count a run between two moments of its clock.

    Raises ValueError when nothing happened in between, or when the step log no longer has its first step there.
    """
    if records and records[0].step > 0 and records[0].start_ns > start_ns:
        raise ValueError("the step log does not reach back to the start of the window; keep more steps")
    window = (end_ns - start_ns) / 1e9
    came = [life for life in lives if start_ns <= life.arrived_ns < end_ns]
    taken = [(life, life.clock) for life in came if life.clock is not None]
    answered = [(life, clock) for life, clock in taken if life.reason in (STOP, LENGTH)]
    inside = [record for record in records if start_ns <= record.start_ns < end_ns]
    if not answered or not inside:
        raise ValueError("no request was answered in the window, or no step ran")
    durations = [clock.durations() for _life, clock in answered]
    stays = sum((clock.last_token_ns or clock.head_ns) - clock.head_ns for _life, clock in taken) / 1e9
    waits = sum(_queue_ns(clock) for _life, clock in taken) / 1e9
    in_queue, in_system = _residence(lives, records, start_ns, end_ns)
    facts = [clock.facts for _life, clock in answered]
    return Tally(
        window_s=window,
        arrived=len(came),
        answered=len(answered),
        refused=len(came) - len(taken),
        preemptions=sum(clock.facts.preemptions for _life, clock in taken),
        latencies=_latencies(answered),
        phases={phase: float(np.mean([one[phase] for one in durations])) / 1e9 for phase in PHASES},
        kv_mean=_kv_mean(records, kv_total, start_ns, end_ns),
        kv_peak=max(record.kv_used for record in inside) / kv_total,
        steps=_steps(inside),
        queue=Little(in_queue / window, waits / window),
        system=Little(in_system / window, stays / window),
        floor_ttft_s=_median([one.floor_ttft_ns for one in facts]),
        floor_tpot_s=_median([one.floor_tpot_ns for one in facts]),
    )


def _queue_ns(clock: PhaseClock) -> int:
    return sum(tile.end_ns - tile.start_ns for tile in clock.intervals if tile.phase == QUEUE)


def _latencies(answered: Sequence[tuple[Life, PhaseClock]]) -> dict[str, tuple[float, ...]]:
    ttft, tpot, e2e = [], [], []
    for life, clock in answered:
        first, last = clock.first_token_ns or clock.head_ns, clock.last_token_ns or clock.head_ns
        ttft.append((first - clock.head_ns) / 1e9)
        e2e.append((last - clock.head_ns) / 1e9)
        if life.output_tokens > 1:  # one token has no time per token
            tpot.append((last - first) / (life.output_tokens - 1) / 1e9)
    found = {}
    for name, values in (("TTFT", ttft), ("TPOT", tpot), ("end to end", e2e)):
        if values:
            found[name] = tuple(float(v) for v in np.percentile(values, PERCENTILES, method="inverted_cdf"))
    return found


def _residence(lives: Sequence[Life], records: Sequence[StepRecord], start_ns: int, end_ns: int) -> tuple[float, float]:
    """Request-seconds in the queue and in the system inside the window, from arrivals and the step log alone."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for record in records:
        for name in record.requests:
            if name not in first:
                first[name] = record.start_ns
            last[name] = record.end_ns
    queue = system = 0
    for life in lives:
        if life.id in first:
            queue += max(0, min(first[life.id], end_ns) - max(life.arrived_ns, start_ns))
            system += max(0, min(last[life.id], end_ns) - max(life.arrived_ns, start_ns))
    return queue / 1e9, system / 1e9


def _kv_mean(records: Sequence[StepRecord], kv_total: int, start_ns: int, end_ns: int) -> float:
    """Mean over time; what a step holds is held until the next one starts, or until its end where nothing is left."""
    area = 0.0
    for at, record in enumerate(records):
        until = records[at + 1].start_ns if at + 1 < len(records) else record.end_ns
        if record.kv_used == 0:
            until = record.end_ns
        area += record.kv_used * max(0, min(until, end_ns) - max(record.start_ns, start_ns))
    return area / (kv_total * (end_ns - start_ns))


def _steps(inside: Sequence[StepRecord]) -> Steps:
    durations: Floats = np.array([record.end_ns - record.start_ns for record in inside], dtype=np.float64) / 1e9
    floors: Floats = np.array([record.floor_ns or 0 for record in inside], dtype=np.float64) / 1e9
    total = float(durations.sum())
    walls: dict[str, float] = {}
    for record, duration in zip(inside, durations.tolist(), strict=True):
        if record.wall is not None:
            walls[record.wall] = walls.get(record.wall, 0.0) + duration / total
    return Steps(
        count=len(inside),
        mean_s=float(durations.mean()),
        p99_s=float(np.percentile(durations, 99.0, method="inverted_cdf")),
        batch=float(np.mean([len(record.requests) for record in inside])),
        prefill_tokens=float(np.mean([record.prefill_tokens for record in inside])),
        floor_s=float(floors.mean()),
        efficiency=float(floors.sum()) / total,
        walls=walls,
    )


def _median(values: Sequence[int | None]) -> float:
    known = [value / 1e9 for value in values if value is not None]
    return float(np.median(known)) if known else 0.0
