"""The same requests under other deadlines: an SLO with changed figures, and the labels that move.

Owns how the figures of an SLO document are changed.  Must always hold: the moves sum to the requests of the run, and a
figure that the document does not have is not put in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from dashboards.source import Source
from telemetry import names, slo

#: Where a deadline figure stands inside a class of the document.
FIGURES: Final = {
    "ttft": ("ttft", "base_s"),
    "per_input": ("ttft", "per_input_token_s"),
    "gap": ("gap_s",),
    "per_output": ("e2e", "per_output_token_s"),
}


@dataclass(frozen=True, slots=True)
class Moves:
    """before, after: requests per label.  moves: (label before, label after) -> requests, unchanged ones included."""

    before: dict[str, int]
    after: dict[str, int]
    moves: dict[tuple[str, str], int]

    @property
    def changed(self) -> int:
        return sum(n for (old, new), n in self.moves.items() if old != new)


def figures(policy: slo.Slo) -> dict[str, dict[str, float]]:
    """Class -> figure -> seconds, of those that the document sets."""
    document = yaml.safe_load(policy.text)
    found: dict[str, dict[str, float]] = {}
    for name, rule in document["classes"].items():
        own = {figure: _get(rule, path) for figure, path in FIGURES.items()}
        found[str(name)] = {figure: float(value) for figure, value in own.items() if isinstance(value, int | float)}
    return found


def changed(policy: slo.Slo, wanted: Mapping[str, Mapping[str, float]]) -> slo.Slo:
    """The SLO with other figures, by class; everything else of the document as it was.  UserError as ``slo.parse``."""
    document = yaml.safe_load(policy.text)
    for name, own in wanted.items():
        for figure, value in own.items():
            *folders, last = FIGURES[figure]
            at = document["classes"][name]
            for folder in folders:
                at = at[folder]
            at[last] = value
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return slo.parse(text, f"{policy.name}, changed on the page")


def moves(before: Source, after: Source) -> Moves:
    """Labels of one run under two SLOs, joined by index."""
    found = before.ask("SELECT label, count(*) AS n FROM verdicts GROUP BY label")
    pairs = _joined(before, after)
    counts_after: dict[str, int] = dict.fromkeys(names.LABELS, 0)
    for (_, new), n in pairs.items():
        counts_after[new] += n
    counts_before = dict.fromkeys(names.LABELS, 0) | {row["label"]: row["n"] for row in found}
    return Moves(counts_before, counts_after, pairs)


def _joined(before: Source, after: Source) -> dict[tuple[str, str], int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    place = pc.index_in(after.verdicts.column("index"), before.verdicts.column("index").combine_chunks())
    pairs = pa.table({"old": before.verdicts.column("label").take(place), "new": after.verdicts.column("label")})
    counted = {
        (row["old"], row["new"]): row["count_all"]
        for row in pairs.group_by(["old", "new"]).aggregate([([], "count_all")]).to_pylist()
    }
    return {(old, new): counted[old, new] for old in names.LABELS for new in names.LABELS if (old, new) in counted}


def _get(rule: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(rule, Mapping):
            return None
        rule = rule.get(key)
    return rule
