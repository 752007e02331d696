"""Charts as inline SVG: small tables in, markup out.  For the report that is mailed, where no script runs.

Owns the drawing of four charts.  Must always hold: every text is escaped; nothing refers outside the file; marks say
their numbers in a ``<title>``; lines and texts take the colour of the page, so that light and dark both work; the
number of marks depends on bins and curves, never on the number of requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final

from dashboards.palette import LABEL_COLOURS, PHASE_COLOURS, PHASE_WORDS
from telemetry.summary import format_seconds, format_share

WIDTH: Final = 940
LEFT: Final = 64  # px, for the words beside the y axis
RIGHT: Final = 16
Rows = Sequence[Mapping[str, Any]]
Curve = Sequence[tuple[float, float]]


def outcomes_over_load(outcomes: Rows, load: Rows) -> str:
    """Share of each label per bin of intended send, above the requests in it.  Rows as ``queries`` makes them."""
    span = max((row["end_s"] for row in load), default=1.0)
    top, bottom, gap = 150, 70, 14
    most = max((row["requests"] for row in load), default=1)
    x = _linear(0.0, span, LEFT, WIDTH - RIGHT)
    marks = []
    for row in outcomes:
        label, count = row["label"], row["requests"]
        title = f"{label}: {count} of {row['of']} requests from second {row['start_s']:.0f}"
        high, low = top * (1 - row["share_high"]), top * (1 - row["share_low"])
        marks.append(_bar(x(row["start_s"]), high, x(row["end_s"]), low, LABEL_COLOURS[label], title))
    y = _linear(0.0, most, top + gap + bottom, top + gap)
    for row in load:
        title = f"{row['requests']} requests offered from second {row['start_s']:.0f}, {row['per_s']:.2f}/s"
        marks.append(_bar(x(row["start_s"]), y(row["requests"]), x(row["end_s"]), y(0), "currentColor", title, "faint"))
    axes = [_text(LEFT - 8, 10, "100 %", "end"), _text(LEFT - 8, top, "0 %", "end")]
    axes += [_text(LEFT - 8, top + gap + 10, str(most), "end"), _text(LEFT - 8, top + gap + bottom, "0", "end")]
    axes += _ticks_x(x, _nice(0, span, 8), top + gap + bottom, lambda s: f"{s:g} s")
    return _svg(top + gap + bottom + 34, marks + axes, "Share of outcomes over the run, above the offered load")


def curves(series: Mapping[str, Curve], colours: Mapping[str, str], name: str, marks: Mapping[str, float]) -> str:
    """Cumulative shares over seconds on a logarithmic axis.  series: (seconds, share) rising.  marks: SLO bounds, s."""
    values = [seconds for curve in series.values() for seconds, _ in curve if seconds > 0] + list(marks.values())
    if not values:
        return ""
    low, high = math.floor(math.log10(min(values)) * 3) / 3, math.ceil(math.log10(max(values)) * 3) / 3
    high = max(high, low + 1 / 3)
    height = 220
    across = _linear(low, high, LEFT, WIDTH - RIGHT)
    y = _linear(0.0, 1.0, height, 10)

    def x(seconds: float) -> float:
        return across(math.log10(max(seconds, 10**low)))

    parts = []
    for share in (0.5, 0.9, 0.95, 0.99):
        parts.append(_line(LEFT, y(share), WIDTH - RIGHT, y(share), "grid"))
    parts += [_text(LEFT - 8, y(share) + 4, f"{100 * share:.0f} %", "end") for share in (0.0, 0.5, 0.9, 1.0)]
    for text, seconds in marks.items():
        parts.append(_line(x(seconds), 10, x(seconds), height, "bound", text))
    for title, curve in series.items():
        points, last = [], None
        for seconds, share in curve:  # a step curve: the share is reached at that time
            if last is not None:
                points.append(f"{x(seconds):.1f},{y(last):.1f}")
            points.append(f"{x(seconds):.1f},{y(share):.1f}")
            last = share
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{escape(colours[title])}" stroke-width="2">'
            f"<title>{escape(title)}</title></polyline>"
        )
    decades = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
    ticks = [value for value in decades if low <= math.log10(value) <= high + 1e-9]
    parts += [part for value in ticks for part in _tick(x(value), height, format_seconds(value))]
    return _svg(height + 34, parts, name)


def bands(rows: Rows, name: str, bound: float | None) -> str:
    """Median and p95 of a time per bin of the run.  rows: start_s, end_s, p50_s, p95_s, n (None: no answer)."""
    tops = [row["p95_s"] for row in rows if row["p95_s"] is not None]
    if not tops:
        return ""
    tops += [bound] if bound else []
    height = 160
    x = _linear(0.0, max(row["end_s"] for row in rows), LEFT, WIDTH - RIGHT)
    y = _linear(0.0, max(tops) * 1.05, height, 8)
    parts = []
    for row in rows:
        if row["p95_s"] is None:
            continue
        middle, high = format_seconds(row["p50_s"]), format_seconds(row["p95_s"])
        title = f"second {row['start_s']:.0f}: p50 {middle}, p95 {high}, n = {row['n']}"
        left, right = x(row["start_s"]), x(row["end_s"])
        parts.append(_bar(left, y(row["p95_s"]), right, y(row["p50_s"]), LABEL_COLOURS["good"], title, "band"))
        parts.append(_line(left + 0.5, y(row["p50_s"]), right - 0.5, y(row["p50_s"]), "middle", title))
    if bound:
        parts.append(_line(LEFT, y(bound), WIDTH - RIGHT, y(bound), "bound", f"asked: {format_seconds(bound)}"))
    for value in _nice(0, max(tops), 4):
        parts.append(_text(LEFT - 8, y(value) + 4, format_seconds(value) if value else "0", "end"))
    parts += _ticks_x(x, _nice(0, max(row["end_s"] for row in rows), 8), height, lambda s: f"{s:g} s")
    return _svg(height + 34, parts, name)


def stacks(rows: Sequence[tuple[str, Mapping[str, float]]], name: str) -> str:
    """One horizontal bar per row, its parts (seconds by phase) stacked in the order in which they happen."""
    longest = max((sum(max(v, 0.0) for v in parts.values()) for _, parts in rows), default=0.0)
    if longest <= 0:
        return ""
    step, left = 30, 118
    x = _linear(0.0, longest, left, WIDTH - 90)
    marks = []
    for place, (title, parts) in enumerate(rows):
        at, top = 0.0, place * step + 4
        total = sum(max(value, 0.0) for value in parts.values())
        for phase in PHASE_COLOURS:
            seconds = parts.get(phase, 0.0)
            if seconds <= 0:
                continue
            words = f"{title}: {PHASE_WORDS[phase]} {format_seconds(seconds)}, {format_share(seconds / total)}"
            marks.append(_bar(x(at), top, x(at + seconds), top + step - 8, PHASE_COLOURS[phase], words))
            at += seconds
        marks.append(_text(left - 8, top + 16, title, "end"))
        marks.append(_text(x(at) + 6, top + 16, format_seconds(total), "start"))
    return _svg(len(rows) * step + 6, marks, name)


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(name)}">{"".join(parts)}</svg>'


def _bar(left: float, top: float, right: float, bottom: float, colour: str, title: str, kind: str = "bar") -> str:
    width, height = max(right - left - 0.8, 0.6), max(bottom - top, 0.6)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{escape(colour)}"><title>{escape(title)}</title></rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}">{inner}</line>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick(x: float, y: float, text: str) -> list[str]:
    return [_line(x, y, x, y + 5, "tick"), _text(x, y + 19, text, "middle")]


def _ticks_x(
    x: Callable[[float], float], values: Sequence[float], y: float, words: Callable[[float], str]
) -> list[str]:
    return [part for value in values for part in _tick(x(value), y, words(value))]


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _nice(low: float, high: float, about: int) -> list[float]:
    """Round values from low to high, about so many."""
    raw = (high - low) / about or 1.0
    size = 10.0 ** math.floor(math.log10(raw))
    step = next((m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999), 10 * size)
    count = int((high - low) / step + 1e-9)
    return [low + place * step for place in range(count + 1)]
