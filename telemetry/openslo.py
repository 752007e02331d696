"""SLOs as OpenSLO v1 documents, out and in (https://github.com/OpenSLO/OpenSLO, apiVersion openslo/v1).

Owns the mapping.  Out: one ``SLO`` document per objective, with a ``ratioMetric`` of good to total where a Prometheus
metric carries it; the sentence, the class and the deadlines go along as annotations.  In: our own annotations give back
the file exactly; documents of others are read by their metric.  Must always hold: export followed by import judges
alike (same hash, where every objective has a metric); a document that is not understood is refused with its line and a
remedy, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

import yaml

from models.errors import UserError
from models.yaml_text import yaml_errors
from telemetry import names
from telemetry.objective import GOODPUT, GRAMMAR, LATENCIES, Problem, parse_sentence
from telemetry.prometheus_rules import HISTOGRAMS, duration, not_exported, ratio_of, slug
from telemetry.slo import ClassRule, Slo, parse

API: Final = "openslo/v1"
OBJECTIVE: Final = "tailspan/objective"  # annotation: the sentence
CLASS: Final = "tailspan/class"
LEAST: Final = "tailspan/min-requests"
CLASSES: Final = "tailspan/classes"  # annotation: JSON of the deadline figures
MAX_BYTES: Final = 1 << 20

_MEASURES: Final = {metric: measure for measure, metric in HISTOGRAMS.items()} | {names.M_QUEUE_TIME: names.QUEUE}
_METRIC: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_BUCKET: Final = re.compile(r'le="([0-9.e+-]+)"')
_PHASE: Final = re.compile(r'phase="([a-z0-9_]+)"')
_OUTCOME: Final = re.compile(r'outcome\s*(!?=~?)\s*"([a-z|]+)"')
_STATUS: Final = re.compile(r'\b(?:code|status|status_code|http_status|response_code)\s*(?:=~?|!=|!~)\s*"')


def to_openslo(slo: Slo) -> str:
    """The SLO as YAML documents.  UserError where OpenSLO has no word for it: an OR, or no exportable objective."""
    if not slo.rule.is_flat:
        raise UserError(
            f"joins objectives by OR ({slo.rule.words(slo.objectives)}), and documents of OpenSLO all have to hold",
            where=slo.where,
            remedy="export the parts as SLO files of their own",
        )
    documents = []
    for place, objective in enumerate(slo.objectives):
        ratio = ratio_of(objective)
        if ratio is None:
            continue
        annotations = {OBJECTIVE: objective.text, CLASSES: json.dumps(_plain_classes(slo.classes))}
        if objective.traffic_class:
            annotations[CLASS] = objective.traffic_class
        if objective.min_requests:
            annotations[LEAST] = str(objective.min_requests)
        name = f"{slug(slo.name)[:40]}-{place}-{slug(objective.measure)}"
        documents.append({
            "apiVersion": API,
            "kind": "SLO",
            "metadata": {"name": name, "displayName": f"{slo.name}: {objective.sentence}", "annotations": annotations},
            "spec": {
                "description": slo.description or f"{objective.sentence}, of the requests of {slo.name}",
                "service": slug(slo.name),
                "indicator": {
                    "metadata": {"name": f"{name}-ratio"},
                    "spec": {
                        "ratioMetric": {
                            "counter": True,
                            "good": {"metricSource": {"type": "Prometheus", "spec": {"query": f"sum({ratio.good})"}}},
                            "total": {"metricSource": {"type": "Prometheus", "spec": {"query": f"sum({ratio.total})"}}},
                        }
                    },
                },
                "timeWindow": [{"duration": duration(slo.period_s), "isRolling": True}],
                "budgetingMethod": "Occurrences",
                "objectives": [{"displayName": objective.sentence, "target": round(1 - objective.allowed_bad, 9)}],
            },
        })  # fmt: skip
    if not documents:
        raise UserError("no objective has a metric to export", where=slo.where, remedy="see tailspan slo explain")
    head = [f"# {line}" for line in not_exported(slo)]
    body = yaml.safe_dump_all(documents, sort_keys=False, width=1000, allow_unicode=True)
    return "\n".join([*head, ""]) + body if head else body


def from_openslo(text: str, where: str) -> str:
    """Our YAML from OpenSLO documents (kinds SLO and SLI).  UserError with the line of what is not understood."""
    with yaml_errors(where):
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        documents = list(yaml.safe_load_all(text))
    reader = _Import(where)
    for node, document in zip(nodes, documents, strict=True):
        if document is not None:
            reader.add(node.start_mark.line + 1, document)
    made = reader.text()
    parse(made, f"{where} (imported)")
    return made


def import_file(path: str) -> str:
    """``from_openslo`` of a file."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise UserError("larger than 1 MiB: not an OpenSLO file", where=path, remedy="give a YAML file")
        return from_openslo(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot be read: {problem}", where=path, remedy="give an OpenSLO v1 file in YAML") from problem


class _Import:
    """Collects documents; SLI documents may stand before or after the SLO that refers to them."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._slos: list[tuple[int, Mapping[str, Any]]] = []
        self._slis: dict[str, Mapping[str, Any]] = {}

    def add(self, line: int, document: Any) -> None:
        if not isinstance(document, Mapping) or "kind" not in document:
            raise self._error(
                line, "not an OpenSLO document: it has no 'kind'", "write apiVersion: openslo/v1, kind: SLO"
            )
        version, kind = document.get("apiVersion"), document["kind"]
        if version != API:
            raise self._error(
                line, f"apiVersion {version!r}", f"convert it to {API}; older ones differ in their metrics"
            )
        if kind == "SLO":
            self._slos.append((line, document))
        elif kind == "SLI":
            name = str(_get(document, "metadata", "name"))
            self._slis[name] = _get(document, "spec") or {}
        elif kind not in ("Service", "DataSource", "AlertPolicy", "AlertCondition", "AlertNotificationTarget"):
            raise self._error(line, f"kind {kind!r} is none of OpenSLO's", "remove it")

    def text(self) -> str:
        if not self._slos:
            raise self._error(1, "no document of kind SLO", "give a file with at least one")
        found: list[Any] = []
        classes: dict[str, Any] = {}
        periods: dict[str, int] = {}
        for line, document in self._slos:
            spec = document.get("spec")
            if not isinstance(spec, Mapping):
                raise self._error(line, "an SLO without 'spec'", "see the OpenSLO specification")
            for window in spec.get("timeWindow") or []:
                periods.setdefault(str(window.get("duration")), line)
            notes = _get(document, "metadata", "annotations") or {}
            classes |= self._classes(line, notes)
            found += self._objectives(line, spec, notes)
        first = self._slos[0][1]
        made: dict[str, Any] = {
            "name": str(_get(first, "spec", "service") or _get(first, "metadata", "name") or "imported"),
            "description": str(_get(first, "spec", "description") or ""),
        }
        if len(periods) > 1:
            raise self._error(max(periods.values()), f"several time windows: {', '.join(periods)}", "import them apart")
        if periods:
            made["period"] = next(iter(periods))
        made |= {"classes": classes or {"default": {}}, "objectives": found}
        return yaml.safe_dump(made, sort_keys=False, width=120, allow_unicode=True)

    def _classes(self, line: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        if CLASSES not in notes:
            return {}
        try:
            found = json.loads(notes[CLASSES])
        except (TypeError, ValueError):
            found = None
        if not isinstance(found, dict):
            raise self._error(line, f"annotation {CLASSES} is not a JSON object", "export it again, or remove it")
        return found

    def _objectives(self, line: int, spec: Mapping[str, Any], notes: Mapping[str, Any]) -> list[Any]:
        if OBJECTIVE in notes:
            entry: dict[str, Any] = {"objective": str(notes[OBJECTIVE])}
            if CLASS in notes:
                entry = {"class": str(notes[CLASS]), **entry}
            if LEAST in notes:
                entry["min_requests"] = int(notes[LEAST])
            try:
                parse_sentence(entry["objective"])
            except Problem as problem:
                raise self._error(line, problem.message, problem.remedy) from problem
            return [entry if len(entry) > 1 else entry["objective"]]
        found = []
        for objective in spec.get("objectives") or []:
            indicator = self._indicator(line, spec, objective)
            if "ratioMetric" in indicator:
                found.append(self._ratio(line, indicator["ratioMetric"], objective))
            elif "thresholdMetric" in indicator:
                found.append(self._threshold(line, indicator["thresholdMetric"], objective))
            else:
                raise self._error(line, "an indicator without ratioMetric or thresholdMetric", "give it one of them")
        if not found:
            raise self._error(line, "an SLO without objectives", "add spec.objectives with a target")
        return found

    def _indicator(self, line: int, spec: Mapping[str, Any], objective: Mapping[str, Any]) -> Mapping[str, Any]:
        for holder in (objective, spec):
            inline = _get(holder, "indicator", "spec")
            if isinstance(inline, Mapping):
                return inline
            if (reference := holder.get("indicatorRef")) is not None:
                if reference not in self._slis:
                    raise self._error(line, f"indicatorRef {reference!r} is not in this file", "put the SLI beside it")
                return self._slis[str(reference)]
        raise self._error(line, "an SLO without an indicator", "add spec.indicator or spec.indicatorRef")

    def _ratio(self, line: int, ratio: Mapping[str, Any], objective: Mapping[str, Any]) -> str:
        target = self._target(line, objective)
        side = "good" if "good" in ratio else "bad"
        query = str(_get(ratio, side, "metricSource", "spec", "query") or "")
        if (bucket := _BUCKET.search(query)) and side == "good" and (measure := _measure(query)):
            return f"{measure} p{_number(100 * target)} <= {_number(float(bucket[1]))} s"
        if outcome := _OUTCOME.search(query):
            sign, label = outcome.groups()
            if side == "good" and sign == "=" and label == names.GOOD:
                return f"{GOODPUT} >= {_number(100 * target)} %"
            known = label in (names.LATE, names.WRONG, names.DROPPED)
            if known and ((side == "good" and sign == "!=") or (side == "bad" and sign == "=")):
                return f"{label} <= {_number(100 * (1 - target))} %"
        if _STATUS.search(query):  # availability: an answer with a good status, which is one that was not dropped
            return f"{names.DROPPED} <= {_number(100 * (1 - target))} %"
        raise self._error(line, f"cannot tell what {side!r} counts: {query!r}", _REMEDY)

    def _threshold(self, line: int, metric: Mapping[str, Any], objective: Mapping[str, Any]) -> str:
        query = str(_get(metric, "metricSource", "spec", "query") or "")
        measure, quantile = _measure(query), re.search(r"histogram_quantile\(\s*(0?\.\d+)", query)
        value = objective.get("value")
        if measure is None or quantile is None or objective.get("op") not in ("lte", "lt") or not _is_number(value):
            raise self._error(line, f"cannot tell which time {query!r} bounds", _REMEDY)
        return f"{measure} p{_number(100 * float(quantile[1]))} <= {_number(float(value))} s"

    def _target(self, line: int, objective: Mapping[str, Any]) -> float:
        target, percent = objective.get("target"), objective.get("targetPercent")
        value = target if _is_number(target) else percent / 100 if _is_number(percent) else None
        if value is None or not 0 < value < 1:
            raise self._error(line, f"target {target if percent is None else percent!r} is none", "give 0 < target < 1")
        return float(value)

    def _error(self, line: int, message: str, remedy: str) -> UserError:
        return UserError(message, where=f"{self._where}:{line}", remedy=remedy)


_REMEDY: Final = f"say it in metadata.annotations, {OBJECTIVE}: {GRAMMAR}"


def _measure(query: str) -> str | None:
    """The measure whose histogram a query reads."""
    if (phase := _PHASE.search(query)) and names.M_PHASE in query and phase[1] in names.PHASES:
        return phase[1]
    for word in _METRIC.findall(query):
        base = re.sub(r"_(bucket|count|sum)$", "", word)
        if base in _MEASURES:
            return _MEASURES[base]
        for measure in LATENCIES:  # histograms of others that say what they are in their name
            if base.endswith((f"_{measure}_seconds", f":{measure}_seconds")):
                return measure
    return None


def _plain_classes(classes: Mapping[str, ClassRule]) -> dict[str, Any]:
    """The classes as an SLO file writes them."""
    made: dict[str, Any] = {}
    for name, rule in classes.items():
        entry: dict[str, Any] = {}
        if rule.ttft_base is not None:
            entry["ttft"] = {"base_s": rule.ttft_base, "per_input_token_s": rule.ttft_per_input_token}
        if rule.gap is not None:
            entry["gap_s"] = rule.gap
        if rule.e2e_per_output_token is not None:
            entry["e2e"] = {"per_output_token_s": rule.e2e_per_output_token}
        if rule.fluidity_per_token is not None:
            least = {} if rule.fluidity_at_least is None else {"at_least": rule.fluidity_at_least}
            entry["fluidity"] = {"per_token_s": rule.fluidity_per_token, **least}
        made[name] = entry
    return made


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(value: float) -> str:
    return f"{round(value, 9):.9g}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
