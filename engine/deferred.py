"""What an engine in virtual time writes down of its steps and works out only if somebody asks.

    log         records of the step log: of a run of steps that differ in nothing but time, one entry
    admission   the fit of step times, which only predictions read

What must hold: whoever asks finds what ``engine.steplog`` and ``engine.admission`` would have had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.admission import Admission, Backlog, Limits
from engine.floors import Floors
from engine.policy import POLICIES, deadline
from engine.request import Request
from engine.step_load import StepLoad
from engine.steplog import SeenStep, StepLog, StepRecord

Ints = npt.NDArray[np.int64]
SLACK: Final = 65_536  # steps that are kept beyond the size of the log, so that it is cut seldom


@dataclass(frozen=True, slots=True)
class Leap:
    """Steps that decode the same requests.  first: as the first of them was seen.  Arrays: one entry a step."""

    first: SeenStep
    starts: Ints
    ends: Ints
    gaps: Ints
    contexts: Ints
    used: Ints

    def seen(self) -> list[SeenStep]:
        """Each of them."""
        first, total = self.first, sum(self.first.kv)
        columns = (self.starts, self.ends, self.gaps, self.contexts, self.used)
        found = []
        for at, (start, end, gap, context, used) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            load = first.load._replace(context_tokens=context, attended=context)
            found.append(
                first._replace(
                    step=first.step + at, start_ns=start, end_ns=end, gap_ns=gap, load=load, kv=(used, total - used)
                )
            )
        return found


class DeferredLog(StepLog):
    """The last ``size`` steps, made into records when they are read."""

    def __init__(self, size: int, floors: Floors) -> None:
        super().__init__(size)
        self._size, self._floors = size, floors
        self._new: list[SeenStep | Leap] = []
        self._count = 0

    def note(self, seen: SeenStep) -> None:
        """A step."""
        self._new.append(seen)
        self._grew(1)

    def leap(self, leap: Leap) -> None:
        """Many."""
        self._new.append(leap)
        self._grew(len(leap.ends))

    def _grew(self, steps: int) -> None:
        self._count += steps
        if self._count > self._size + SLACK:
            self._write()

    def _write(self) -> None:
        for entry in self._new:
            for seen in [entry] if isinstance(entry, SeenStep) else entry.seen():
                self._ring.append(seen.record(self._floors, {}))
        self._new, self._count = [], 0

    def since(self, step: int) -> list[StepRecord]:
        """Records of the steps after ``step``, oldest first."""
        self._write()
        return super().since(step)


class DeferredAdmission(Admission):
    """Learns from steps when a prediction is wanted; where no policy and no limit reads them, none is made."""

    def __init__(self, limits: Limits, max_batch: int, token_budget: int, policy: str) -> None:
        super().__init__(limits, max_batch, token_budget)
        self._predicts = limits.ttft_s is not None or POLICIES[policy] is deadline
        self._new: list[tuple[int, int, int, float] | tuple[int, Ints, Ints]] = []

    def step(self, tokens: int, sequences: int, context: int, seconds: float) -> None:
        """A step was done."""
        self._new.append((tokens, sequences, context, seconds))

    def decodes(self, sequences: int, contexts: Ints, durations_ns: Ints) -> None:
        """Some were, which only decoded."""
        self._new.append((sequences, contexts, durations_ns))

    def _learn(self) -> None:
        new, self._new = self._new, []
        for entry in new:
            if len(entry) == 4:
                super().step(*entry)
                continue
            sequences, contexts, durations = entry
            for context, ns in zip(contexts.tolist(), durations.tolist(), strict=True):
                super().step(sequences, sequences, context, ns / 1e9)

    def _predict(self, request: Request, tokens: int, backlog: Backlog) -> None:
        if self._predicts:
            super()._predict(request, tokens, backlog)

    def ttft_s(self, prompt_tokens: int, backlog: Backlog) -> float:
        """Seconds until the first token of a prompt that comes now."""
        self._learn()
        return super().ttft_s(prompt_tokens, backlog)

    def duration_s(self, prompt_tokens: int, max_tokens: int, backlog: Backlog) -> float:
        """Seconds from the first step to the last token."""
        self._learn()
        return super().duration_s(prompt_tokens, max_tokens, backlog)


def joined(a: StepLoad, decodes: int, context: int) -> StepLoad:
    """A load, and beside it sequences that decode, which hold so much KV after the step."""
    return StepLoad(
        a.prefill_tokens,
        a.decode_seqs + decodes,
        a.context_tokens + context,
        a.sampled_rows + decodes,
        a.attended + context,
    )
