"""How often the diagnosis was right: a confusion matrix over (class, cause), with "unknown" as a column.

Scores: top-1 cause, class, and workload against fault as F1 (positive: a change that lies in the server).
A trial whose explanation is "unknown" counts as wrong in the first, and by its label in the second.  The third leaves
out runs that are not valid, which say nothing of the server, and trials that have both at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from loadgen.lab.scenario import INVALID, NONE
from loadgen.lab.trial import Trial

UNKNOWN: Final = "unknown"
#: Causes that lie in what was asked of the server, or in nothing at all.
WORKLOAD: Final = frozenset({"arrivals", "prompt_lengths", "output_lengths", "no_change"})


@dataclass(frozen=True, slots=True)
class Score:
    """right: top-1 causes; labels: classes; of ``trials``.  two: trials with two faults; ordered: both named, the
    larger first.  f1: of telling a fault from a change of the workload."""

    trials: int
    right: int
    labels: int
    unknown: int
    precision: float
    recall: float
    f1: float
    two: int
    ordered: int

    def sentence(self) -> str:
        """One line for people."""
        n = max(1, self.trials)
        both = f"; two at once in their order {self.ordered} of {self.two}" if self.two else ""
        return (
            f"{self.trials} trials: cause right {self.right} ({self.right / n:.1%}), class right {self.labels} "
            f"({self.labels / n:.1%}), unknown {self.unknown}; fault against workload F1 {self.f1:.3f} "
            f"(precision {self.precision:.3f}, recall {self.recall:.3f}){both}"
        )


def name_of(verdict: tuple[str, str]) -> str:
    """ "late · arrivals"; unknown of any class is one column."""
    label, cause = verdict
    return UNKNOWN if cause == UNKNOWN else NONE if label == NONE else f"{label} · {cause}"


def score(trials: Sequence[Trial]) -> Score:
    """Of all trials."""
    judged = [one for one in trials if one.truth[0] != INVALID and not _both(one)]
    faults = [one.truth[1] not in WORKLOAD for one in judged]
    called = [one.said[1] not in WORKLOAD and one.said[1] != UNKNOWN for one in judged]
    hits = sum(a and b for a, b in zip(faults, called, strict=True))
    precision = hits / sum(called) if any(called) else float(not any(faults))
    recall = hits / sum(faults) if any(faults) else 1.0
    return Score(
        trials=len(trials),
        right=sum(one.right for one in trials),
        labels=sum(one.label_right for one in trials),
        unknown=sum(one.said[1] == UNKNOWN for one in trials),
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall) if precision + recall else 0.0,
        two=sum(bool(one.then) for one in trials),
        ordered=sum(one.right and one.second == one.then for one in trials if one.then),
    )


def _both(trial: Trial) -> bool:
    """A change of the workload and a fault at once: neither answer would be wrong."""
    return bool(trial.then) and (trial.truth[1] in WORKLOAD) != (trial.then in WORKLOAD)


def matrix(trials: Sequence[Trial]) -> tuple[list[str], list[str], Counter[tuple[str, str]]]:
    """Rows (truths, with their scenarios), columns (what was said; unknown last) and counts."""
    rows = list(dict.fromkeys(name_of(one.truth) for one in trials))
    said = {name_of(one.said) for one in trials} - {UNKNOWN}
    columns = [*(row for row in rows if row in said), *sorted(said - set(rows)), UNKNOWN]
    return rows, columns, Counter((name_of(one.truth), name_of(one.said)) for one in trials)


def markdown(trials: Sequence[Trial]) -> str:
    """The matrix, then what each scenario scored."""
    rows, columns, counts = matrix(trials)
    lines = [
        "| truth | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *("| " + " | ".join([row, *(str(counts[(row, one)] or "") for one in columns)]) + " |" for row in rows),
        "",
        "| scenario | truth | load | trials | cause right | class right | said instead |",
        "|---|---|---|---|---|---|---|",
    ]
    for (scenario, load), mine in _grouped(trials).items():
        wrong = Counter(name_of(one.said) for one in mine if not one.right)
        said = ", ".join(f"{name} {n}" for name, n in wrong.most_common())
        cells = [scenario, name_of(mine[0].truth), f"{load:g}", str(len(mine)), str(sum(one.right for one in mine))]
        lines.append("| " + " | ".join([*cells, str(sum(one.label_right for one in mine)), said]) + " |")
    return "\n".join([*lines, "", score(trials).sentence()])


def text(trials: Sequence[Trial]) -> str:
    """For a terminal: a line for each scenario and load, and the score; the matrix itself is in Markdown and JSON."""
    lines = []
    for (scenario, load), mine in _grouped(trials).items():
        right = sum(one.right for one in mine)
        wrong = Counter(name_of(one.said) for one in mine if not one.right)
        said = ", ".join(f"{name} {n}" for name, n in wrong.most_common())
        mark = "ok " if right == len(mine) else "   "
        truth = name_of(mine[0].truth)
        lines.append(f"{mark}{scenario:<5}{truth:<26}load {load:<5g}{right}/{len(mine)}  {said}".rstrip())
    return "\n".join([*lines, score(trials).sentence()])


def to_dict(trials: Sequence[Trial]) -> dict[str, Any]:
    """Plain JSON."""
    rows, columns, counts = matrix(trials)
    found = score(trials)
    return {
        "score": {name: getattr(found, name) for name in Score.__slots__},
        "columns": columns,
        "matrix": {row: {one: counts[(row, one)] for one in columns if counts[(row, one)]} for row in rows},
        "trials": [one.to_dict() for one in trials],
    }


def _grouped(trials: Sequence[Trial]) -> dict[tuple[str, float], list[Trial]]:
    found: dict[tuple[str, float], list[Trial]] = {}
    for one in trials:
        found.setdefault((one.scenario, one.load), []).append(one)
    return found
