"""How much load a side carried against how fast it worked: Δ log load = Δ log arrivals + Δ log work - Δ log speed.

Needs no model of the server: rates and lengths from the rows, speed from the step log, else from the time that a prompt
token and an answer token took.  It tells whether a queue grew because more came, or because less was done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from telemetry import names
from telemetry.explain import step_times
from telemetry.explain.contributions import interval
from telemetry.explain.side import Run

LEAST: Final = 10  # requests to take a median of
GROWN: Final = math.log(1.1)  # of the load, from which it is called grown


@dataclass(frozen=True, slots=True)
class LoadChange:
    """Changes in logarithms, with 95 % intervals over the repeats (None with one pair).

    arrivals: requests/s.  work: seconds of a step's time per request, at A's speed.  speed: how much faster.
    """

    arrivals: float
    work: float
    speed: float
    arrivals_interval: tuple[float | None, float | None]
    work_interval: tuple[float | None, float | None]
    speed_interval: tuple[float | None, float | None]

    @property
    def load(self) -> float:
        """Of the load: above 0, more was asked in a second than could be done before."""
        return self.arrivals + self.work - self.speed

    @property
    def asked(self) -> float:
        """Of what was asked alone."""
        return self.arrivals + self.work

    @property
    def sentence(self) -> str:
        parts = [
            f"{name} x {math.exp(value):.2f}"
            for name, value in (("arrivals", self.arrivals), ("work a request", self.work), ("speed", self.speed))
        ]
        return f"load x {math.exp(self.load):.2f} ({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "load": self.load}


def load_change(a: Sequence[Run], b: Sequence[Run]) -> LoadChange | None:
    """Between two sides; None: a side has next to no answers."""
    rows = [one for one in (_pair(x, y) for x, y in zip(a, b, strict=False)) if one is not None]
    if not rows:
        return None
    table = np.array(rows)
    arrivals, work, speed = (float(one) for one in table.mean(axis=0))
    low_high = [interval(table[:, at]) for at in range(3)]
    return LoadChange(arrivals, work, speed, *low_high)


def _pair(a: Run, b: Run) -> tuple[float, float, float] | None:
    sides = (a, b)
    if min(int(one.counted.sum()) for one in sides) < 10 or min(int(one.answered.sum()) for one in sides) < 10:
        return None
    rates = [int(one.counted.sum()) / max(1e-9, float(np.ptp(one["intended_s"][one.counted]))) for one in sides]
    formula = step_times.fit(a.steps)
    prompt, answer = _costs(a) if formula is None else (formula[3], 0.0)
    if formula is not None:
        # an answer's token costs its part of a step: the fixed part is shared by the batch
        batch = max(1.0, float(np.mean(np.concatenate([np.nan_to_num(one["decode_seqs"]) for one in a.steps]))))
        answer = formula[4] + (formula[0] + 8 * formula[1]) / batch
    work = [_work(one, prompt, answer) for one in sides]
    if min(work) <= 0:
        return None
    if formula is not None and b.steps:
        before, after = step_times.speed(a.steps, formula), step_times.speed(b.steps, formula)
        slower = after.total / before.total if before is not None and after is not None else 1.0
    else:
        slower = _slower(a, b)
    return math.log(rates[1] / rates[0]), math.log(work[1] / work[0]), -math.log(slower)


def _work(run: Run, prompt_s: float, answer_s: float) -> float:
    """Mean seconds of work in a request that was sent.

    Nobody tells what one without an answer found in the cache: the share of the others is taken, not nothing, since
    more drops are no more work.
    """
    rows, answered = run.counted, run.answered
    prompt = np.where(np.isnan(run["prompt_tokens_reported"]), run["input_tokens"], run["prompt_tokens_reported"])
    cached = np.nan_to_num(run["cached_tokens"])
    share = cached[answered].sum() / max(1.0, float(np.nansum(prompt[answered])))
    computed = np.maximum(prompt - np.where(answered, cached, share * prompt), 1)[rows]
    answer = np.nan_to_num(run["expected_output_tokens"][rows], nan=1.0)
    return float(np.nanmean(prompt_s * computed + answer_s * answer))


def _slower(a: Run, b: Run) -> float:
    """How many times as long a token took, at equal batch where the server tells it; else of the tenth that took least.

    A larger batch makes every token of it slower, which is the load's doing and not the engine's.
    """
    ratios = []
    for left, right in zip(_per_token(a), _per_token(b), strict=True):
        known = [np.isfinite(one) & (one > 0) for one in (left, right)]
        if min(int(one.sum()) for one in known) < LEAST:
            continue
        batches = [np.round(2 * np.log2(np.maximum(run["batch_size_mean"], 1.0))) for run in (a, b)]
        logs, weights = [], []
        for size in np.unique(batches[0][known[0] & np.isfinite(batches[0])]):
            rows = [one & (batch == size) for one, batch in zip(known, batches, strict=True)]
            n = min(int(one.sum()) for one in rows)
            if n >= LEAST:
                logs.append(math.log(float(np.median(right[rows[1]]) / np.median(left[rows[0]]))))
                weights.append(n)
        if logs:
            ratios.append(float(np.average(logs, weights=weights)))
        else:
            ratios.append(math.log(float(np.quantile(right[known[1]], 0.1) / np.quantile(left[known[0]], 0.1))))
    return math.exp(float(np.mean(ratios))) if ratios else 1.0


def _per_token(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that a computed prompt token and an answer token took, of every answered request; NaN elsewhere."""
    computed = np.maximum(run["input_tokens"] - np.nan_to_num(run["cached_tokens"]), 1)
    prefill = np.where(run.answered, run[f"phase_{names.PREFILL}_s"] / computed, np.nan)
    return prefill, np.where(run.answered, run["tpot_s"], np.nan)


def _costs(run: Run) -> tuple[float, float]:
    """Median seconds that a prompt token and an answer token took; 0 where nothing is known of it."""
    found = [float(np.nanmedian(one)) if np.isfinite(one).any() else 0.0 for one in _per_token(run)]
    return found[0], found[1]
