"""When each request is sent and how long it is: the trace, changed by the asked transforms, as absolute times.

The schedule is computed whole before the start and is the same for any number of workers; it depends on the trace and
the `Transforms` alone.  Intended times are seconds after the run's zero, sorted, never re-anchored.
Every change is returned as a record with its numbers, so that a report can show what was done to the trace.
Order: window, de-quantise, rate scale, loop, arrival model, time scale, length scale, over-limit policy, classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loadgen.traces.trace import I32, I64, NO_SESSION, Prefixes, Trace
from loadgen.transforms import CLIP, DEFAULT_CLASS, FAIL, MAX_REQUESTS, Transforms, check
from models.errors import UserError

_THIN, _SHIFT, _TICK, _MIX = 1, 2, 4, 5  # streams of random numbers, apart by purpose (3: arrival models)
NANO: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """All requests of a run over all workers; arrays have one entry per request, in order of time."""

    intended_s: npt.NDArray[np.float64]
    trace_row: I64
    input_tokens: I32
    output_tokens: I32
    length_s: float  # of the window, in run time
    records: tuple[dict[str, Any], ...]  # the transforms with their numbers
    source: I64  # place in the trace's arrays
    copy: I32  # which copy of its row: copies and repetitions of a request share no text with it
    klass: npt.NDArray[np.int8]  # place in class_names
    class_names: tuple[str, ...] = (DEFAULT_CLASS,)
    session: I64 | None = None  # the trace's session, NO_SESSION without one; sessions of two copies are two
    prefixes: Prefixes | None = None  # of the trace, by `source`
    length_scale: float = 1.0
    canary: I64 | None = None  # the number of a canary among the load, -1: a request of the trace

    def __len__(self) -> int:
        return len(self.intended_s)

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second over the window."""
        return len(self) / self.length_s if self.length_s > 0 else 0.0

    def part(self, worker: int, workers: int) -> I64:
        """Indexes that this worker sends: every workers-th request."""
        return np.arange(worker, len(self), workers, dtype=np.int64)


@dataclass(slots=True)
class _Rows:
    """Requests under construction: place in the trace, ns after the window's start, number of the copy."""

    source: I64
    times: I64
    copy: I64

    def take(self, chosen: Any) -> _Rows:
        return _Rows(self.source[chosen], self.times[chosen], self.copy[chosen])

    def sorted(self) -> _Rows:
        return self.take(np.argsort(self.times, kind="stable"))

    @classmethod
    def joined(cls, parts: list[_Rows]) -> _Rows:
        columns = zip(*((part.source, part.times, part.copy) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def __len__(self) -> int:
        return len(self.source)


def build(trace: Trace, asked: Transforms) -> Schedule:
    """The schedule of a run.  Raises UserError: values out of range, an empty window, over-limit rows to fail."""
    check(asked)
    records: list[dict[str, Any]] = []
    # An arrival model takes only the lengths of the rows: all from the start on, not those of its own duration.
    window = asked if asked.arrivals is None else replace(asked, duration_s=None)
    length_ns = _window_length_ns(trace, window)
    rows = _window(trace, window, length_ns, records)
    if asked.dequantise_s is not None:
        rows = _dequantise(trace, rows, asked, length_ns, records)
    if asked.rate_scale != 1.0:
        rows = _scale_rate(trace, rows, length_ns, asked, records)
    if asked.loop > 1:
        rows, length_ns = _loop(rows, length_ns, asked, records)
    if asked.arrivals is not None:
        rows, length_ns = _model(rows, length_ns, asked, records)
    if asked.speed != 1.0:
        records.append({"name": "speed", "factor": asked.speed, "length_s": length_ns / NANO / asked.speed})
    source = rows.source
    inputs, outputs = _scale_lengths(trace.input_tokens[source], trace.output_tokens[source], asked, records)
    keep, inputs, outputs = _apply_limit(inputs, outputs, trace.row[source], asked, records)
    klass = _classes(trace, rows, asked, records)
    return Schedule(
        intended_s=(rows.times / NANO / asked.speed)[keep],
        trace_row=trace.row[source][keep],
        input_tokens=inputs[keep].astype(np.int32),
        output_tokens=outputs[keep].astype(np.int32),
        length_s=length_ns / NANO / asked.speed,
        records=tuple(records),
        source=source[keep],
        copy=rows.copy[keep].astype(np.int32),
        klass=klass[keep],
        class_names=tuple(mix.name for mix in asked.mix) or (DEFAULT_CLASS,),
        session=None if trace.session is None else trace.session[source][keep],
        prefixes=trace.prefixes,
        length_scale=asked.length_scale,
    )


def _window(trace: Trace, asked: Transforms, length_ns: int, records: list[dict[str, Any]]) -> _Rows:
    start_ns = round(asked.start_s * NANO)
    first, last = np.searchsorted(trace.arrival_ns, [start_ns, start_ns + length_ns], side="left")
    if asked.duration_s is None:
        last = len(trace)
    if first >= last:
        raise UserError(
            f"no arrivals between {asked.start_s:g} s and {asked.start_s + length_ns / NANO:g} s of the trace "
            f"(its span is {trace.span_s:.1f} s)",
            where="--window",
            remedy="choose a later end or an earlier start; tailspan traces show NAME prints the span",
        )
    source = np.arange(first, last)
    records.append(
        {
            "name": "window",
            "start_s": asked.start_s,
            "length_s": length_ns / NANO,
            "before": trace.rows_kept,
            "after": len(source),
        }
    )
    return _Rows(source, trace.arrival_ns[first:last] - start_ns, np.zeros(len(source), dtype=np.int64))


def _window_length_ns(trace: Trace, asked: Transforms) -> int:
    """A window that reaches past the trace ends one mean gap after its last arrival: later silence is no data."""
    rest_ns = trace.last_ns - round(asked.start_s * NANO)
    end_ns = max(0, rest_ns) + trace.last_ns // max(1, trace.rows_kept - 1) + 1
    return end_ns if asked.duration_s is None else min(round(asked.duration_s * NANO), end_ns)


def _dequantise(trace: Trace, rows: _Rows, asked: Transforms, length_ns: int, records: list[dict[str, Any]]) -> _Rows:
    """Spread arrivals evenly over the tick after their stamp; rows of one stamp keep their order, so sessions do."""
    assert asked.dequantise_s is not None
    tick_ns = round(asked.dequantise_s * NANO)
    draws = _draws(asked.seed, _TICK, trace.row[rows.source])
    draws = draws[np.lexsort((draws, rows.times))]
    moved = rows.take(slice(None))
    moved.times = np.minimum(rows.times + (draws * tick_ns).astype(np.int64), length_ns - 1)
    shared = int((np.diff(rows.times) == 0).sum())
    records.append({"name": "dequantise", "tick_s": asked.dequantise_s, "seed": asked.seed, "equal_before": shared})
    return moved.sorted()


def _scale_rate(trace: Trace, rows: _Rows, length_ns: int, asked: Transforms, records: list[dict[str, Any]]) -> _Rows:
    """Thin, or lay rotated copies of the window over it.  A smaller scale keeps a subset of what a larger one keeps."""
    draws = _draws_by_session(trace, rows, np.random.default_rng([asked.seed, _THIN]))
    copies = int(asked.rate_scale)
    if copies * len(rows) > MAX_REQUESTS:
        raise UserError(
            f"{asked.rate_scale:g} times {len(rows):,} arrivals is over {MAX_REQUESTS:,}",
            where="--rate-scale",
            remedy="choose a smaller scale or a shorter window",
        )
    shifts = np.random.default_rng([asked.seed, _SHIFT])
    parts = []
    cut = 0
    for copy in range(copies + 1):
        part = rows if copy < copies else rows.take(draws < asked.rate_scale - copies)
        if copy:
            before = len(part)
            part = _rotated(trace, part, int(shifts.integers(length_ns)), length_ns, copy)
            cut += before - len(part)
        parts.append(part)
    joined = _Rows.joined(parts).sorted()
    record: dict[str, Any] = {
        "name": "rate_scale",
        "factor": asked.rate_scale,
        "kind": "thinning" if asked.rate_scale < 1 else "superposition",
        "before": len(rows),
        "after": len(joined),
        "seed": asked.seed,
    }
    records.append(record | ({"turns_cut": cut} if cut else {}))
    if not len(joined):
        raise UserError(
            f"a rate scale of {asked.rate_scale:g} leaves none of the {len(rows)} arrivals",
            where="--rate-scale",
            remedy="choose a larger scale or a longer window",
        )
    return joined


def _draws(seed: int, purpose: int, keys: I64, copies: I64 | None = None) -> npt.NDArray[np.float64]:
    """A number 0..1 for each key (and copy), by SplitMix64: neither window nor thinning changes that of another."""
    start = np.random.default_rng([seed, purpose]).integers(1 << 63, dtype=np.uint64)
    state = keys.astype(np.uint64)
    if copies is not None:
        state = state + copies.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    mixed = state ^ (state >> np.uint64(31))
    return (mixed >> np.uint64(11)).astype(np.float64) / (1 << 53)


def _draws_by_session(trace: Trace, rows: _Rows, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A number 0..1 for each row, the same for all rows of one session."""
    draws = rng.random(len(rows))
    if trace.session is not None:
        sessions = trace.session[rows.source]
        _, first, inverse = np.unique(sessions, return_index=True, return_inverse=True)
        draws = np.where(sessions == NO_SESSION, draws, draws[first][inverse])
    return draws


def _rotated(trace: Trace, rows: _Rows, shift: int, length_ns: int, copy: int) -> _Rows:
    """The rows later by shift, round the window's end; a session moves as a whole, and what it then has past the end
    of the window is cut, as the window cuts the sessions of the trace itself."""
    if trace.session is None:
        times = (rows.times + shift) % length_ns
        return _Rows(rows.source, times, np.full(len(rows), copy))
    sessions = trace.session[rows.source]
    _, first, inverse = np.unique(sessions, return_index=True, return_inverse=True)
    start = np.where(sessions == NO_SESSION, rows.times, rows.times[first][inverse])
    times = (start + shift) % length_ns + (rows.times - start)
    return _Rows(rows.source, times, np.full(len(rows), copy)).take(times < length_ns)


def _loop(rows: _Rows, length_ns: int, asked: Transforms, records: list[dict[str, Any]]) -> tuple[_Rows, int]:
    if asked.loop * len(rows) > MAX_REQUESTS:
        raise UserError(
            f"{asked.loop} times {len(rows):,} arrivals is over {MAX_REQUESTS:,}",
            where="--loop",
            remedy="loop less often or over a shorter window",
        )
    copies = int(rows.copy.max()) + 1
    parts = [_Rows(rows.source, rows.times + k * length_ns, rows.copy + k * copies) for k in range(asked.loop)]
    records.append({"name": "loop", "times": asked.loop, "before": len(rows), "after": asked.loop * len(rows)})
    return _Rows.joined(parts), asked.loop * length_ns


def _model(rows: _Rows, length_ns: int, asked: Transforms, records: list[dict[str, Any]]) -> tuple[_Rows, int]:
    """The model's times with the lengths of the window's rows in their order, from the first again when they end."""
    assert asked.arrivals is not None
    length_s = asked.duration_s or asked.arrivals.length_s or length_ns / NANO
    times = np.round(asked.arrivals.times(length_s, asked.seed) * NANO).astype(np.int64)
    if not len(times):
        raise UserError(
            f"{asked.arrivals} makes no arrival in {length_s:g} s",
            where="--arrivals",
            remedy="ask for a higher rate or a longer --duration",
        )
    turn, place = np.divmod(np.arange(len(times)), len(rows))
    record = {"name": "arrivals", "model": str(asked.arrivals), "seed": asked.seed, "before": len(rows)}
    records.append(record | {"after": len(times), "length_s": length_s})
    copies = int(rows.copy.max()) + 1
    return _Rows(rows.source[place], times, rows.copy[place] + turn * copies), round(length_s * NANO)


def _classes(trace: Trace, rows: _Rows, asked: Transforms, records: list[dict[str, Any]]) -> npt.NDArray[np.int8]:
    """The class of each request: by its share, seeded, one for all turns of a session."""
    if not asked.mix:
        return np.zeros(len(rows), dtype=np.int8)
    keys = trace.row[rows.source]
    if trace.session is not None:
        sessions = trace.session[rows.source]
        keys = np.where(sessions == NO_SESSION, keys, -2 - sessions)
    draws = _draws(asked.seed, _MIX, keys, rows.copy)
    bounds = np.cumsum([mix.share for mix in asked.mix])
    found = np.minimum(np.searchsorted(bounds, draws, side="right"), len(bounds) - 1).astype(np.int8)
    counts = np.bincount(found, minlength=len(bounds))
    records.append({"name": "classes", **{mix.name: int(n) for mix, n in zip(asked.mix, counts, strict=True)}})
    return found


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
