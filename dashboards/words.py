"""What the page says about a run, as plain text: sentences, tiles and table rows made from a summary.

Numbers are formatted by ``telemetry.summary``, so that page and terminal write them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from dashboards.markup import Tile
from dashboards.palette import LABEL_COLOURS, PHASE_WORDS, reason_words
from dashboards.view import Slow, View
from telemetry import names, phases
from telemetry.stats import Percentile, needed_to_certify
from telemetry.summary import Summary, format_seconds, format_value

MEASURES: Final = {phases.TTFT: "Time to first token", phases.E2E: "Whole answer, end to end"}
PERCENTILE_HEADER: Final = ("", "value", "95 % band", "n", "answered only", "from the actual send")
SLOW_HEADER: Final = (
    "request",
    "outcome",
    "whole",
    "first token",
    "most of it",
    "prompt",
    "answer",
    "replica",
    "error",
)
_UNKNOWN: Final = "–"


def validity(view: View) -> str:
    """Whether the run itself can be trusted, with the reasons, or with the lag that proves it."""
    run = view.summary.validity
    if view.running:
        return f"Still running: {view.rows_so_far} of {run.figures['scheduled']} requests so far; nothing is final."
    if run.verdict == names.VALID:
        lag, bound = run.figures.get("lag_p99_s"), run.figures.get("lag_bound_s")
        proof = (
            "" if lag is None or bound is None else f": lag p99 {format_seconds(lag)}, {format_seconds(bound)} allowed"
        )
        return f"The run is VALID: the generator sent on time{proof}."
    return f"The run is {run.verdict} and gives no verdict on the server: {'; '.join(run.reasons)}."


def is_final(view: View) -> bool:
    """Whether the figures are a verdict on the server: the run is over and valid."""
    return not view.running and view.summary.validity.verdict == names.VALID


def colour(view: View) -> str:
    """Of the verdict: blue held, vermilion broken, grey when the run allows no verdict."""
    if not is_final(view):
        return LABEL_COLOURS[names.INVALID]
    return LABEL_COLOURS[names.GOOD if view.summary.held else names.DROPPED]


def tiles(summary: Summary) -> Iterator[Tile]:
    """One tile per label: count, share of the attempted, and its reasons with their counts."""
    for label in names.LABELS:
        count = summary.labels[label]
        share = count / summary.attempted if summary.attempted else None
        why = " · ".join(f"{reason_words(reason)} {n}" for reason, n in summary.reasons[label].items())
        if label == names.GOOD and count:
            why = f"{summary.verified} verified" if summary.verified else "unverified: no answer was checked in depth"
        yield Tile(label, count, share, LABEL_COLOURS[label], why)


def asks(summary: Summary) -> Iterator[tuple[bool, str, str]]:
    """Each objective of the SLO: holds, its text, the value found."""
    for one in summary.objectives:
        asked = one.objective.text.replace("<=", "≤").replace(">=", "≥")
        yield one.holds, asked, format_value(one)


def outcome(label: str, reason: str | None) -> str:
    return f"{label} · {reason_words(reason)}" if reason else label


def uncertified(summary: Summary) -> str | None:
    """The footnote to the marked percentiles: which of them so few requests cannot certify."""
    values = (value for latency in summary.latencies for value in latency.scheduled)
    weak = sorted({value.p for value in values if value.n and not value.certified})
    if not weak:
        return None
    which, needed = ", ".join(f"p{p:g}" for p in weak), ", ".join(str(needed_to_certify(p)) for p in weak)
    return f"* cannot certify {which}: n = {needed} needed."


def percentile_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    """A row per measure and percentile; one that n cannot certify is marked (``uncertified``)."""
    for latency in summary.latencies:
        name = latency.measure if latency.measure == phases.E2E else latency.measure.upper()
        sends: tuple[Percentile | None, ...] = latency.from_send or (None,) * len(latency.scheduled)
        for value, alone, sent in zip(latency.scheduled, latency.survivors, sends, strict=True):
            yield (
                f"{name} p{value.p:g}",
                _percentile(value) + ("" if value.certified or not value.n else " *"),
                _band(value),
                f"{value.n:,}",
                _percentile(alone),
                _UNKNOWN if sent is None else _percentile(sent),
            )


def slow_row(slow: Slow) -> tuple[str, ...]:
    return (
        f"#{slow.index}",
        outcome(slow.label, slow.reason),
        format_seconds(slow.total_s),
        _UNKNOWN if slow.first_token_s is None else format_seconds(slow.first_token_s),
        _largest(slow.parts),
        _UNKNOWN if slow.input_tokens is None else f"{slow.input_tokens:,} tokens",
        _UNKNOWN if slow.output_tokens is None else f"{slow.output_tokens:,} tokens",
        slow.replica or _UNKNOWN,
        slow.detail or "",
    )


def _percentile(value: Percentile) -> str:
    if value.unbounded:
        return "unbounded"
    return _UNKNOWN if value.value is None else format_seconds(value.value)


def _band(value: Percentile) -> str:
    if value.n == 0:
        return _UNKNOWN
    low = _UNKNOWN if value.low is None else format_seconds(value.low)
    return f"{low} to {'unbounded' if value.high is None else format_seconds(value.high)}"


def _largest(parts: Mapping[str, float]) -> str:
    if not parts:
        return _UNKNOWN
    name = max(parts, key=lambda phase: parts[phase])
    return f"{PHASE_WORDS[name]} {format_seconds(parts[name])}"
