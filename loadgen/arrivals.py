"""Arrival models to set beside a trace: constant, Poisson, gamma, ramp, steps and spike.

Every model is a rate over time (straight between its knots) and a law of the gaps.  Gaps of mean one are drawn and put
through the inverse of the expected number of arrivals, so that a model has its rate at every moment and its burstiness
at every rate.  Must always hold: the times depend on the model, the length and the seed alone; constant is constant.
Written as `poisson:rate=5`, `gamma:rate=5,cv=3`, `ramp:from=1,to=10`, `steps:2x60,8x60`,
`spike:rate=2,peak=20,at=30,for=5`; in a plan as a mapping with the same names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.errors import UserError

Floats = npt.NDArray[np.float64]

CONSTANT: Final = "constant"
POISSON: Final = "poisson"
GAMMA: Final = "gamma"
RAMP: Final = "ramp"
STEPS: Final = "steps"
SPIKE: Final = "spike"
MODELS: Final = (CONSTANT, POISSON, GAMMA, RAMP, STEPS, SPIKE)
#: model -> the figures it needs, and those it may have
FIGURES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    CONSTANT: (("rate",), ()),
    POISSON: (("rate",), ()),
    GAMMA: (("rate", "cv"), ()),
    RAMP: (("from", "to"), ("cv",)),
    STEPS: (("steps",), ("cv",)),
    SPIKE: (("rate", "peak", "at", "for"), ("cv",)),
}
MAX_ARRIVALS: Final = 100_000_000
_REMEDY: Final = (
    "write poisson:rate=5, gamma:rate=5,cv=3, ramp:from=1,to=10, steps:2x60,8x60 or spike:rate=2,peak=20,at=30,for=5"
)
_ARRIVALS: Final = 3  # stream of random numbers; those of the schedule are below


@dataclass(frozen=True, slots=True)
class ArrivalModel:
    """figures: rates per second, cv of the gaps (0: constant, 1: Poisson), seconds; steps: (rate, seconds) pairs."""

    model: str
    figures: tuple[tuple[str, float], ...] = ()
    steps: tuple[tuple[float, float], ...] = ()

    @classmethod
    def parse(cls, value: Any, where: str) -> ArrivalModel:
        """From the text of an option or the mapping of a plan.  Raises UserError."""
        if isinstance(value, str):
            model, _, rest = value.partition(":")
            if model == STEPS:
                parts = [part.partition("x") for part in rest.split(",") if part]
                given: dict[str, Any] = {"steps": [[rate, seconds] for rate, _, seconds in parts]}
            else:
                given = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        elif isinstance(value, Mapping):
            given = {str(key): item for key, item in value.items() if key != "model"}
            model = str(value.get("model"))
        else:
            raise UserError(f"{value!r} is no arrival model", where=where, remedy=_REMEDY)
        if model not in FIGURES:
            raise UserError(f"{model!r} is no arrival model", where=where, remedy=_REMEDY)
        needed, allowed = FIGURES[model]
        unknown = [name for name in given if name not in (*needed, *allowed)]
        missing = [name for name in needed if name not in given]
        if unknown or missing:
            what = f"{model} has no figure {unknown[0]!r}" if unknown else f"{model} needs {missing[0]!r}"
            raise UserError(what, where=where, remedy=_REMEDY)
        steps = given.pop("steps", [])
        try:
            pairs = tuple((float(rate), float(seconds)) for rate, seconds in steps)
            made = cls(model, tuple((name, float(item)) for name, item in given.items()), pairs)
        except (TypeError, ValueError):
            raise UserError(f"{value!r} has a figure that is no number", where=where, remedy=_REMEDY) from None
        made._check(where)
        return made

    def _check(self, where: str) -> None:
        figures = dict(self.figures)
        rates = [figures[name] for name in ("rate", "peak", "from", "to") if name in figures]
        rates += [rate for rate, _ in self.steps]
        lengths = [figures[name] for name in ("at", "for") if name in figures] + [seconds for _, seconds in self.steps]
        values = [*rates, *lengths, figures.get("cv", 1.0)]
        if not all(0 <= value < 1e7 for value in values) or not any(rate > 0 for rate in rates):
            raise UserError(f"{self} has a figure out of range", where=where, remedy=_REMEDY)

    def __str__(self) -> str:
        figures = ",".join(f"{name}={value:g}" for name, value in self.figures)
        return f"{self.model}:" + ",".join([*(f"{rate:g}x{seconds:g}" for rate, seconds in self.steps), figures]).strip(
            ","
        )

    def scaled(self, factor: float) -> ArrivalModel:
        """The same shape at so many times the rate."""
        rates = ("rate", "peak", "from", "to")
        figures = tuple((name, value * factor if name in rates else value) for name, value in self.figures)
        return ArrivalModel(self.model, figures, tuple((rate * factor, seconds) for rate, seconds in self.steps))

    @property
    def cv(self) -> float:
        """Of the gaps at a constant rate."""
        return dict(self.figures).get("cv", 0.0 if self.model == CONSTANT else 1.0)

    @property
    def length_s(self) -> float | None:
        """The model's own length: that of its steps; None: as long as it is asked for."""
        return sum(seconds for _, seconds in self.steps) or None

    def mean_rate(self, length_s: float) -> float:
        """Arrivals per second that are expected over so many seconds."""
        knots = self.knots(length_s)
        area = sum((at - before) * (rate + old) / 2 for (before, old), (at, rate) in itertools.pairwise(knots))
        return area / length_s

    def knots(self, length_s: float) -> list[tuple[float, float]]:
        """(seconds, rate): straight in between; two knots at one time are a jump."""
        figures = dict(self.figures)
        if self.model == RAMP:
            return [(0.0, figures["from"]), (length_s, figures["to"])]
        if self.model == STEPS:
            found, at = [], 0.0
            for rate, seconds in self.steps:
                found += [(at, rate), (at + seconds, rate)]
                at += seconds
            return [*found, (at, 0.0), (max(at, length_s), 0.0)]
        if self.model == SPIKE:
            start, end = figures["at"], figures["at"] + figures["for"]
            low, high = figures["rate"], figures["peak"]
            return [(0.0, low), (start, low), (start, high), (end, high), (end, low), (max(end, length_s), low)]
        return [(0.0, figures["rate"]), (length_s, figures["rate"])]

    def times(self, length_s: float, seed: int) -> Floats:
        """Arrivals within length_s, sorted, in seconds."""
        knots = self.knots(length_s)
        at = np.array([t for t, _ in knots])
        rates = np.array([rate for _, rate in knots])
        expected = np.concatenate(([0.0], np.cumsum(np.diff(at) * (rates[1:] + rates[:-1]) / 2)))
        if expected[-1] > MAX_ARRIVALS:
            raise UserError(f"{self} asks for {expected[-1]:,.0f} arrivals", where="--arrivals", remedy="ask for fewer")
        units = _unit_times(self.cv, float(expected[-1]), np.random.default_rng([seed, _ARRIVALS]))
        part = np.clip(np.searchsorted(expected, units, side="right") - 1, 0, len(knots) - 2)
        width, slope = np.diff(at)[part], np.diff(rates)[part]
        rest, rate = units - expected[part], rates[part]
        # rest = rate * t + slope / (2 width) * t^2, in the form that does not cancel
        root = np.sqrt(
            np.maximum(0.0, rate**2 + 2 * rest * np.divide(slope, width, where=width > 0, out=np.zeros_like(slope)))
        )
        found = at[part] + np.divide(2 * rest, rate + root, where=(rate + root) > 0, out=np.zeros_like(rest))
        within: Floats = found[found < length_s]
        return within

    def to_dict(self) -> dict[str, Any]:
        """As a plan holds it."""
        steps = {"steps": [list(step) for step in self.steps]} if self.steps else {}
        return {"model": self.model, **dict(self.figures), **steps}


def _unit_times(cv: float, until: float, rng: np.random.Generator) -> Floats:
    """A renewal process of mean gap 1 and this CV, from 0 to until."""
    if cv == 0:
        return np.arange(0.0, until)
    draw: Callable[[int], Floats]
    if cv == 1:
        draw = rng.standard_exponential
    else:
        shape = 1 / cv**2

        def draw(size: int) -> Floats:
            return rng.gamma(shape, 1 / shape, size)

    parts: list[Floats] = []
    last = 0.0
    while last < until:
        more = last + np.cumsum(draw(int((until - last) * 1.05) + 64))
        parts.append(more)
        last = float(more[-1])
    found = np.concatenate(parts) if parts else np.zeros(0)
    return found[found < until]
