"""Generator from ServeGen's parameters: per client `window_s,rate,cv,Gamma or Weibull,shape,scale`, no header.

These are fits, not arrivals: for each window of 600 s the rate and the law of its gaps, and beside the file
(`…-trace.csv` and `…-dataset.json`) tables of token lengths by time of day, each a dict printed as a string.  The
mean of a fitted law can miss the rate up to a hundredfold, so gaps are drawn with the fitted shape and scaled to the
rate.  Drawing is seeded: one seed, one trace.
Source: alibaba/ServeGen (Apache-2.0); Xiang et al., ServeGen, arXiv:2505.09999.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loadgen.traces.lines import CSV_LINE, fields_of, refuse_long
from loadgen.traces.trace import BATCH_ROWS, Batch, Choices, Rows
from models.errors import UserError

FORMAT: Final = "servegen"
GAMMA: Final = "Gamma"
WEIBULL: Final = "Weibull"
TRACE_END: Final = "-trace.csv"
DATASET_END: Final = "-dataset.json"
MAX_START_S: Final = 1e9
LEAST_SHAPE: Final = 0.01  # the mean of a Weibull law below it is beyond a float
MOST_SHAPE: Final = 1e4
MAX_PER_WINDOW: Final = 10_000_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """One line: seconds of its start, arrivals per second, law of the gaps and its shape."""

    start_s: float
    rate: float
    law: str
    shape: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """A table of token lengths from a moment of the day on: cumulative chances and their lengths."""

    start_s: float
    inputs: tuple[Floats, npt.NDArray[np.int64]]
    outputs: tuple[Floats, npt.NDArray[np.int64]]


def recognises(head: bytes) -> bool:
    """Do the first lines look like windows of a client?  head: the first bytes of the file."""
    lines = head.decode("utf-8", "replace").splitlines()[:3]
    return len(lines) > 0 and all(_window(line.split(",")) is not None for line in lines)


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """Draw the arrivals of all windows.  Raises UserError where a line or the table of lengths is unusable."""
    windows = _windows(path)
    tables = _tables(path)
    width = min((b.start_s - a.start_s for a, b in pairwise(windows)), default=600.0)
    with_rate = [window for window in windows if window.rate > 0]
    rows.notes.append(
        f"generated with seed {choices.seed} from {len(windows)} windows of {width:g} s, {len(with_rate)} with a rate: "
        "parameters, not recorded arrivals"
    )
    for window in with_rate:
        rng = np.random.default_rng([choices.seed, round(window.start_s)])
        times = arrivals(window, width, rng)
        table = [one for one in tables if one.start_s <= window.start_s][-1:] or tables[:1]
        inputs, outputs = (_drawn(one, len(times), rng) for one in (table[0].inputs, table[0].outputs))
        stamps = np.round((window.start_s + times) * 1e9).astype(np.int64)
        for at in range(0, len(times), BATCH_ROWS):
            part = slice(at, at + BATCH_ROWS)
            yield rows.many(stamps[part], inputs[part], outputs[part])


def arrivals(window: Window, width_s: float, rng: np.random.Generator) -> Floats:
    """Times within one window: a renewal process with gaps of the fitted shape and the window's own rate."""
    expected = window.rate * width_s
    if expected > MAX_PER_WINDOW:
        raise UserError(
            f"{expected:,.0f} arrivals in one window of {width_s:g} s are beyond belief",
            where=f"the window at {window.start_s:g} s",
            remedy="check rate and window_s of its line",
        )
    times: list[Floats] = []
    at = 0.0
    mean = math.gamma(1 + 1 / window.shape) if window.law == WEIBULL else window.shape
    while at < width_s:
        size = int(expected * 1.1) + 64
        gaps = rng.weibull(window.shape, size) if window.law == WEIBULL else rng.gamma(window.shape, 1.0, size)
        more = at + np.cumsum(gaps / (mean * window.rate))
        times.append(more)
        at = float(more[-1])
    # Start somewhere inside the first gap: else every window would begin with an arrival-free stretch.
    found = np.concatenate(times) - float(times[0][0]) * rng.random()
    return found[found < width_s]


def _windows(path: Path) -> list[Window]:
    found: list[Window] = []
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(CSV_LINE), b""), start=1):
            refuse_long(line, CSV_LINE, path, number, FORMAT)
            text = line.decode("utf-8", "replace").strip()
            if not text:
                continue
            window = _window(fields_of(text) or [])
            if window is None or (found and window.start_s <= found[-1].start_s):
                raise UserError(
                    f"no window of {FORMAT}: {text[:80]!r}",
                    where=f"{path}:{number}",
                    remedy="a line is window_s,rate,cv,Gamma or Weibull,shape,scale, by time",
                )
            found.append(window)
    return found


def _window(fields: list[str]) -> Window | None:
    """None where these are no six fields of a window."""
    if len(fields) != 6:
        return None
    try:
        start, rate, cv, shape, scale = (float(fields[place]) for place in (0, 1, 2, 4, 5))
    except ValueError:
        return None
    if not all(math.isfinite(value) and value >= 0 for value in (start, rate, cv, shape, scale)) or start > MAX_START_S:
        return None
    law = fields[3].strip()
    if rate == 0:
        return Window(start, 0.0, law, 1.0) if law in ("", GAMMA, WEIBULL) else None
    if law == "":
        return Window(start, rate, GAMMA, 1.0)  # too few arrivals for a fit: Poisson
    return Window(start, rate, law, shape) if law in (GAMMA, WEIBULL) and LEAST_SHAPE < shape < MOST_SHAPE else None


def _tables(path: Path) -> list[Lengths]:
    """The dataset that belongs to a trace file.  Raises UserError."""
    beside = path.with_name(path.name.removesuffix(TRACE_END) + DATASET_END)
    remedy = f"put the client's {DATASET_END.strip('-')} beside its {TRACE_END.strip('-')}, under the same beginning"
    if not path.name.endswith(TRACE_END) or not beside.is_file():
        raise UserError(f"no token lengths beside it ({beside.name})", where=str(path), remedy=remedy)
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
        tables = [
            Lengths(float(start), _table(entry["input_tokens"]), _table(entry["output_tokens"]))
            for start, entry in found.items()
            if len(entry["input_tokens"]) > 2  # "{}": nothing was recorded at that time of day
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise UserError(f"not a dataset of {FORMAT}: {error}", where=str(beside), remedy=remedy) from None
    if not tables:
        raise UserError("the dataset has no table", where=str(beside), remedy=remedy)
    return sorted(tables, key=lambda table: table.start_s)


def _table(printed: Any) -> tuple[Floats, npt.NDArray[np.int64]]:
    """A dict of length -> chance, as it was printed, as cumulative chances."""
    table = ast.literal_eval(printed) if isinstance(printed, str) else printed
    lengths = np.array([int(length) for length in table], dtype=np.int64)
    chances = np.array([float(chance) for chance in table.values()], dtype=np.float64)
    if not len(lengths) or lengths.min() < 0 or chances.min() < 0 or not chances.sum() > 0 or lengths.max() >= 1 << 31:
        raise ValueError("a table of lengths without a usable chance")
    return np.cumsum(chances / chances.sum()), np.maximum(lengths, 1)


def _drawn(table: tuple[Floats, npt.NDArray[np.int64]], count: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    places = np.searchsorted(table[0], rng.random(count), side="right")
    return table[1][np.minimum(places, len(table[1]) - 1)].astype(np.int32)
