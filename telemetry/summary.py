"""One run in figures and one sentence: what the terminal, ``--json``, the pages and the exit code all say.

Owns the choice of what is said first.  Must always hold: the run's own validity comes before the verdict on the server;
every percentile carries n; numbers are computed here once and only rendered elsewhere; ``to_dict`` is plain JSON
without NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.wording import several
from telemetry import (
    burn_rate,
    canary_estimate,
    canary_report,
    latency,
    layer,
    names,
    outcomes,
    retries,
    stats,
    validity,
    wrong_cause,
)
from telemetry.adapters.means import ServerAccount, accounts
from telemetry.bundle import INTERRUPTED, Bundle
from telemetry.judged import Judged, decide, judge_objective
from telemetry.objective import BROKEN, GOODPUT, HELD, UNDECIDED, Objective
from telemetry.phases import TTFT, Growth, Split, growth_through_run, splits
from telemetry.slo import Slo
from telemetry.usage import Usage, cached_share, usage_of

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)
PHASE_PERCENTILES: Final = (50.0, 90.0, 99.0)
WORST: Final = 3
#: The queue is said to grow through the run when the TTFT p90 of the last third is this many times that of the first
#: and the queue makes this share of the growth.
GROWTH_FACTOR: Final = 2.0
GROWTH_SHARE: Final = 0.5

_COLUMNS: Final = tuple(
    dict.fromkeys(
        (
            *outcomes.COLUMNS,
            *latency.COLUMNS,
            "trace_row",
            "error_detail",
            "cached_tokens",
            "prompt_tokens_reported",
            "completion_tokens_reported",
            "completion_tokens_counted",
            "usage_estimated",
        )
    )
)


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of one measure in seconds: from the intended send, from the actual send, and of survivors alone.

    from_send is empty for tpot, which has no start.  undefined: answered requests that have no such time.
    """

    measure: str
    scheduled: tuple[stats.Percentile, ...]
    from_send: tuple[stats.Percentile, ...]
    survivors: tuple[stats.Percentile, ...]
    undefined: int


@dataclass(frozen=True, slots=True)
class Request:
    """One of the worst requests; times in seconds from its intended send."""

    index: int
    trace_row: int | None
    intended_s: float
    label: str
    reason: str | None
    ttft_s: float | None
    e2e_s: float | None
    input_tokens: int | None
    parts: dict[str, float]
    detail: str | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that is said about a run.  ``held``: the SLO; ``exit_code``: by the precedence of telemetry.names.

    decision: held, broken or undecided (too few requests).  alerts: burn-rate alerts that would have fired. fluidity:
    p5 and p50 of the answers, where the SLO asks for it.  canaries: the estimate of wrong from checked answers.
    """

    run_id: str
    path: str
    status: str
    created_unix_ns: int
    trace: str
    simulated: str | None  # what the server simulated instead of computing
    slo: str
    validity: validity.Validity
    sentence: str
    held: bool
    decision: str
    exit_code: int
    attempted: int
    judged: int
    labels: dict[str, int]
    reasons: dict[str, dict[str, int]]
    goodput: float | None
    verified: int
    latencies: tuple[Latency, ...]
    phases: tuple[Split, ...]
    ttft_phases: tuple[Split, ...]
    growth: Growth | None
    overload: str | None
    objectives: tuple[Judged, ...]
    rule: str
    alerts: tuple[burn_rate.Fired, ...]
    fluidity: dict[str, float] | None
    canaries: canary_estimate.Estimate | None
    canary_report: canary_report.CanaryReport | None  # of canaries mixed into the load
    wrong_cause: wrong_cause.WrongCause  # what kind of wrong it looks like, and where to look
    worst: tuple[Request, ...]
    retries: retries.Retries | None  # of a plan with patience
    open_loop: bool
    usage: Usage
    cached_share: float | None  # of the prompt tokens, by the server's account; None: it gives none
    servers: tuple[ServerAccount, ...]  # of targets that are not ours: what they tell of their phases
    where: layer.Where  # the layer to look at
    torn_bytes: int
    next: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def summarize(bundle: Bundle, slo: Slo, before: Sequence[Bundle] = ()) -> Summary:
    """Judge a bundle under an SLO and gather its figures.  before: runs whose versions it is compared with."""
    read = bundle.read("requests", _COLUMNS)
    requests = read.table
    verdicts = bundle.verdicts(slo)
    run = validity.assess(requests, bundle.manifest, slo, verdicts)
    population = latency.Population(requests, verdicts)
    answered = population.answered
    labels = outcomes.counts(verdicts)
    attempted = verdicts.num_rows
    judged = attempted - labels[names.INVALID]
    objectives = tuple(judge_objective(o, population, requests, verdicts) for o in slo.objectives)
    decision = decide(slo, objectives) if judged else UNDECIDED
    growth = growth_through_run(answered)
    overload = _overload(growth) if decision == BROKEN else None
    simulated = bundle.manifest.get(names.SIMULATED_KEY)
    report = canary_report.read(bundle.path)
    found = names.EXIT_OK if report is None else report.exit_code
    reasons = outcomes.reasons(verdicts)
    looks = wrong_cause.cause(requests, report)
    return Summary(
        run_id=bundle.run_id,
        path=str(bundle.path),
        status=bundle.status,
        created_unix_ns=int(bundle.manifest.get("created_unix_ns", 0)),
        trace=str((bundle.manifest.get("trace") or {}).get("name", "")),
        simulated=simulated,
        slo=slo.name,
        validity=run,
        sentence=_sentence(decision, objectives, labels, reasons, judged, _blame(answered, verdicts))
        + ("" if report is None or found == names.EXIT_OK else f"; canaries: {report.verdict}")
        + ("" if simulated is None else f" [SIMULATED: {simulated}]"),
        held=decision == HELD,
        decision=decision,
        exit_code=_exit_code(bundle.status, run, decision, found),
        attempted=attempted,
        judged=judged,
        labels=labels,
        reasons=reasons,
        goodput=labels[names.GOOD] / judged if judged else None,
        verified=int(pc.sum(verdicts.column("verified")).as_py() or 0),
        latencies=tuple(_latency(population, measure) for measure in latency.MEASURES),
        phases=tuple(splits(answered, PHASE_PERCENTILES)),
        ttft_phases=tuple(splits(answered, PHASE_PERCENTILES, TTFT)),
        growth=growth,
        overload=overload,
        objectives=objectives,
        rule=slo.rule.words(slo.objectives),
        alerts=tuple(burn_rate.replay(slo, requests, verdicts)),
        fluidity=_fluidity(verdicts),
        canaries=canary_estimate.estimate(requests, verdicts),
        canary_report=report,
        wrong_cause=looks,
        worst=_worst(requests, verdicts),
        retries=retries.of_attempts(bundle.table("attempts", retries.COLUMNS)),
        open_loop=bool(bundle.manifest.get("open_loop", True)),
        usage=usage_of(requests),
        cached_share=cached_share(requests),
        servers=accounts(bundle),
        where=layer.where(bundle, slo, before, looks),
        torn_bytes=read.torn_bytes,
        next=(f"tailspan runs check {bundle.run_id}", "tailspan up"),
    )


def _latency(population: latency.Population, measure: str) -> Latency:
    values, dropped = population.values(measure)
    return Latency(
        measure,
        tuple(population.percentiles(measure, PERCENTILES)),
        tuple(population.percentiles(measure, PERCENTILES, from_send=True)) if measure != "tpot" else (),
        tuple(population.percentiles(measure, PERCENTILES, survivors=True)),
        population.n - dropped - len(values),
    )


def _fluidity(verdicts: pa.Table) -> dict[str, float] | None:
    values = pc.drop_null(verdicts.column("fluidity")).to_numpy()
    if not len(values):
        return None
    low, middle = stats.percentiles(1 - values, (95.0, 50.0))
    return {"p5": 1 - (low.value or 0.0), "p50": 1 - (middle.value or 0.0), "n": float(len(values))}


def _exit_code(status: str, run: validity.Validity, decision: str, canaries: int) -> int:
    if status == INTERRUPTED:
        return names.EXIT_INTERRUPTED
    holding = {canaries}
    if run.verdict != names.VALID or decision == UNDECIDED:  # a run too small for its SLO answers nothing either
        holding.add(names.EXIT_RUN_NOT_VALID)
    if decision == BROKEN:
        holding.add(names.EXIT_SLO_BROKEN)
    return next((code for code in names.EXIT_PRECEDENCE if code in holding), names.EXIT_OK)


def _sentence(
    decision: str,
    objectives: tuple[Judged, ...],
    labels: dict[str, int],
    reasons: dict[str, dict[str, int]],
    judged: int,
    blame: str | None,
) -> str:
    if judged == 0:
        return "No verdict: no request can be judged"
    asked = [
        f", {one.objective.text} asked" for one in objectives if not one.holds and one.objective.measure == GOODPUT
    ]
    good = f"{labels[names.GOOD]} of {judged} good ({format_share(labels[names.GOOD] / judged)}{''.join(asked[:1])})"
    failing = [one for one in objectives if one.verdict == BROKEN and one.objective.measure != GOODPUT]
    parts = [_broken(one) for one in failing] if decision == BROKEN else []
    if decision == UNDECIDED:
        parts = [
            f"{one.objective.text} needs {several(one.objective.min_requests, 'request')}, {one.n} there"
            for one in objectives
            if one.verdict == UNDECIDED
        ]
    counts = []
    for label in (names.LATE, names.WRONG, names.DROPPED):
        if labels[label]:
            why = list(reasons[label].items())  # most frequent first
            named = ", ".join(f"{reason} {count}" if len(why) > 1 else reason for reason, count in why[:2])
            note = (
                f", mostly {blame}" if label == names.LATE and blame else f" ({named})" if label != names.LATE else ""
            )
            counts.append(f"{labels[label]} {label}{note}")
    return f"SLO {decision}: " + "; ".join([good, *parts[:2], *counts])


def _broken(one: Judged) -> str:
    objective = one.objective
    name = objective.measure if objective.percentile is None else f"{objective.measure} p{objective.percentile:g}"
    shown = format_value(one)
    sign = "<" if objective.op == ">=" else ">"
    for measure in ("ttft", "tpot"):
        name = name.replace(measure, measure.upper())
    return f"{name} {shown} {sign} {format_bound(objective)}"


def format_value(one: Judged) -> str:
    """A judged value as a person writes it."""
    if one.unbounded:
        return "unbounded"
    if one.value is None:
        return "no data"
    return format_share(one.value) if one.objective.is_fraction else format_seconds(one.value)


def format_bound(objective: Objective) -> str:
    """The bound of an objective as a person writes it."""
    return format_share(objective.bound) if objective.is_fraction else format_seconds(objective.bound)


def format_share(share: float) -> str:
    """97.8 %."""
    return f"{100 * share:.1f} %"


def format_seconds(seconds: float) -> str:
    """Three significant figures: 4.12 s, 312 ms, 0.4 ms."""
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s" if abs(seconds) < 100 else f"{seconds:.0f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.3g} ms" if abs(milliseconds) >= 1 else f"{milliseconds:.1f} ms"


def _blame(answered: pa.Table, verdicts: pa.Table) -> str | None:
    """The part in which late requests spent most of their time, when it is more than half."""
    late = verdicts.filter(pc.equal(verdicts.column("label"), names.LATE)).column("index").combine_chunks()
    parts = latency.mean_parts(answered.filter(pc.is_in(answered.column("index"), late)))
    total = sum(parts.values())
    if total <= 0:
        return None
    largest = max(parts, key=lambda name: parts[name])
    return largest if parts[largest] > total / 2 else None


def _overload(growth: Growth | None) -> str | None:
    if growth is None or growth.first.total_s <= 0 or not growth.first.from_server:
        return None
    share = growth.share(names.QUEUE)
    if share is None or share < GROWTH_SHARE or growth.last.total_s < GROWTH_FACTOR * growth.first.total_s:
        return None
    return (
        f"Overload: TTFT p90 grew from {format_seconds(growth.first.total_s)} in the first third of the run to "
        f"{format_seconds(growth.last.total_s)} in the last; the queue makes {100 * min(share, 1.0):.0f} % of that"
    )


def _worst(requests: pa.Table, verdicts: pa.Table) -> tuple[Request, ...]:
    """The slowest answered requests; where there are too few, dropped ones."""
    known, place = latency.joined(requests, verdicts)
    label = verdicts.column("label")
    invalid, dropped = (pc.equal(label, one).to_numpy().astype(bool)[place] for one in (names.INVALID, names.DROPPED))
    e2e = latency.times(requests, "e2e")
    chosen: list[int] = []
    for part in (known & ~invalid & ~dropped, known & dropped):
        rows = np.flatnonzero(part)
        slowness = np.nan_to_num(e2e[rows], nan=-np.inf)
        take = min(WORST - len(chosen), len(rows))
        if take > 0:
            slowest = np.argpartition(-slowness, take - 1)[:take]
            chosen += rows[slowest[np.argsort(-slowness[slowest], kind="stable")]].tolist()
    table = requests.take(pa.array(chosen, pa.int64()))
    found = pa.array([place[row] for row in chosen], pa.int64())
    table = table.append_column("label", label.take(found))
    table = table.append_column("reason", verdicts.column("reason").take(found))
    return tuple(_request(row) for row in table.to_pylist())


def _request(row: dict[str, Any]) -> Request:
    parts: dict[str, float] = {}
    if row["server_duration_s"] is not None and row["end_s"] is not None and row["sent_s"] is not None:
        parts = {name: row[f"phase_{name}_s"] or 0.0 for name in names.PHASES}
        network = row["end_s"] - row["sent_s"] - row["server_duration_s"]
        parts = {names.CLIENT_WAIT: row["sent_s"] - row["intended_s"], names.NETWORK: network} | parts
    first = row["first_token_s"]
    return Request(
        index=row["index"],
        trace_row=row["trace_row"],
        intended_s=row["intended_s"],
        label=row["label"],
        reason=row["reason"],
        ttft_s=None if first is None else first - row["intended_s"],
        e2e_s=None if row["end_s"] is None else row["end_s"] - row["intended_s"],
        input_tokens=row["input_tokens"],
        parts=parts,
        detail=row["error_detail"],
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
