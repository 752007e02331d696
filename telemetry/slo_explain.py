"""An SLO in plain words and figures: what a request may take, what a run must show, how large it has to be.

Owns the account behind ``tailspan slo explain``.  Must always hold: the figures are those that ``outcomes`` and
``judged`` use, computed by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from telemetry.burn_rate import alerts_of
from telemetry.objective import certifying_sample
from telemetry.slo import Slo
from telemetry.summary import format_seconds, format_share

EXAMPLES: Final = ((100, 50), (1000, 200), (4000, 500))  # tokens in, expected tokens out
TIMEOUT_FACTOR: Final = 3  # a client that gives up earlier sees nothing late, everything dropped


@dataclass(frozen=True, slots=True)
class Explained:
    """lines: the account as text.  facts: the same as plain JSON."""

    lines: tuple[str, ...]
    facts: dict[str, Any]


def explain(slo: Slo, examples: tuple[tuple[int, int], ...] = EXAMPLES) -> Explained:
    """The account of an SLO, with the deadlines of a few requests (tokens in, expected tokens out)."""
    lines = [f"{slo.name}: {slo.description}" if slo.description else slo.name, ""]
    deadlines: list[dict[str, Any]] = []
    longest = {"ttft": 0.0, "e2e": 0.0}
    for name, rule in slo.classes.items():
        lines.append(f"class {name}, seconds from the intended send:")
        if rule.ttft_base is not None:
            lines.append(f"  first token  {rule.ttft_base:g} + {rule.ttft_per_input_token:g} x input tokens")
        if rule.gap is not None:
            lines.append(f"  silence      no longer than {rule.gap:g}")
        if rule.e2e_per_output_token is not None:
            lines.append(f"  whole answer first-token deadline + {rule.e2e_per_output_token:g} x (expected output - 1)")
        if rule.fluidity_per_token is not None:
            least = (
                ""
                if rule.fluidity_at_least is None
                else f"; below {format_share(rule.fluidity_at_least)} is late (gap)"
            )
            lines.append(f"  fluidity     a token every {rule.fluidity_per_token:g}{least}")
        if rule == type(rule)():
            lines.append("  no deadline: nothing of this class can be late")
        for inputs, outputs in examples:
            due = slo.deadlines(name, inputs, outputs)
            longest["ttft"] = max(longest["ttft"], due.ttft or 0.0)
            longest["e2e"] = max(longest["e2e"], due.e2e or 0.0)
            deadlines.append(
                {"class": name, "input_tokens": inputs, "expected_output_tokens": outputs, "ttft_s": due.ttft,
                 "gap_s": due.gap, "e2e_s": due.e2e}
            )  # fmt: skip
            if due.ttft is not None:
                whole = "" if due.e2e is None else f", whole answer {format_seconds(due.e2e)}"
                lines.append(f"    {inputs:,} in, {outputs:,} out: first token {format_seconds(due.ttft)}{whole}")
        lines.append("")
    lines.append(f"held when: {slo.rule.words(slo.objectives)}")
    objectives = []
    for objective in slo.objectives:
        needed = certifying_sample(objective)
        words = f"  {objective.sentence}: {format_share(objective.allowed_bad)} may be bad"
        words += f"; {needed:,} requests certify it"
        if objective.min_requests:
            words += f", with fewer than {objective.min_requests:,} it is undecided (exit code 3)"
        lines.append(words)
        alerts = [
            {"window_s": alert.long_s, "severity": alert.severity, "above": alert.threshold(objective)}
            for alert in alerts_of(objective, slo.period_s)
        ]
        objectives.append(
            {"objective": objective.sentence, "allowed_bad": objective.allowed_bad, "certifying_sample": needed,
             "min_requests": objective.min_requests, "alerts": alerts}
        )  # fmt: skip
    lines += ["", f"error budget counted over {slo.period_s / 86_400:g} days"]
    timeouts = {key: TIMEOUT_FACTOR * value for key, value in longest.items()}
    if timeouts["ttft"]:
        options = f"--first-token-timeout {timeouts['ttft']:.0f}"
        options += f" --total-timeout {timeouts['e2e']:.0f}" if timeouts["e2e"] else ""
        lines.append(
            f"the client must wait {TIMEOUT_FACTOR} times the deadlines, or late requests look dropped: {options}"
        )
    facts = {"name": slo.name, "hash": slo.hash, "deadlines": deadlines, "rule": slo.rule.words(slo.objectives),
             "objectives": objectives, "period_s": slo.period_s, "client_timeouts_s": timeouts}  # fmt: skip
    return Explained(tuple(lines), facts)
