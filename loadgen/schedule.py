"""When each request is sent and how long it is: the trace, changed by the asked transforms, as absolute times.

The schedule is computed whole before the start and is the same for any number of workers; it depends on the trace and
the `Transforms` alone.  Intended times are seconds after the run's zero, sorted, never re-anchored.
Every change is returned as a record with its numbers, so that a report can show what was done to the trace.
Order of the transforms: window, rate scale, time scale, length scale, over-limit policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loadgen.traces.trace import I32, I64, Trace
from models.errors import UserError

SKIP: Final = "skip"
CLIP: Final = "clip"
FAIL: Final = "fail"
OVER_LIMIT: Final = (SKIP, CLIP, FAIL)
MAX_REQUESTS: Final = 100_000_000
_THIN, _SHIFT = 1, 2  # streams of random numbers, apart by purpose


@dataclass(frozen=True, slots=True)
class Transforms:
    """What is done to a trace.  Times are seconds of trace time; scales are factors; counts are tokens."""

    seed: int
    start_s: float = 0.0
    duration_s: float | None = None  # None: to the end of the trace
    speed: float = 1.0  # 1.5: 1.5 times as fast
    rate_scale: float = 1.0  # below 1: seeded thinning; above 1: seeded superposition of shifted copies
    length_scale: float = 1.0
    over_limit: str = SKIP
    max_context: int = 1 << 30
    min_input: int = 1  # the shortest prompt that the template allows


@dataclass(frozen=True, slots=True)
class Schedule:
    """All requests of a run over all workers; arrays have one entry per request, in order of time."""

    intended_s: npt.NDArray[np.float64]
    trace_row: I64
    input_tokens: I32
    output_tokens: I32
    length_s: float  # of the window, in run time
    records: tuple[dict[str, Any], ...]  # the transforms with their numbers

    def __len__(self) -> int:
        return len(self.intended_s)

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second over the window."""
        return len(self) / self.length_s if self.length_s > 0 else 0.0

    def part(self, worker: int, workers: int) -> I64:
        """Indexes that this worker sends: every workers-th request."""
        return np.arange(worker, len(self), workers, dtype=np.int64)


def build(trace: Trace, asked: Transforms) -> Schedule:
    """The schedule of a run.  Raises UserError: values out of range, an empty window, over-limit rows to fail."""
    check(asked)
    records: list[dict[str, Any]] = []
    length_ns = _window_length_ns(trace, asked)
    start_ns = round(asked.start_s * 1e9)
    first, last = np.searchsorted(trace.arrival_ns, [start_ns, start_ns + length_ns], side="left")
    if asked.duration_s is None:
        last = len(trace)
    if first >= last:
        raise UserError(
            f"no arrivals between {asked.start_s:g} s and {asked.start_s + length_ns / 1e9:g} s of the trace "
            f"(its span is {trace.span_s:.1f} s)",
            where="--window",
            remedy="choose a later end or an earlier start; tailspan traces show NAME prints the span",
        )
    source = np.arange(first, last)
    times = trace.arrival_ns[first:last] - start_ns
    records.append(
        {
            "name": "window",
            "start_s": asked.start_s,
            "length_s": length_ns / 1e9,
            "before": len(trace),
            "after": len(source),
        }
    )
    if asked.rate_scale != 1.0:
        before = len(source)
        source, times = _scale_rate(source, times, length_ns, asked)
        kind = "thinning" if asked.rate_scale < 1 else "superposition"
        record = {
            "name": "rate_scale",
            "factor": asked.rate_scale,
            "kind": kind,
            "before": before,
            "after": len(source),
        }
        records.append({**record, "seed": asked.seed})
        if not len(source):
            raise UserError(
                f"a rate scale of {asked.rate_scale:g} leaves none of the {before} arrivals",
                where="--rate-scale",
                remedy="choose a larger scale or a longer window",
            )
    if asked.speed != 1.0:
        records.append({"name": "speed", "factor": asked.speed, "length_s": length_ns / 1e9 / asked.speed})
    intended = times / 1e9 / asked.speed
    inputs, outputs = _scale_lengths(trace.input_tokens[source], trace.output_tokens[source], asked, records)
    keep, inputs, outputs = _apply_limit(inputs, outputs, trace.row[source], asked, records)
    return Schedule(
        intended_s=intended[keep],
        trace_row=trace.row[source][keep],
        input_tokens=inputs[keep].astype(np.int32),
        output_tokens=outputs[keep].astype(np.int32),
        length_s=length_ns / 1e9 / asked.speed,
        records=tuple(records),
    )


def check(asked: Transforms) -> None:
    """Raises UserError naming the option whose value cannot be used."""
    for option, value in (
        ("--speed", asked.speed),
        ("--rate-scale", asked.rate_scale),
        ("--length-scale", asked.length_scale),
    ):
        if not 0 < value < 1e6:  # also refuses NaN
            raise UserError(
                f"{value:g} is not a positive factor", where=option, remedy="give a number above 0, e.g. 0.5"
            )
    if not 0 <= asked.start_s < 1e9:
        raise UserError(
            f"{asked.start_s:g} is not a start", where="--start", remedy="give seconds of trace time from 0"
        )
    if asked.duration_s is not None and not 0 < asked.duration_s < 1e9:
        raise UserError(
            f"{asked.duration_s:g} is not a duration", where="--duration", remedy="give seconds of trace time above 0"
        )
    if asked.over_limit not in OVER_LIMIT:
        raise UserError(
            f"{asked.over_limit!r} is not a policy", where="--over-limit", remedy=f"choose {', '.join(OVER_LIMIT)}"
        )
    if asked.min_input >= asked.max_context:
        raise UserError(
            f"a context of {asked.max_context} tokens cannot hold the shortest prompt, {asked.min_input}, and more",
            where="--model",
            remedy="serve a model with a longer context",
        )


def _window_length_ns(trace: Trace, asked: Transforms) -> int:
    """A window that reaches past the trace ends one mean gap after its last arrival: later silence is no data."""
    rest_ns = int(trace.arrival_ns[-1]) - round(asked.start_s * 1e9)
    end_ns = max(0, rest_ns) + int(trace.arrival_ns[-1]) // max(1, len(trace) - 1) + 1
    return end_ns if asked.duration_s is None else min(round(asked.duration_s * 1e9), end_ns)


def _scale_rate(source: I64, times: I64, length_ns: int, asked: Transforms) -> tuple[I64, I64]:
    """Thin, or lay rotated copies of the window over it.  A smaller scale keeps a subset of what a larger one keeps."""
    draws = np.random.default_rng([asked.seed, _THIN]).random(len(source))
    copies = int(asked.rate_scale)
    if copies * len(source) > MAX_REQUESTS:
        raise UserError(
            f"{asked.rate_scale:g} times {len(source):,} arrivals is over {MAX_REQUESTS:,}",
            where="--rate-scale",
            remedy="choose a smaller scale or a shorter window",
        )
    shifts = np.random.default_rng([asked.seed, _SHIFT])
    sources, all_times = [], []
    for copy in range(copies + 1):
        chosen = slice(None) if copy < copies else draws < asked.rate_scale - copies
        shift = 0 if copy == 0 else int(shifts.integers(length_ns))
        sources.append(source[chosen])
        all_times.append((times[chosen] + shift) % length_ns)
    joined, joined_times = np.concatenate(sources), np.concatenate(all_times)
    order = np.argsort(joined_times, kind="stable")
    return joined[order], joined_times[order]


def _scale_lengths(inputs: I32, outputs: I32, asked: Transforms, records: list[dict[str, Any]]) -> tuple[I64, I64]:
    """Scale both lengths, rounding half up; at least one output token and the template's shortest prompt."""
    scaled_in = np.floor(inputs * asked.length_scale + 0.5).astype(np.int64)
    scaled_out = np.floor(outputs * asked.length_scale + 0.5).astype(np.int64)
    raised_in, raised_out = int((scaled_in < asked.min_input).sum()), int((scaled_out < 1).sum())
    new_in, new_out = np.maximum(scaled_in, asked.min_input), np.maximum(scaled_out, 1)
    if asked.length_scale != 1.0:
        records.append(
            {
                "name": "length_scale",
                "factor": asked.length_scale,
                "input_mean_before": round(float(inputs.mean()), 2),
                "input_mean_after": round(float(new_in.mean()), 2),
                "output_mean_before": round(float(outputs.mean()), 2),
                "output_mean_after": round(float(new_out.mean()), 2),
            }
        )
    if raised_in or raised_out:
        records.append(
            {
                "name": "shortest",
                "min_input": asked.min_input,
                "inputs_raised": raised_in,
                "min_output": 1,
                "outputs_raised": raised_out,
            }
        )
    return new_in, new_out


def _apply_limit(
    inputs: I64, outputs: I64, rows: I64, asked: Transforms, records: list[dict[str, Any]]
) -> tuple[npt.NDArray[np.bool_], I64, I64]:
    """Decide rows whose prompt and answer together exceed the context: skip, clip (the prompt first) or fail."""
    over = inputs + outputs > asked.max_context
    count = int(over.sum())
    if not count:
        return ~over, inputs, outputs
    at = int(np.argmax(over))
    example = f"trace row {int(rows[at])}: {int(inputs[at])} in + {int(outputs[at])} out"
    if asked.over_limit == FAIL:
        raise UserError(
            f"{count} of {len(inputs)} requests exceed the context of {asked.max_context} tokens (first: {example})",
            where="--over-limit fail",
            remedy="use --over-limit skip or clip, a smaller --length-scale, or a model with a longer context",
        )
    record = {"name": "over_limit", "policy": asked.over_limit, "max_context": asked.max_context, "count": count}
    records.append({**record, "of": len(inputs), "first": example})
    if asked.over_limit == CLIP:
        room = np.maximum(asked.max_context - outputs, asked.min_input)
        inputs = np.where(over, np.minimum(inputs, room), inputs)
        outputs = np.where(over, np.minimum(outputs, asked.max_context - inputs), outputs)
        return np.ones_like(over), inputs, outputs
    if count == len(inputs):
        raise UserError(
            f"all {count} requests exceed the context of {asked.max_context} tokens (first: {example})",
            where="--over-limit skip",
            remedy="use --over-limit clip, a smaller --length-scale, or a model with a longer context",
        )
    return ~over, inputs, outputs
