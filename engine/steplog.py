"""One record a step, in a ring in memory: what ran, how long, for whom.  Any slow token joins to its step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.floors import Floors
    from engine.step_load import StepLoad


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Columns of ``telemetry.schema.STEPS`` without replica and simulated.

    bytes .. wall: None where no device is known.
    """

    step: int
    start_ns: int
    end_ns: int
    gap_ns: int
    kind: str
    running: int
    waiting: int
    decode_seqs: int
    decode_tokens: int
    prefill_seqs: int
    prefill_tokens: int
    recomputed_tokens: int
    cached_tokens: int
    context_tokens: int
    sampled_rows: int
    attended: int
    kv_used: int
    kv_free: int
    preempted: int
    preempted_requests: tuple[str, ...]
    admitted: tuple[str, ...]
    admitted_cached: tuple[int, ...]
    requests: tuple[str, ...]
    request_tokens: tuple[int, ...]
    bytes: int | None = None
    flops: int | None = None
    floor_ns: int | None = None
    efficiency: float | None = None
    wall: str | None = None
    padded_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


class SeenStep(NamedTuple):
    """What the engine saw of a step: all of its record but the account of the device.  kv: pages used and free."""

    step: int
    start_ns: int
    end_ns: int
    gap_ns: int
    load: StepLoad
    running: int
    waiting: int
    recomputed: int
    kv: tuple[int, int]
    preempted: tuple[str, ...]
    admitted: tuple[str, ...]
    admitted_cached: tuple[int, ...]
    requests: tuple[str, ...]
    tokens: tuple[int, ...]

    def record(self, floors: Floors, extra: Mapping[str, int]) -> StepRecord:
        """The record, with the account of the device, and what its runner adds."""
        load = self.load
        decodes, prefills = load.decode_seqs, len(self.requests) - load.decode_seqs
        return StepRecord(
            step=self.step,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            gap_ns=self.gap_ns,
            kind="mixed" if decodes and prefills else "decode" if decodes else "prefill",
            running=self.running,
            waiting=self.waiting,
            decode_seqs=decodes,
            decode_tokens=decodes,
            prefill_seqs=prefills,
            prefill_tokens=load.prefill_tokens,
            recomputed_tokens=self.recomputed,
            cached_tokens=sum(self.admitted_cached),
            context_tokens=load.context_tokens,
            sampled_rows=load.sampled_rows,
            attended=load.attended,
            kv_used=self.kv[0],
            kv_free=self.kv[1],
            preempted=len(self.preempted),
            preempted_requests=self.preempted,
            admitted=self.admitted,
            admitted_cached=self.admitted_cached,
            requests=self.requests,
            request_tokens=self.tokens,
            **floors.step(load, self.end_ns - self.start_ns),
            **extra,
        )


class StepLog:
    """The last ``size`` steps.  Written by the engine thread, read by others through a copy."""

    def __init__(self, size: int) -> None:
        self._ring: deque[StepRecord] = deque(maxlen=size)

    def append(self, record: StepRecord) -> None:
        """Add the newest step."""
        self._ring.append(record)

    def since(self, step: int) -> list[StepRecord]:
        """Records of the steps after ``step``, oldest first."""
        newer: list[StepRecord] = []
        while True:  # the ring may turn while we read it
            try:
                for record in reversed(self._ring):
                    if record.step <= step:
                        break
                    newer.append(record)
            except RuntimeError:
                newer.clear()
                continue
            newer.reverse()
            return newer


def to_arrow(records: Iterable[StepRecord], replica: str, *, simulated: bool) -> pa.Table:
    """The records as a table of ``telemetry.schema.STEPS``.  simulated: their times are a model's."""
    import pyarrow as pa  # only where steps are asked for: an engine runs without it

    from telemetry.schema import STEPS

    rows = list(records)
    fixed = {"replica": [replica] * len(rows), "simulated": [simulated] * len(rows)}
    columns = {name: [getattr(row, name) for row in rows] for name in STEPS.names if name not in fixed}
    return pa.table({**fixed, **columns}, schema=STEPS)
