"""Two runs side by side: which earlier one to compare with, what was run differently, how each percentile moved.

One pair of runs cannot tell a change from the noise of queueing, so nothing here speaks of significance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.bundle import COMPLETE, MANIFEST, Bundle, age
from telemetry.phases import Split
from telemetry.summary import Summary

#: The manifest's entries that say what was run; the others (times, process ids, results) differ in every run.
_COMPARED: Final = (
    "versions", "hashes", "server", "simulated", "slo", "trace", "transforms", "plan", "seeds", "scheduled", "targets",
)  # fmt: skip
#: Inside them: what names the run itself, texts that a hash beside them covers, and what follows from another figure.
_LEFT_OUT: Final = frozenset(
    {
        "run_id", "salt", "text", "first_drop", "detail", "trace_path", "source", "file", "url", "targets", "requests",
        "before", "after", "kind", "predicted", "inputs_raised", "outputs_raised", "rate_scale", "length_scale",
    }
)  # fmt: skip
_DERIVED: Final = re.compile(r"(input|output)_mean_(before|after)")
_LOOKED_AT: Final = 60  # earlier runs whose manifests are read to find a baseline


@dataclass(frozen=True, slots=True)
class Step:
    """One bar of a waterfall, in seconds: a whole (A or B), or what one phase added (negative: took away)."""

    name: str
    start_s: float
    end_s: float
    whole: bool

    @property
    def change_s(self) -> float:
        return self.end_s - self.start_s


def earlier_run(bundle: Bundle, paths: Iterable[Path]) -> Path | None:
    """The newest complete run that began before this one and replayed the same trace; None: there is none."""
    mine = bundle.manifest
    trace = (mine.get("trace") or {}).get("name")
    mine_age = age(bundle.path)
    looked = 0
    for path in paths:  # newest first
        if age(path) >= mine_age or looked >= _LOOKED_AT:
            continue
        looked += 1
        try:
            theirs = json.loads((path / MANIFEST).read_bytes())
        except (OSError, ValueError):
            continue
        if theirs.get("status") == COMPLETE and (theirs.get("trace") or {}).get("name") == trace:
            return path
    return None


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was run differently, by the two manifests: name, in A, in B; in the manifest's order."""
    found = []
    flat_a, flat_b = (dict(_flat(m, _COMPARED)) for m in (a, b))
    for name in dict.fromkeys((*flat_a, *flat_b)):
        old, new = flat_a.get(name, ""), flat_b.get(name, "")
        if old != new:
            found.append((name, old, new))
    return found


def _flat(value: Mapping[str, Any], names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        yield from _leaves(name, value.get(name))


def _leaves(name: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _LEFT_OUT and not _DERIVED.fullmatch(key):
                # A server is told apart by its place in the list, not by a port that changes with every start.
                yield from _leaves(f"{name} {'' if '://' in key else key}".strip(), inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            own = inner.get("name") if isinstance(inner, Mapping) else None
            rest = {key: deep for key, deep in inner.items() if key != "name"} if own else inner
            yield from _leaves(f"{name} {own or place + 1}", rest)
    elif value is not None:
        yield name, f"{value:.6g}" if isinstance(value, float) else str(value)


def waterfall(a: Split, b: Split) -> list[Step]:
    """From the percentile of A to that of B, phase by phase; the steps end at B's value by construction."""
    at = a.total_s
    steps = [Step("A", 0.0, at, True)]
    for part in dict.fromkeys((*a.parts, *b.parts)):
        change = b.parts.get(part, 0.0) - a.parts.get(part, 0.0)
        steps.append(Step(part, at, at + change, False))
        at += change
    steps.append(Step("B", 0.0, b.total_s, True))
    return steps


def worth_showing(steps: list[Step], most: int) -> list[Step]:
    """The wholes and the ``most`` largest changes; the rest joined into one step named ``rest``, order kept.

    A change of less than a hundredth of the larger whole would be a line without height: it goes into the rest.
    """
    inner = [step for step in steps if not step.whole]
    least = 0.01 * max(step.end_s for step in steps if step.whole)
    largest = sorted(inner, key=lambda step: -abs(step.change_s))[:most]
    kept = {step.name for step in largest if abs(step.change_s) >= least}
    rest = sum(step.change_s for step in inner if step.name not in kept)
    shown = [steps[0]]
    at = steps[0].end_s
    for step in inner:
        if step.name in kept:
            shown.append(Step(step.name, at, at + step.change_s, False))
            at += step.change_s
    if abs(rest) > 1e-9:
        shown.append(Step("rest", at, at + rest, False))
    return [*shown, steps[-1]]


def paired_percentiles(a: Summary, b: Summary) -> list[tuple[str, Any, Any]]:
    """(measure and p, Percentile of A, of B), from the intended send, dropped requests as infinitely slow."""
    found = []
    theirs = {latency.measure: latency for latency in b.latencies}
    for latency in a.latencies:
        for one, two in zip(latency.scheduled, theirs[latency.measure].scheduled, strict=True):
            found.append((f"{latency.measure} p{one.p:g}", one, two))
    return found


def find_split(splits: Iterable[Split], p: float) -> Split | None:
    """The split at one percentile."""
    return next((split for split in splits if split.p == p), None)
