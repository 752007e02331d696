"""The time of real steps as a formula: fitted to the step log of a real engine, kept in a JSON file.

    seconds(step) = sum of coefficient * feature         features: 1, tokens up to 8 and up to 32, prefill tokens,
                                                         decode sequences, context tokens, attended pairs

Every feature can only add time, so coefficients are not negative; the steps of a matrix product by row get cheaper
with more rows, which the capped features say.  The fit is in relative error, with Huber's weights (Huber, Ann. Math.
Stat. 35(1), 1964), so that neither long steps nor disturbed ones decide alone.  What the formula leaves is the noise:
its size, the correlation of a step with the next, and stalls, which are steps far beyond the rest.

    python -m engine.step_fit RUN -o FILE      from the step log in a run bundle
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.step_load import StepLoad
from engine.step_model import Noise
from engine.steplog import StepRecord
from models.errors import UserError
from models.wording import several
from telemetry.least_squares import robust, spread

FEATURES: Final = ("step", "tokens_8", "tokens_32", "prefill_tokens", "decode_seqs", "context_tokens", "attended")
KIND: Final = "tailspan step fit"
VERSION: Final = 1
LEAST_STEPS: Final = 100
ABOUT_MAX: Final = 200  # it goes into headers and bundles
STALL_SIGMAS: Final = 5.0  # beyond so many robust deviations, and beyond STALL_RATIO times the formula: a stall
STALL_RATIO: Final = 1.5
_AGAIN: Final = "make it again: python -m engine.step_fit RUN -o FILE"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """What the fit reads of a record of the step log; ``engine.steplog.StepRecord`` has all of it."""

    start_ns: int
    end_ns: int
    gap_ns: int
    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    sampled_rows: int
    attended: int


@dataclass(frozen=True, slots=True)
class StepFit:
    """coefficients: seconds per unit of each of FEATURES.  gap_s: mean time between two steps with work at hand.

    steps: how many it rests on.  error: median of |formula - measured| / measured.  about: model and precision.
    """

    coefficients: tuple[float, ...]
    noise: Noise
    gap_s: float
    steps: int
    error: float
    about: str

    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step without noise."""
        total = 0.0
        for coefficient, value in zip(self.coefficients, _features(load), strict=True):
            total += coefficient * value
        return total

    def decodes(self, batch: int, contexts: Floats) -> Floats:
        """Seconds of steps that decode ``batch`` sequences each; contexts: tokens with KV of each step."""
        total: Floats = np.zeros(len(contexts))
        *steady, by_context, by_pair = self.coefficients
        for coefficient, value in zip(steady, _features(StepLoad(0, batch, 0, batch, 0))[:-2], strict=True):
            total = total + coefficient * value
        return total + by_context * contexts + by_pair * contexts

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "kind": KIND,
            "version": VERSION,
            "about": self.about,
            "steps": self.steps,
            "error": self.error,
            "gap_s": self.gap_s,
            "coefficients": dict(zip(FEATURES, self.coefficients, strict=True)),
            "noise": asdict(self.noise),
        }

    def save(self, path: Path) -> None:
        """Write it.  Raises UserError."""
        try:
            path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror}", where=str(path), remedy="name a path in a folder that exists"
            ) from error


def fit(steps: Sequence[Step | StepRecord], about: str) -> StepFit:
    """Fit a step log.  Raises UserError when it is too short or says nothing of what the steps did."""
    if len(steps) < LEAST_STEPS:
        raise UserError(
            f"{several(len(steps), 'step is', 'steps are')} too few for a fit, which needs {LEAST_STEPS}",
            where="step log",
            remedy="run longer, or with more requests",
        )
    loads = [StepLoad(s.prefill_tokens, s.decode_seqs, s.context_tokens, s.sampled_rows, s.attended) for s in steps]
    features = np.array([_features(load) for load in loads], dtype=np.float64)
    measured = np.array([(s.end_ns - s.start_ns) / 1e9 for s in steps], dtype=np.float64)
    if not (measured > 0).all():
        raise UserError("a step of no duration", where="step log", remedy="use the log of a real engine")
    coefficients = robust(features, measured)
    ratio = np.log(measured / (features @ coefficients))
    stalled = ratio > max(math.log(STALL_RATIO), STALL_SIGMAS * spread(ratio))
    calm = ratio[~stalled]
    level = float(np.mean(np.exp(calm)))  # so that times add up to the measured ones, not to their median
    coefficients = coefficients * level
    base = features @ coefficients
    noise = _noise(np.log(measured / base), measured, base, stalled)
    gaps = np.array([s.gap_ns / 1e9 for s in steps if s.gap_ns > 0], dtype=np.float64)
    gap = float(np.minimum(gaps, np.quantile(gaps, 0.99)).mean()) if len(gaps) else 0.0
    error = float(np.median(np.abs(base / measured - 1.0)))
    return StepFit(tuple(float(c) for c in coefficients), noise, gap, len(steps), error, about)


def _features(load: StepLoad) -> tuple[float, ...]:
    tokens = load.prefill_tokens + load.decode_seqs
    return (
        1.0,
        float(min(tokens, 8)),
        float(min(tokens, 32)),
        float(load.prefill_tokens),
        float(load.decode_seqs),
        float(load.context_tokens),
        float(load.attended),
    )


def _noise(ratio: Floats, measured: Floats, base: Floats, stalled: npt.NDArray[np.bool_]) -> Noise:
    calm = ratio[~stalled]
    both = ~stalled[1:] & ~stalled[:-1]
    here, there = ratio[1:][both] - calm.mean(), ratio[:-1][both] - calm.mean()
    norm = float(np.sqrt((here**2).sum() * (there**2).sum()))
    excess = (measured - base)[stalled]
    return Noise(
        sigma=float(calm.std()),
        autocorrelation=float(np.clip((here * there).sum() / norm, 0.0, 0.99)) if norm > 0 else 0.0,
        stall_rate=float(stalled.sum() / base.sum()),
        stall_s=float(excess.mean()) if len(excess) else 0.0,
    )


def load(path: Path) -> StepFit:
    """Read a fit.  Raises UserError that names the file, the field and the value."""
    where = str(path)
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", where=where, remedy="give the path of a step fit"
        ) from error
    except ValueError as error:
        raise UserError(f"not JSON: {error}", where=where, remedy=_AGAIN) from error
    return from_dict(body, where)


def from_dict(body: Any, where: str) -> StepFit:
    """A fit from ``StepFit.to_dict``.  Raises UserError that names ``where``, the field and the value."""
    if not isinstance(body, dict) or body.get("kind") != KIND:
        raise UserError(f"not a {KIND}", where=where, remedy=_AGAIN)
    if body.get("version") != VERSION:
        raise UserError(f"version {body.get('version')!r}, but {VERSION} is read", where=where, remedy=_AGAIN)
    named = _part(body, "coefficients", where)
    unknown = sorted(set(named) - set(FEATURES))
    if unknown:
        raise UserError(f"coefficients has {unknown[0]!r}, which is no feature", where=where, remedy=_AGAIN)
    coefficients = tuple(_number(named, feature, where) for feature in FEATURES)
    if not any(coefficients):
        raise UserError("all coefficients are 0: a step would take no time", where=where, remedy=_AGAIN)
    parts = _part(body, "noise", where)
    noise = Noise(
        _number(parts, "sigma", where, most=3.0),
        _number(parts, "autocorrelation", where, most=0.999),
        _number(parts, "stall_rate", where),
        _number(parts, "stall_s", where),
    )
    if noise.stall_rate > 0 and noise.stall_s == 0:
        raise UserError("stall_rate is above 0, but stall_s is 0", where=where, remedy=_AGAIN)
    about = body.get("about")
    if not isinstance(about, str) or not about.isprintable() or len(about) > ABOUT_MAX:
        wanted = f"a printable text of at most {ABOUT_MAX} characters"
        raise UserError(f"about is {about!r:.80}, but must be {wanted}", where=where, remedy=_AGAIN)
    steps = int(_number(body, "steps", where))
    return StepFit(
        coefficients,
        noise,
        _number(body, "gap_s", where),
        steps,
        _number(body, "error", where),
        about,
    )


def _part(body: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    part = body.get(key)
    if not isinstance(part, dict):
        raise UserError(f"{key} is {part!r}, not an object", where=where, remedy=_AGAIN)
    return part


def _number(body: dict[str, Any], key: str, where: str, most: float = math.inf) -> float:
    value = body.get(key)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not 0 <= value <= most
    ):
        wanted = "at least 0" if most == math.inf else f"between 0 and {most:g}"
        raise UserError(f"{key} is {value!r}, but must be a number {wanted}", where=where, remedy=_AGAIN)
    return float(value)


def of_run(reference: str) -> StepFit:
    """The fit of the step log in a run bundle.  Raises UserError: no such run, no steps, steps that were simulated."""
    from telemetry.bundle import Bundle

    bundle = Bundle.open(reference)
    table = bundle.table("steps", [*Step.__dataclass_fields__, "simulated"])
    rows = table.to_pylist()
    if any(row["simulated"] for row in rows):
        raise UserError("its steps were simulated themselves", where=str(bundle.path), remedy="use a real engine's run")
    if any(row["attended"] is None for row in rows):
        raise UserError(
            "its step log lacks attended pairs: an older version wrote it",
            where=str(bundle.path),
            remedy="run it again",
        )
    return fit([Step(**{key: row[key] for key in Step.__dataclass_fields__}) for row in rows], bundle.run_id)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run bundle: its path, its id, or 'latest'")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    try:
        found = of_run(options.run)
        found.save(options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    print(f"{options.out}: {found.steps} steps, median error {found.error:.1%}, sigma {found.noise.sigma:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
