"""What a breach is explained by: the last good stretch beside the bad one, through telemetry.explain."""

from __future__ import annotations

from typing import Any

from telemetry.bundle import Bundle
from telemetry.explain import Explanation, explain

Part = tuple[Bundle, float, float]


def explained(good: Part, bad: Part) -> tuple[dict[str, Any], str]:
    """Plain JSON, and Markdown for who is on call.  Raises UserError where nothing can be compared."""
    found = explain([good[0]], [bad[0]], windows=(good[1:], bad[1:]))
    return found.to_dict(), text(found)


def text(found: Explanation) -> str:
    """The verdict, and the hypotheses with evidence and with what would disprove them."""
    lines = [f"**{found.label}** ({found.figure}); two windows without a replay, so all of it is approximate."]
    for number, one in enumerate(found.hypotheses, 1):
        lines += [f"\n{number}. **{one.cause}**: {one.words} (layer: {one.layer})"]
        lines += [f"   * {evidence}" for evidence in one.evidence]
        lines.append(f"   * would be disproved: {one.disprove}")
    lines += [f"\n{limit}" for limit in found.limits]
    return "\n".join(lines)
