"""The gate before a launch: one run, its SLO and, where asked, a baseline, brought to one exit code.

Owns the precedence of what may hold at once.  Must always hold: 5 internal > 4 usage > 3 run not valid > 1 SLO broken >
2 regression, as ``names.EXIT_PRECEDENCE`` has it, and an interrupted run is 130 whatever else holds; a run that is not
VALID is never called a regression, since it says nothing of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from telemetry import names, population, regression
from telemetry.baseline import Load, require_same_load
from telemetry.bundle import Bundle
from telemetry.population import SAMPLE_COLUMNS, Shift, sample_of
from telemetry.regression import Change
from telemetry.slo import Slo
from telemetry.summary import Summary, summarize

WORDS = {
    names.EXIT_OK: "SLO held",
    names.EXIT_SLO_BROKEN: "SLO broken",
    names.EXIT_REGRESSION: "regression against the baseline",
    names.EXIT_RUN_NOT_VALID: "no verdict: the run is not valid, or too small for its SLO",
    names.EXIT_INTERRUPTED: "interrupted",
}


@dataclass(frozen=True, slots=True)
class Gate:
    """baseline: its name and run ids, None without one.  changes: every figure against it.

    shifts: features of inputs and outputs whose population has moved: suspicion, which changes no exit code.
    """

    summary: Summary
    baseline: tuple[str, tuple[str, ...]] | None
    changes: tuple[Change, ...]
    shifts: tuple[Shift, ...]
    exit_code: int

    @property
    def words(self) -> str:
        """What the exit code means."""
        return WORDS[self.exit_code]

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(one for one in self.changes if one.regressed)

    def to_dict(self) -> dict[str, Any]:
        """The summary's fields, with those of the gate beside them."""
        baseline = None if self.baseline is None else {"name": self.baseline[0], "runs": list(self.baseline[1])}
        gate = {
            "baseline": baseline,
            "changes": [one.to_dict() for one in self.changes],
            "shifts": [one.to_dict() for one in self.shifts],
            "exit_code": self.exit_code,
        }
        return self.summary.to_dict() | {"gate": gate, "exit_code": self.exit_code}


def gate(bundle: Bundle, slo: Slo, name: str | None = None, baseline: Sequence[Bundle] = ()) -> Gate:
    """Judge a run, and compare it with the runs of a baseline.  UserError where their loads differ."""
    summary = summarize(bundle, slo, baseline)
    require_same_load(baseline, Load.of(bundle.manifest), name)
    trusted = summary.validity.verdict == names.VALID and summary.judged > 0
    changes = tuple(regression.compare(bundle, baseline, slo)) if baseline and trusted else ()
    named = (str(name), tuple(one.run_id for one in baseline)) if baseline else None
    shifts = _shifts(bundle, baseline) if baseline else ()
    return Gate(summary, named, changes, shifts, exit_code(summary.exit_code, changes))


def _shifts(bundle: Bundle, baseline: Sequence[Bundle]) -> tuple[Shift, ...]:
    """What is suspicious between the requests of the baseline's runs together and those of this one."""
    before = pa.concat_tables([one.table("requests", SAMPLE_COLUMNS) for one in baseline])
    after = bundle.table("requests", SAMPLE_COLUMNS)
    return tuple(one for one in population.compare(sample_of(before), sample_of(after)) if one.suspicious)


def exit_code(of_run: int, changes: Sequence[Change]) -> int:
    """The code of a run with what the comparison adds, by precedence."""
    if of_run == names.EXIT_INTERRUPTED:
        return of_run
    holding = {of_run} | ({names.EXIT_REGRESSION} if any(one.regressed for one in changes) else set())
    return next((code for code in names.EXIT_PRECEDENCE if code in holding), names.EXIT_OK)
