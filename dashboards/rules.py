"""The Prometheus rules of the stack: ``python -m dashboards.rules [--check]`` writes dashboards/prometheus/*.rules.yml.

Owns what is recorded and what alerts beyond an SLO's own burn-rate rules (``telemetry.prometheus_rules``, reused here):
the same burn rates by traffic class, wrong answers, an engine that hangs, stalls or is away, and a load generator that
cannot be believed.  Must always hold: every alert says in its description what to look at next; promtool takes the
files and its rule tests (tests/stack) pass; the checked-in files are what this module makes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from telemetry import names, prometheus_rules
from telemetry.burn_rate import BAD_AT_LEAST, SHORT, alerts_of
from telemetry.objective import GOODPUT, Objective
from telemetry.prometheus_rules import duration
from telemetry.slo import Slo, load
from telemetry.validity import CPU_MAX

FOLDER: Final = Path(__file__).parent / "prometheus"
SLO: Final = "demo"  # of the compose stack's load, unless told otherwise
BY_CLASS: Final = "class:bad:ratio_rate"
NO_STEP: Final = "tailspan:no_step:share1m"
HANG_FOR: Final = "30s"
STALLED_SHARE: Final = 0.05  # of the time with work and no step; healthy runs had 0.3 to 0.6 % (make accept-grafana)
P99_SAMPLE: Final = 100  # requests below which a p99 is the one latest of them
OUTCOMES: Final = f"{names.M_OUTCOMES}_total"
ENGINE: Final = "job, instance, model_name, engine"


def class_rules(slo: Slo) -> list[dict[str, Any]]:
    """For every share objective that holds for all classes: its burn rates and alerts class by class."""
    groups = []
    for place, objective in enumerate(slo.objectives):
        if objective.is_share and objective.traffic_class is None and objective.allowed_bad > 0:
            name = f"{prometheus_rules.slug(slo.name)}-by-class-{place}-{prometheus_rules.slug(objective.measure)}"
            groups.append({"name": name, "rules": _by_class(slo, objective)})
    return groups


def _by_class(slo: Slo, objective: Objective) -> list[dict[str, Any]]:
    bad = f'outcome!="{names.GOOD}",' if objective.measure == GOODPUT else f'outcome="{objective.measure}",'
    bad += f'outcome!="{names.INVALID}"'
    total = f'{OUTCOMES}{{outcome!="{names.INVALID}"}}'
    labels = {"slo": prometheus_rules.slug(slo.name), "objective": objective.sentence}
    made: list[dict[str, Any]] = []
    for window in sorted(
        {size for alert in alerts_of(objective, slo.period_s) for size in (alert.long_s, alert.short_s)}
    ):
        over = duration(window)
        everything = f"sum by (class) (rate({total}[{over}]))"
        # while nothing is bad there is no bad series: that is 0 of what there is
        some = f"(sum by (class) (rate({OUTCOMES}{{{bad}}}[{over}])) or 0 * {everything})"
        made.append({"record": f"{BY_CLASS}{over}", "expr": f"{some} / ({everything} > 0)", "labels": dict(labels)})
    selector = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
    for alert in alerts_of(objective, slo.period_s):
        long, short, limit = duration(alert.long_s), duration(alert.short_s), f"{alert.threshold(objective):.6g}"
        expression = f"{BY_CLASS}{long}{selector} > {limit} and {BY_CLASS}{short}{selector} > {limit}"
        counted = f"sum by (class) (increase({OUTCOMES}{{{bad}}}[{long}])) >= {BAD_AT_LEAST}"
        made.append({
            "alert": "TailspanClassBudgetBurn",
            "expr": f"{expression} and on (class) {counted}",
            "labels": {**labels, "severity": alert.severity, "long_window": long},
            "annotations": {
                "summary": f"class {{{{ $labels.class }}}}: {objective.sentence} burns its budget {alert.factor:g} "
                "times too fast",
                "description": f"Over {long} and over its {SHORT}th part more than {limit} of this class were bad. "
                "Look at the triage page, or at the Grafana dashboard 'tailspan: live', by class.",
            },
        })  # fmt: skip
    return made


def recorded() -> list[dict[str, Any]]:
    """What dashboards and people ask again and again."""
    by = "sum by (model_name, engine, phase)"
    made, read = f"rate({names.M_GENERATION_TOKENS}_total[1m])", f"rate({names.M_PROMPT_TOKENS}_total[1m])"
    spent, ended = (f"{by} (rate({names.M_PHASE}_{part}[1m]))" for part in ("sum", "count"))
    exprs = {
        "tailspan:outcomes:rate1m": f"sum by (outcome, reason, class, replica) (rate({OUTCOMES}[1m]))",
        "tailspan:phase_seconds:mean1m": f"{spent} / ({ended} > 0)",
        "tailspan:tokens:rate1m": f"sum by ({ENGINE}) ({made} + {read})",
        NO_STEP: f"sum by ({ENGINE}) (rate({names.M_STEP_GAP}_sum[1m]))",
    }
    return [{"record": name, "expr": expr} for name, expr in exprs.items()]


def alerts() -> list[dict[str, Any]]:
    """Alerts that no SLO file speaks of."""
    wrong = f'{OUTCOMES}{{outcome="{names.WRONG}"}}'
    working = f"({names.M_RUNNING} + {names.M_WAITING}) > 0"
    made, read = (f"increase({name}_total[{HANG_FOR}])" for name in (names.M_GENERATION_TOKENS, names.M_PROMPT_TOKENS))
    bound, enough = names.M_CLIENT_LAG_BOUND, f"{names.M_CLIENT_SENT}_total >= {P99_SAMPLE}"
    late = f"({names.M_SCHEDULE_LAG} > {bound} and {enough})"
    limited = f"{late} or ({names.M_CLIENT_LOOP_LAG} > {bound}) or ({names.M_CLIENT_CPU} >= {CPU_MAX:g})"
    return [
        _alert(
            "TailspanEngineHangs",
            f"{working} and ({made} + {read}) == 0",
            "page",
            "{{ $labels.engine }} has requests and makes no token",
            "/health may still answer 200. Take its stacks (py-spy dump) before a restart; see 'tailspan: engine'.",
            wait="15s",
        ),
        _alert(
            "TailspanEngineStalls",
            f"{NO_STEP} > {STALLED_SHARE:g}",
            "ticket",
            "{{ $labels.engine }} had work and ran no step for {{ $value | humanizePercentage }} of the time",
            "Look at its pauses (garbage collection, event loop) and at its neighbours: 'tailspan: engine', row Steps.",
            wait="15s",
        ),
        _alert(
            "TailspanEngineAway",
            'up{job="tailspan-engine"} == 0',
            "page",
            "{{ $labels.instance }} does not answer a scrape",
            "Is it down, or loading its model?",
            wait="15s",
        ),
        _alert(
            "TailspanCanaryFailures",
            f"sum by (class, reason, replica) ({_grown(wrong, '10m')}) >= {BAD_AT_LEAST}",
            "page",
            "{{ $value | humanize }} wrong answers in 10 min ({{ $labels.reason }}) from {{ $labels.replica }}",
            "Answers came in time and are bad: nothing else alarms. See the Quality page; ask the same server: "
            "tailspan canaries check.",
        ),
        _alert(
            "TailspanAnswersDiverge",
            f"increase({names.M_DIVERGENCE}_total[15m]) > 0",
            "page",
            "{{ $labels.engine }} answers differently in a batch than alone",
            "Found by --shadow. /debug/divergences has the requests.",
        ),
        _alert(
            "TailspanNotFinite",
            f"increase({names.M_NONFINITE}_total[5m]) > 0",
            "page",
            "{{ $labels.engine }} computed logits that are not finite",
            "Each is a dropped request; if it goes on, the weights or the KV are damaged: restart it.",
        ),
        _alert(
            "TailspanLawBroken",
            f"increase({names.M_LAW_VIOLATIONS}_total[15m]) > 0",
            "ticket",
            "{{ $labels.engine }} broke a conservation law of its own",
            "/debug/invariants says which. It is a bug.",
        ),
        _alert(
            "TailspanClientLimited",
            limited,
            "info",
            "the load generator does not keep up: {{ $labels.__name__ }} is {{ $value | humanize }}",
            "What it measures is partly its own. Give it more workers or its own machine. Holds burn-rate alerts back.",
            wait="15s",
        ),
    ]


def _grown(counter: str, over: str) -> str:
    """PromQL: by how much a counter grew; one that was not there at the start counts from 0."""
    return f"({counter} unless {counter} offset {over}) or increase({counter}[{over}])"


def _alert(name: str, expr: str, severity: str, summary: str, description: str, *, wait: str = "") -> dict[str, Any]:
    held = {"for": wait} if wait else {}
    notes = {"summary": summary, "description": description}
    return {"alert": name, "expr": expr, **held, "labels": {"severity": severity}, "annotations": notes}


def made(slo: Slo | None = None) -> dict[str, str]:
    """File name -> text; of the stack's SLO, or of another."""
    slo = load(SLO) if slo is None else slo
    name = prometheus_rules.slug(slo.name)
    head = "# Made by: python -m dashboards.rules; do not edit by hand.\n"
    own = {
        "groups": [{"name": "tailspan-recorded", "rules": recorded()}, {"name": "tailspan-alerts", "rules": alerts()}]
    }
    return {
        "tailspan.rules.yml": head + _yaml(own),
        f"slo-{name}.rules.yml": head + prometheus_rules.text(slo),
        f"slo-{name}-by-class.rules.yml": head + _yaml({"groups": class_rules(slo)}),
    }


def _yaml(plain: dict[str, Any]) -> str:
    return str(yaml.safe_dump(plain, sort_keys=False, width=1000))


def main(words: list[str]) -> int:
    wrong = 0
    for name, text in made().items():
        path = FOLDER / name
        if words == ["--check"]:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                print(f"{path} is not what the code makes; run: python -m dashboards.rules")
                wrong = 1
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
