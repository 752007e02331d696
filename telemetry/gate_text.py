"""What a gate writes down: Markdown for a pull request, JUnit XML for a CI server.

Owns the layout only; every figure comes from ``gate``.  Must always hold: what a server or a bundle says is escaped, so
that an error text can neither break a table nor the XML; the first line of the Markdown is the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from xml.etree import ElementTree

from telemetry import layer_text, names
from telemetry.burn_rate import strongest
from telemetry.gate import Gate
from telemetry.judged import Judged, mark_of
from telemetry.objective import HELD, UNDECIDED
from telemetry.regression import Change
from telemetry.stats import Percentile
from telemetry.summary import Summary, format_bound, format_seconds, format_share, format_value

_TITLES: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
#: Characters that XML 1.0 cannot hold at all.
_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKS: Final = {True: "pass", False: "**FAIL**"}


def markdown(gate: Gate) -> str:
    """The summary of a run for a pull request."""
    summary = gate.summary
    lines = [f"### tailspan: {gate.words}", "", _cell(summary.sentence), ""]
    lines.append(f"Run **{summary.validity.verdict}**, exit code **{gate.exit_code}**, SLO `{_cell(summary.slo)}`, "
                 f"trace {_cell(summary.trace) or 'unknown'}, run `{summary.run_id}`")  # fmt: skip
    lines += [f"- {_cell(reason)}" for reason in summary.validity.reasons]
    lines += [
        "",
        *_table(("", "objective", "measured", "95 % band", "n", "budget spent"), map(_objective, summary.objectives)),
    ]
    if " OR " in summary.rule:
        lines += ["", f"Joined as: {_cell(summary.rule)}"]
    if gate.changes:
        assert gate.baseline is not None
        name, runs = gate.baseline
        lines += ["", f"Against baseline `{_cell(name)}` ({len(runs)} run{'s' if len(runs) > 1 else ''}):", ""]
        lines += _table(("", "figure", "baseline", "now", "change", "noise"), map(_change, gate.changes))
        if any(one.approximate for one in gate.changes):
            lines += ["", "The noise is approximate: a baseline of three runs or more is the one to trust."]
    if (report := summary.canary_report) is not None:
        lines += ["", f"Canaries: **{report.verdict}**", "", *(f"- {_cell(one)}" for one in report.sentences)]
    wrong = summary.labels[names.WRONG]
    if (looks := layer_text.unsaid(summary.where, summary.decision, wrong, summary.wrong_cause)) is not None:
        lines += ["", f"Wrong looks like **{looks.kind}**: {_cell(looks.evidence)}. Look at {looks.layer}"]
    for shift in gate.shifts:
        moved = f"{_cell(shift.before)} before, {_cell(shift.after)} now"
        lines += ["", f"Suspicion: {shift.feature} moved ({moved}; {100 * shift.effect:.0f} % of the distribution)"]
    lines += ["", *_table(("outcome", "n", "share", "why"), _labels(gate))]
    if any(row.scheduled[0].n for row in summary.latencies):
        header = ("from the intended send", *(f"p{one.p:g}" for one in summary.latencies[0].scheduled), "n")
        lines += ["", *_table(header, _latencies(gate))]
        if any(one.n and not one.certified for row in summary.latencies for one in row.scheduled):
            lines += ["", "\\* too few requests to certify this percentile"]
    lines += _where(summary)
    for alert in strongest(summary.alerts):
        burn = f"{alert.worst:.1f} times the rate that spends the budget (alerts above {alert.factor:g})"
        lines += ["", f"Burn rate ({alert.severity}): {_cell(alert.objective)} from {alert.first_s:.0f} s on, {burn}"]
    return "\n".join(lines) + "\n"


def _where(summary: Summary) -> list[str]:
    """Which layer to look at."""
    if not layer_text.worth_saying(summary.where, summary.decision, summary.labels[names.WRONG]):
        return []
    lines = ["", "**Where to look**", ""]
    for pointer, head in layer_text.heads(summary.where):
        seen = "".join(f"; {one}" for one in pointer.evidence)
        lines.append(f"- {_cell(head + seen)}. Check: {_cell(pointer.check)}")
    if said := layer_text.rest(summary.where):
        lines += ["", _cell(said)]
    return lines


def junit(gate: Gate) -> str:
    """One test case for the run itself, one per objective, one per figure of the baseline."""
    summary = gate.summary
    suite = ElementTree.Element("testsuite", name=_xml(f"tailspan {summary.slo}"))
    valid = _case(suite, "run", "the run itself is VALID")
    if summary.validity.verdict != names.VALID:
        text = "; ".join(summary.validity.reasons)
        _child(valid, "error", f"{summary.validity.verdict}: {text}", type_="validity")
    for one in summary.objectives:
        case = _case(suite, "slo", one.objective.sentence)
        if one.n == 0:
            _child(case, "skipped", "no request could be judged")
        elif one.verdict == UNDECIDED:
            _child(case, "skipped", f"undecided: n = {one.n}, {one.objective.min_requests} needed")
        elif one.verdict != HELD:
            _child(
                case, "failure", f"{format_value(one)}, {format_bound(one.objective)} asked (n = {one.n})", type_="slo"
            )
    for change in gate.changes:
        case = _case(suite, "baseline", change.figure)
        if change.regressed:
            _child(case, "failure", " ".join(_change(change)[2:]), type_="regression")
        elif change.change is None:
            _child(case, "skipped", change.note or "not compared")
    counts = {kind: len(suite.findall(f"testcase/{kind}")) for kind in ("failure", "error", "skipped")}
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    out = ElementTree.SubElement(suite, "system-out")
    out.text = _xml(f"{gate.words}\n{summary.sentence}")
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _objective(one: Judged) -> tuple[str, ...]:
    show = format_share if one.objective.is_fraction else format_seconds
    band = "" if one.low is None else f"{show(one.low)} – {'?' if one.high is None else show(one.high)}"
    mark = "open" if mark_of(one) == UNDECIDED else _MARKS[one.verdict == HELD]
    spent = "" if one.budget_spent is None else f"{100 * one.budget_spent:.0f} %"
    value = format_value(one) + ("" if one.certified else " \\*")
    return mark, _cell(one.objective.sentence), value, band, str(one.n), spent


def _change(one: Change) -> tuple[str, ...]:
    share = one.figure == "goodput"
    show = format_share if share else format_seconds

    def signed(value: float | None) -> str:
        return "" if value is None else f"{100 * value:+.1f} {'points' if share else '%'}"

    noise = "" if one.noise is None else f"±{100 * one.noise:.1f} {'points' if share else '%'}"
    mark = "–" if one.change is None and not one.regressed else _MARKS[not one.regressed]
    before = "" if one.baseline is None else show(one.baseline)
    now = show(one.value) if one.value is not None else (one.note or "")
    return mark, one.figure, before, now, signed(one.change), noise


def _labels(gate: Gate) -> Iterator[tuple[str, ...]]:
    summary = gate.summary
    for label in names.LABELS:
        count = summary.labels[label]
        shown = f"good ({summary.verified} verified)" if label == names.GOOD else label
        why = ", ".join(f"{name} {n}" for name, n in summary.reasons[label].items())
        share = format_share(count / summary.attempted) if summary.attempted else ""
        yield shown, str(count), share, _cell(why)


def _latencies(gate: Gate) -> Iterator[tuple[str, ...]]:
    for row in gate.summary.latencies:
        cells = (_percentile(one) for one in row.scheduled)
        yield _TITLES.get(row.measure, row.measure), *cells, str(row.scheduled[0].n)


def _percentile(one: Percentile) -> str:
    if one.value is None:
        return "unbounded" if one.unbounded else "–"
    low, high = ("?" if end is None else format_seconds(end) for end in (one.low, one.high))
    return format_seconds(one.value) + ("" if one.certified else " \\*") + f" ({low} – {high})"


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]] | map[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _cell(text: str) -> str:
    """Plain text inside a table of Markdown: no pipes, no tags, no line breaks."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return flat.replace("|", "\\|")


def _case(suite: ElementTree.Element, group: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=f"tailspan.{group}", name=_xml(name))


def _child(case: ElementTree.Element, kind: str, message: str, type_: str | None = None) -> None:
    child = ElementTree.SubElement(case, kind, message=_xml(message))
    if type_ is not None:
        child.set("type", type_)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
