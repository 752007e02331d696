"""``tailspan report``: one run as one HTML file that opens with the network off and is small enough to mail.

Owns the page's order and words; figures come from ``view``, drawings from ``svg``.  Must always hold: no script, no
font, no image, no link that loads anything (a content security policy says so to the browser too); every text of the
bundle is escaped, since bundles are mailed by strangers; size does not grow with the requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dashboards import queries, svg, view, words
from dashboards.palette import LABEL_COLOURS, PHASE_COLOURS, PHASE_MEANING, PHASE_WORDS
from models.errors import UserError
from telemetry import latency, layer_text, names
from telemetry.bundle import Bundle
from telemetry.burn_rate import strongest
from telemetry.canary_report import BROKEN, NUMERIC, PLACES, SAME
from telemetry.judged import Judged, mark_of
from telemetry.latency import Population
from telemetry.objective import HELD, UNDECIDED
from telemetry.slo import Slo
from telemetry.summary import Summary, format_seconds, format_share, format_value

CURVE_POINTS: Final = 240  # per curve; the tail beyond p95 gets a quarter of them
SLOW_SHOWN: Final = 10
MEASURES: Final = {"ttft": "time to first token", "e2e": "whole answer"}
_CURVE_COLOURS: Final = {"ttft": "#3A97D4", "e2e": "#A8529B"}
Floats = npt.NDArray[np.float64]
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE: Final = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")


def write(path: Path, out: Path, policy: Slo | None = None) -> int:
    """Write the report on the bundle at ``path``; returns its size in bytes.  UserError: not readable or writable."""
    data = render(path, policy).encode("utf-8", "replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(data)
    except OSError as problem:
        raise UserError(
            f"cannot be written: {problem.strerror}", where=str(out), remedy="give a file in a folder you may write to"
        ) from problem
    return len(data)


def render(path: Path, policy: Slo | None = None) -> str:
    """The whole page as text."""
    seen = view.load(path, policy)
    bundle = Bundle.open(path)
    chosen = policy or view.slo_of(bundle)
    summary = seen.summary
    slow = view.slowest(path, by="e2e", label=None, policy=policy)[:SLOW_SHOWN]
    requests = bundle.table("requests", list(latency.COLUMNS))
    population = Population(requests, bundle.verdicts(chosen))
    body = [
        f"<h1>tailspan · {escape(summary.trace or 'a run')} · {escape(summary.run_id)}</h1>",
        f'<div class="soft">{escape(_when(summary))} · SLO {escape(summary.slo)} · {escape(chosen.description)}</div>',
        _verdict(seen),
        _tiles(summary),
        *_section("What was asked", _objectives(summary), _joined(summary), _alerts(summary)),
        *_section("Where to look", _where(summary)),
        *_section("Canaries", _canaries(summary)),
        *_section("Outcomes over the offered load", _legend_labels(), svg.outcomes_over_load(seen.outcomes, seen.load)),
        *_section("How long it took, from the intended send", *_latency(summary, population, seen.bin_s)),
        *_section("Where the time goes", *_phases(seen)),
        *_section("The slowest requests", *_slowest(slow)),
        _details("The run", _facts(seen)),
        _details("The SLO", f"<pre>{escape(chosen.text)}</pre>"),
        f"<footer>Made by tailspan from the run {escape(summary.run_id)}; tailspan runs show says the same.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>tailspan: {escape(summary.run_id)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _verdict(seen: view.View) -> str:
    colour = words.colour(seen)
    return (
        f'<div class="verdict" style="--c:{colour}"><b>{escape(seen.summary.sentence)}</b>'
        f"<div>{escape(words.validity(seen))}</div></div>"
    )


def _tiles(summary: Summary) -> str:
    tiles = [
        f'<div class="tile" style="--c:{tile.colour}">{escape(tile.name)}<b>{tile.count:,}</b>'
        f"<span>{'' if tile.share is None else format_share(tile.share)} {escape(tile.why)}</span></div>"
        for tile in words.tiles(summary)
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _objectives(summary: Summary) -> str:
    return _table(("", "objective", "measured", "95 % band", "n", "budget spent"), map(_objective, summary.objectives))


def _objective(one: Judged) -> tuple[str, ...]:
    show = format_share if one.objective.is_fraction else format_seconds
    mark = "open: too few requests" if mark_of(one) == UNDECIDED else "✓ held" if one.verdict == HELD else "✗ broken"
    band = "" if one.low is None else f"{show(one.low)} – {'unbounded' if one.high is None else show(one.high)}"
    spent = "" if one.budget_spent is None else f"{100 * one.budget_spent:.0f} %"
    value = format_value(one) + ("" if one.certified else " *")
    return mark, one.objective.sentence, value, band, f"{one.n:,}", spent


def _joined(summary: Summary) -> str:
    return f"<p>Joined as: {escape(summary.rule)}</p>" if " OR " in summary.rule else ""


def _alerts(summary: Summary) -> str:
    lines = [
        f"<li>{escape(one.severity)}: {escape(one.objective)} from {one.first_s:.0f} s on, {one.worst:.1f} times the "
        f"rate that spends the budget, over {one.long_s / 3600:g} h (fires above {one.factor:g})</li>"
        for one in strongest(summary.alerts)
    ]
    if not lines:
        return '<p class="soft">No burn-rate alert would have fired on this run.</p>'
    return f"<p>Burn-rate alerts that would have fired on this run alone:</p><ul>{''.join(lines)}</ul>"


def _where(summary: Summary) -> str:
    """Which layer the bad requests point to."""
    if not layer_text.worth_saying(summary.where, summary.decision, summary.labels[names.WRONG]):
        return ""
    items = [
        f'<li>{escape(head)}<div class="soft">{escape("; ".join([*pointer.evidence, "check: " + pointer.check]))}'
        "</div></li>"
        for pointer, head in layer_text.heads(summary.where)
    ]
    said = layer_text.rest(summary.where)
    return f"<ul>{''.join(items)}</ul>" + (f'<p class="soft">{escape(said)}</p>' if said else "")


def _canaries(summary: Summary) -> str:
    """The verdict on the canaries that were mixed into the load, and the sides of their pairs."""
    report = summary.canary_report
    if report is None:
        return ""
    items = "".join(f"<li>{escape(said)}</li>" for said in report.sentences)
    rows = [
        (PLACES.get(side, side) if kind == "place" else side, *(f"{n:,}" for n in counted))
        for kind, side, counted in report.counts
    ]
    table = _table(("goldens", SAME, NUMERIC, BROKEN), rows) if rows else ""
    return f"<p><b>{escape(report.verdict)}</b></p><ul>{items}</ul>{table}"


def _latency(summary: Summary, population: Population, bin_s: float) -> Iterable[str]:
    series = {measure: _curve(population.ranked(measure)) for measure in MEASURES}
    bounds = {
        one.objective.sentence: one.objective.bound
        for one in summary.objectives
        if one.objective.measure in MEASURES and one.objective.traffic_class is None
    }
    colours = {MEASURES[name]: colour for name, colour in _CURVE_COLOURS.items()}
    yield _legend(colours, {})
    yield svg.curves(
        {MEASURES[name]: curve for name, curve in series.items()},
        colours,
        "Share of requests answered within a time",
        bounds,
    )
    yield '<p class="soft">A curve that ends below 100 % is that of dropped requests: they count as infinitely slow. '
    yield "Dashed: what the SLO asks.</p>"
    first = next((o.bound for o in (one.objective for one in summary.objectives) if o.measure == "ttft"), None)
    yield svg.bands(_over_time(population, bin_s), "Time to first token through the run, median to p95", first)
    yield '<p class="soft">Time to first token through the run: median (line) to p95 (band) of what was answered.</p>'
    yield _table(words.PERCENTILE_HEADER, words.percentile_rows(summary))
    if note := words.uncertified(summary):
        yield f'<p class="soft">{escape(note)}</p>'
    if summary.fluidity:
        p5, p50 = (format_share(summary.fluidity[key]) for key in ("p5", "p50"))
        yield f"<p>Fluidity (share of token deadlines met): p5 {p5}, p50 {p50}, n = {summary.fluidity['n']:.0f}.</p>"


def _curve(ranked: Floats) -> list[tuple[float, float]]:
    """(seconds, share of requests answered by then) at a few hundred ranks, dense in the tail; no point for +inf."""
    ordered = np.sort(ranked)
    n = len(ordered)
    if n == 0:
        return []
    body = np.linspace(0, 0.95, CURVE_POINTS * 3 // 4)
    tail = 1 - np.geomspace(0.05, max(1 / n, 1e-6), CURVE_POINTS // 4)
    ranks = np.unique(np.clip(np.ceil(np.concatenate([body, tail, [1.0]]) * n).astype(int), 1, n))
    values = ordered[ranks - 1]
    finite = np.isfinite(values)
    answered = int(np.isfinite(ordered).sum())
    points = [(float(value), float(rank / n)) for value, rank in zip(values[finite], ranks[finite], strict=True)]
    if answered and (not points or points[-1][1] < answered / n):
        points.append((float(ordered[answered - 1]), answered / n))
    return points


def _over_time(population: Population, bin_s: float) -> queries.Rows:
    """Median and p95 of the time to first token per bin of intended send, of answered requests."""
    rows = population.answered
    intended = rows.column("intended_s").to_numpy()
    first = latency.times(rows, "ttft")
    known = ~np.isnan(first)
    bins = np.floor(intended / bin_s).astype(int)
    found: queries.Rows = []
    for number in range(int(bins.max()) + 1 if len(bins) else 0):
        values = first[known & (bins == number)]
        middle, high = (
            (float(v) for v in np.percentile(values, (50, 95), method="inverted_cdf")) if len(values) else (None, None)
        )
        found.append(
            {"start_s": number * bin_s, "end_s": (number + 1) * bin_s, "p50_s": middle, "p95_s": high, "n": len(values)}
        )
    return found


def _phases(seen: view.View) -> Iterable[str]:
    used: set[str] = set()
    for measure, splits in seen.splits.items():
        if not splits:
            continue
        used |= {name for split in splits for name, value in split.parts.items() if value > 0}
        title = words.MEASURES[measure]
        note = "" if splits[0].from_server else " (the server gives no account of its phases)"
        yield f"<p>{escape(title + note)}, n = {splits[0].n:,}</p>"
        yield svg.stacks([(f"p{split.p:g}", split.parts) for split in splits], title)
    colours = {PHASE_WORDS[name]: colour for name, colour in PHASE_COLOURS.items() if name in used}
    yield _legend(colours, {PHASE_WORDS[name]: PHASE_MEANING[name] for name in PHASE_COLOURS})


def _slowest(slow: Sequence[view.Slow]) -> Iterable[str]:
    if slow:
        yield svg.stacks([(f"#{one.index}", one.parts) for one in slow], "The slowest requests by phase")
        yield _table(words.SLOW_HEADER, map(words.slow_row, slow))


def _facts(seen: view.View) -> str:
    rows = [*seen.facts, ("bundle", seen.summary.path)]
    return _table(("", ""), rows)


def _when(summary: Summary) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(summary.created_unix_ns / 1e9))


def _section(title: str, *parts: str) -> list[str]:
    kept = [part for part in parts if part]
    return [f"<h2>{escape(title)}</h2>", *kept] if kept else []


def _details(title: str, inner: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _legend_labels() -> str:
    return _legend({label: LABEL_COLOURS[label] for label in names.LABELS}, {})


def _legend(colours: Mapping[str, str], meaning: Mapping[str, str]) -> str:
    spans = [
        f'<span title="{escape(meaning.get(name, name))}"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    ]
    return f'<div class="legend">{"".join(spans)}</div>'
