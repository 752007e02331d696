"""When is a run lost already?  Its queue grows, and what is in flight would take longer than its deadlines allow.

By Little's law N requests in flight, of which x end per second, stay N / x seconds.  A run is lost when that stay is
TIMES the mean deadline of its requests, more are in flight than a third of the run before, and requests end more slowly
than they come; all that for LASTING_S, or for one deadline where that is longer.  Must always hold: nothing is said
before LEAST_S and LEAST_DONE, and nothing of a burst that the server is working off.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from loadgen.schedule import Schedule
from telemetry.slo import Slo

TIMES: Final = 2.0
PACE: Final = 0.9  # of the arrivals: below it the queue grows
LEAST_S: Final = 15.0
LEAST_DONE: Final = 20
LASTING_S: Final = 10.0
WINDOW: Final = 1 / 3  # of the time so far, over which a rate is taken
DEFAULT_S: Final = 60.0  # of an SLO without any deadline


class Growth:
    """Told (seconds, due, over) in the order of time; answers why to stop, or None."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._seen: deque[tuple[float, int, int]] = deque()
        self._since: float | None = None  # when it began to look lost

    def __call__(self, t_s: float, due: int, over: int) -> str | None:
        """t_s: since the start of the run."""
        self._seen.append((t_s, due, over))
        if t_s < LEAST_S or over < LEAST_DONE:
            return None
        while len(self._seen) > 1 and self._seen[1][0] <= t_s * (1 - WINDOW):
            self._seen.popleft()
        before_s, before_due, before_over = self._seen[0]
        span = t_s - before_s
        came, ended = (due - before_due) / span, (over - before_over) / span
        inflight, inflight_before = due - over, before_due - before_over
        stay = inflight / max(ended, 1e-9)
        lost = stay > TIMES * self._deadline_s and inflight > inflight_before and ended < PACE * came
        if not lost:
            self._since = None
            return None
        self._since = t_s if self._since is None else self._since
        if t_s - self._since < max(LASTING_S, self._deadline_s):
            return None
        return (
            f"the queue grows: {inflight} in flight at {t_s:.0f} s, {came:.2f}/s come and {ended:.2f}/s end, so each "
            f"stays about {stay:.0f} s; deadlines are {self._deadline_s:.1f} s in the mean"
        )


def deadline_of(schedule: Schedule, slo: Slo) -> float:
    """Mean seconds that the SLO gives a whole answer of this schedule: its end-to-end deadline, else what the
    objectives ask of the end or of the first token, else DEFAULT_S."""
    found = [
        slo.deadlines(schedule.class_names[klass], int(tokens), int(answer))
        for klass, tokens, answer in zip(
            schedule.klass[:1000], schedule.input_tokens[:1000], schedule.output_tokens[:1000], strict=True
        )
    ]
    ends = [one.e2e for one in found if one.e2e is not None]
    if ends:
        return float(np.mean(ends))
    bounds = [one.bound for one in slo.objectives if one.measure == "e2e"]
    if bounds:
        return max(bounds)
    firsts = [one.ttft for one in found if one.ttft is not None]
    return max(DEFAULT_S, float(np.mean(firsts))) if firsts else DEFAULT_S
