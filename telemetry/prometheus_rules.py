"""An SLO as Prometheus rules: recorded error ratios, and multi-window burn-rate alerts.

Owns which metric stands for which objective, and the text of the rules.  Must always hold: ``promtool check rules``
takes what is written here (a test asks it); an objective without a metric is named in the account, never left out in
silence; a latency threshold between two buckets becomes the bucket below it, which is the stricter one, and the rule
says so.

Every objective becomes a ratio of bad to all requests (``Objective.allowed_bad``).  Shares are counted by the generator
(``tailspan_requests_total``), times by the engine's histograms, which keep vLLM's names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import yaml

from telemetry import names
from telemetry.burn_rate import ALERTS, BAD_AT_LEAST, SHORT, alerts_of
from telemetry.objective import GOODPUT, Objective
from telemetry.slo import Slo

#: Histogram of the engine that holds the times of a measure; phases have one with a label.
HISTOGRAMS: Final = {
    "ttft": names.M_TTFT,
    "tpot": names.M_TPOT,
    "e2e": names.M_E2E,
}
RECORD: Final = "slo:bad:ratio_rate"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Counters (PromQL selectors) whose rates, divided, are the share of good requests; note: what is inexact."""

    good: str
    total: str
    note: str | None = None


def ratio_of(objective: Objective) -> Ratio | None:
    """The counters of an objective; None where no metric carries it (gap, fluidity, network, client wait)."""
    if objective.is_share:
        where = f',class="{objective.traffic_class}"' if objective.traffic_class else ""
        label, sign = (names.GOOD, "=") if objective.measure == GOODPUT else (objective.measure, "!=")
        outcomes = f'outcome{sign}"{label}"' + ("" if sign == "=" else f',outcome!="{names.INVALID}"')
        total = f'{names.M_OUTCOMES}_total{{outcome!="{names.INVALID}"{where}}}'
        return Ratio(f"{names.M_OUTCOMES}_total{{{outcomes}{where}}}", total)
    if objective.traffic_class is not None:
        return None  # the engine's histograms know no traffic class
    histogram, label = HISTOGRAMS.get(objective.measure), ""
    if histogram is None and objective.measure in names.PHASES:
        histogram, label = names.M_PHASE, f'phase="{objective.measure}"'
    below = [bucket for bucket in names.SECONDS_BUCKETS if bucket <= objective.bound * (1 + 1e-9)]
    if histogram is None or not below:
        return None
    note = None
    if abs(below[-1] - objective.bound) > 1e-9 * objective.bound:
        note = f"counted at the bucket of {below[-1]:g} s, the nearest below {objective.bound:g} s"
    # As prometheus_client writes a bound: all its digits, 2.0 and not 2.
    good = ",".join(part for part in (label, f'le="{float(below[-1])!r}"') if part)
    return Ratio(f"{histogram}_bucket{{{good}}}", f"{histogram}_count" + (f"{{{label}}}" if label else ""), note)


def rules(slo: Slo) -> dict[str, Any]:
    """The rule file as plain data: one group per objective that a metric carries."""
    groups = []
    for place, objective in enumerate(slo.objectives):
        ratio = ratio_of(objective)
        if ratio is not None:
            groups.append(_group(slo, objective, ratio, f"{slug(slo.name)}-{place}-{slug(objective.measure)}"))
    return {"groups": groups}


def not_exported(slo: Slo) -> list[str]:
    """Sentences on the objectives that have no rule, and on those that have an inexact one."""
    found = []
    for objective in slo.objectives:
        ratio = ratio_of(objective)
        if ratio is None:
            found.append(f"{objective.sentence}: no metric carries it; judge it in a run (tailspan gate)")
        elif ratio.note:
            found.append(f"{objective.sentence}: {ratio.note}")
        if objective.allowed_bad <= 0:
            found.append(f"{objective.sentence}: allows no bad request, so it has no budget and no burn-rate alert")
    return found


def text(slo: Slo) -> str:
    """The rule file in YAML, with what it could not say as comments."""
    head = [f"# Recording and burn-rate rules of the SLO {slo.name!r}, written by: tailspan slo export --to prometheus"]
    head += [f"# {line}" for line in not_exported(slo)]
    return "\n".join(head) + "\n" + yaml.safe_dump(rules(slo), sort_keys=False, width=1000)


def slug(text: str) -> str:
    """Lower-case letters, digits and dashes: what names of Kubernetes objects and rule groups may hold."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "slo"


def duration(seconds: float) -> str:
    """Prometheus' way to write whole seconds: 5m, 1h, 3d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _group(slo: Slo, objective: Objective, ratio: Ratio, name: str) -> dict[str, Any]:
    labels = {"slo": slug(slo.name), "objective": objective.sentence}
    windows = sorted({window for long, _, _ in ALERTS for window in (long, long / SHORT)})
    made: list[dict[str, Any]] = []
    for window in windows:
        over = duration(window)
        # While no request is good there is no good series at all: that is 0, not an absent answer.
        bad = f"1 - (sum(rate({ratio.good}[{over}])) or vector(0)) / (sum(rate({ratio.total}[{over}])) > 0)"
        made.append({"record": f"{RECORD}{over}", "expr": bad, "labels": dict(labels)})
    selector = "{" + ",".join(f'{key}="{_quoted(value)}"' for key, value in labels.items()) + "}"
    for alert in alerts_of(objective, slo.period_s):
        long, short = duration(alert.long_s), duration(alert.short_s)
        threshold = f"{alert.threshold(objective):.6g}"
        expression = f"{RECORD}{long}{selector} > {threshold} and {RECORD}{short}{selector} > {threshold}"
        bad = f"sum(increase({ratio.total}[{long}])) - (sum(increase({ratio.good}[{long}])) or vector(0))"
        expression += f" and on() {bad} >= {BAD_AT_LEAST}"
        if objective.min_requests:
            expression += f" and on() sum(increase({ratio.total}[{long}])) >= {objective.min_requests}"
        spent_in = duration(round(slo.period_s / alert.factor))
        made.append({
            "alert": "TailspanBudgetBurn",
            "expr": expression,
            "labels": {**labels, "severity": alert.severity, "long_window": long},
            "annotations": {
                "summary": f"{slo.name}: {objective.sentence} burns its error budget {alert.factor:g} times too fast",
                "description": f"Over {long} and over {short} more than {threshold} of the requests were bad. "
                f"At this rate the budget of {duration(slo.period_s)} is spent in {spent_in}.",
            },
        })  # fmt: skip
    return {"name": name, "rules": made}


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
