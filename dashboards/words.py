"""What the page says about a run, as plain text: sentences, tiles and table rows made from a summary.

Numbers are formatted by ``telemetry.summary``, so that page and terminal write them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dashboards.language import tr
from dashboards.markup import Tile, legend
from dashboards.palette import LABEL_COLOURS, PHASE_COLOURS, PHASE_MEANING, PHASE_WORDS, reason_words
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
        return tr(
            "Still running: {n} of {all} requests so far; nothing is final.",
            n=view.rows_so_far,
            all=run.figures["scheduled"],
        )
    return soundness(view.summary)


def soundness(summary: Summary) -> str:
    """Whether the generator did its part, with the lag that proves it or the reasons why not."""
    run = summary.validity
    if run.verdict == names.VALID:
        lag, bound = run.figures.get("lag_p99_s"), run.figures.get("lag_bound_s")
        if lag is None or bound is None:
            return tr("The run is VALID: the generator sent on time.")
        return tr(
            "The run is VALID: the generator sent on time: lag p99 {lag}, {bound} allowed.",
            lag=format_seconds(lag),
            bound=format_seconds(bound),
        )
    return tr(
        "The run is {verdict} and gives no verdict on the server: {reasons}.",
        verdict=run.verdict,
        reasons="; ".join(run.reasons),
    )


def is_final(view: View) -> bool:
    """Whether the figures are a verdict on the server: the run is over and valid."""
    return not view.running and view.summary.validity.verdict == names.VALID


def colour(view: View) -> str:
    """Of the verdict on a run that may still be going: then grey."""
    return LABEL_COLOURS[names.INVALID] if view.running else verdict_colour(view.summary)


def verdict_colour(summary: Summary) -> str:
    """Blue held, vermilion broken, grey when the run allows no verdict."""
    if summary.validity.verdict != names.VALID:
        return LABEL_COLOURS[names.INVALID]
    return LABEL_COLOURS[names.GOOD if summary.held else names.DROPPED]


def tiles(summary: Summary) -> Iterator[Tile]:
    """One tile per label: count, share of the attempted, and its reasons with their counts."""
    for label in names.LABELS:
        count = summary.labels[label]
        share = count / summary.attempted if summary.attempted else None
        why = " · ".join(f"{tr(reason_words(reason))} {n:,}" for reason, n in summary.reasons[label].items())
        if label == names.GOOD and count:
            verified = tr("{n} verified", n=summary.verified)
            why = verified if summary.verified else tr("unverified: no answer was checked in depth")
        yield Tile(label, tr(label), count, share, LABEL_COLOURS[label], why)


def counted_tiles(counts: Mapping[str, int]) -> Iterator[Tile]:
    """One tile per label with its count alone, of all requests attempted."""
    attempted = sum(counts.values())
    for label, count in counts.items():
        if count or label != names.INVALID:
            yield Tile(label, tr(label), count, count / attempted if attempted else None, LABEL_COLOURS[label], "")


def when(run_id: str) -> str:
    """``20260102-030405-ab12`` as ``2026-01-02 03:04:05 · ab12``."""
    day, _, rest = run_id.partition("-")
    clock, _, tag = rest.partition("-")
    if len(day) == 8 and len(clock) == 6 and (day + clock).isdigit():
        return f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}:{clock[4:]} · {tag}"
    return run_id


def asks(summary: Summary) -> Iterator[tuple[bool, str, str]]:
    """Each objective of the SLO: holds, its text, the value found."""
    for one in summary.objectives:
        asked = one.objective.text.replace("<=", "≤").replace(">=", "≥")
        yield one.holds, asked, format_value(one)


def outcome(label: str, reason: str | None) -> str:
    return f"{tr(label)} · {tr(reason_words(reason))}" if reason else tr(label)


def uncertified(summary: Summary) -> str | None:
    """The footnote to the marked percentiles: which of them so few requests cannot certify."""
    values = (value for latency in summary.latencies for value in latency.scheduled)
    weak = sorted({value.p for value in values if value.n and not value.certified})
    if not weak:
        return None
    which, needed = ", ".join(f"p{p:g}" for p in weak), ", ".join(str(needed_to_certify(p)) for p in weak)
    return tr("* cannot certify {which}: n = {needed} needed.", which=which, needed=needed)


def percentile_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    """A row per measure and percentile; one that n cannot certify is marked (``uncertified``)."""
    for latency in summary.latencies:
        name = latency.measure if latency.measure == phases.E2E else latency.measure.upper()
        sends: tuple[Percentile | None, ...] = latency.from_send or (None,) * len(latency.scheduled)
        for value, alone, sent in zip(latency.scheduled, latency.survivors, sends, strict=True):
            yield (
                f"{name} p{value.p:g}",
                _percentile(value) + ("" if value.certified or not value.n else " *"),
                band(value),
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
        _UNKNOWN if slow.input_tokens is None else f"{slow.input_tokens:,} {tr('tokens')}",
        _UNKNOWN if slow.output_tokens is None else f"{slow.output_tokens:,} {tr('tokens')}",
        slow.replica or _UNKNOWN,
        slow.detail or "",
    )


def phase_legend(stacks: Sequence[Mapping[str, float]]) -> str:
    """The phases that show, at least a hundredth of some stack, with their meaning on hover."""
    shown = [
        phase for phase in PHASE_COLOURS if any(parts.get(phase, 0.0) > 0.01 * sum(parts.values()) for parts in stacks)
    ]
    colours = {tr(PHASE_WORDS[phase]): PHASE_COLOURS[phase] for phase in shown}
    return legend(colours, {tr(PHASE_WORDS[phase]): tr(PHASE_MEANING[phase]) for phase in shown})


def _percentile(value: Percentile) -> str:
    if value.unbounded:
        return tr("unbounded")
    return _UNKNOWN if value.value is None else format_seconds(value.value)


def band(value: Percentile) -> str:
    """The 95 % band as text."""
    if value.n == 0:
        return _UNKNOWN
    low = _UNKNOWN if value.low is None else format_seconds(value.low)
    return f"{low} – {tr('unbounded') if value.high is None else format_seconds(value.high)}"


def _largest(parts: Mapping[str, float]) -> str:
    if not parts:
        return _UNKNOWN
    name = max(parts, key=lambda phase: parts[phase])
    return f"{tr(PHASE_WORDS[name])} {format_seconds(parts[name])}"
