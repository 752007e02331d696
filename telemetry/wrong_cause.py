"""What kind of wrong a run shows, and where to look: from failed checks of answers and the findings of canaries.

Owns the order in which causes are believed: the more direct evidence first.  Must always hold: a cause names its
evidence; where nothing but chance can be seen (fewer than LEAST answers, or LEAST_SHARE of them), there is none.

The prompt tokens tell tokenizer, template and a doubled BOS apart: one token more on every prompt is a BOS, the same
difference on all prompts a template, one that changes with the text a tokenizer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import canary_report, hard_checks
from telemetry.canary_report import CanaryReport

LEAST: Final = 3
LEAST_SHARE: Final = 0.01

NONE: Final = "none"
DRIFT: Final = "numeric drift"
#: Kind -> the layer to go to.
LAYERS: Final = {
    "non-finite": "model: weights, or a kernel that overflows",
    "model": "deployment: another model, or another name for it",
    "double BOS": "tokenizer/template: a BOS is put before the template's own",
    "template": "tokenizer/template: another chat template",
    "tokenizer": "tokenizer/template: another tokenizer",
    "empty": "engine: end-of-text comes first",
    "truncated": "deployment: a limit on the length of answers that nobody asked for",
    "no end": "engine or template: end-of-text is not seen",
    "sampling": "engine: sampling parameters are ignored",
    "cache": "engine: reuse of the prefix cache",
    "concurrency": "engine: batching",
    "streaming": "engine: streamed answers differ from whole ones",
    "server error": "engine: it fails; its log says why",
    "broken": "model or engine: the probabilities are others",
    "text": "model or engine: the texts are damaged",
    DRIFT: "model or quantisation: the same answers by other arithmetic; maybe meant",
}
_CANARY_KINDS: Final = {
    "non-finite": "non-finite", "empty": "empty", "no-end": "no end", "sampling": "sampling", "cache": "cache",
    "concurrency": "concurrency", "streaming": "streaming", "server-error": "server error",
}  # fmt: skip
#: Which is believed first, of findings of canaries that hold together.
_CANARY_ORDER: Final = tuple(_CANARY_KINDS)
#: Kinds that a pair shows: where it breaks says more than what a broken answer looks like.
_PAIRED: Final = ("cache", "concurrency", "streaming")
COLUMNS: Final = (
    *hard_checks.COLUMNS, "index", "error", "canary_kind",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrongCause:
    """kind: a key of LAYERS, or NONE.  answers: how many show it; evidence: one sentence."""

    kind: str
    layer: str
    answers: int
    evidence: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cause(requests: pa.Table, report: CanaryReport | None) -> WrongCause:
    """The kind of wrong of a run.  requests: COLUMNS."""
    complete = requests.filter(pc.is_null(requests.column("error")))
    kinds = hard_checks.failures(complete)
    counts = {kind: int((kinds == code).sum()) for code, kind in enumerate(hard_checks.WRONG_KINDS)}
    enough = max(LEAST, LEAST_SHARE * complete.num_rows)
    told = {kind: count for kind, count in counts.items() if count >= enough}

    def made(kind: str, answers: int, evidence: str) -> WrongCause:
        return WrongCause(kind, LAYERS[kind], answers, evidence)

    found = (
        {} if report is None else {kind: said for verdict, kind, said in report.findings if verdict == report.verdict}
    )
    broken = report is not None and report.verdict == canary_report.BROKEN
    if broken and "non-finite" in found:
        return made("non-finite", 0, found["non-finite"])
    if hard_checks.MODEL in told:
        return made("model", told[hard_checks.MODEL], "the answers name another model than was asked")
    if hard_checks.PROMPT_TOKENS in told:
        kind, said = _prompt(complete)
        return made(kind, told[hard_checks.PROMPT_TOKENS], said)
    if hard_checks.TRUNCATED in told:
        return made(
            "truncated", told[hard_checks.TRUNCATED], f"{told[hard_checks.TRUNCATED]} of {complete.num_rows} answers"
        )
    paired = next((name for name in _PAIRED if name in found), None) if broken else None
    if paired is not None:
        return made(_CANARY_KINDS[paired], 0, found[paired])
    if hard_checks.EMPTY in told:
        return made("empty", told[hard_checks.EMPTY], f"{told[hard_checks.EMPTY]} of {complete.num_rows} answers")
    if broken:
        for name in _CANARY_ORDER:
            if name in found:
                return made(_CANARY_KINDS[name], 0, found[name])
        return made("broken", 0, next(iter(found.values())))
    others = sum(count for kind, count in told.items() if kind != hard_checks.ANSWER)
    if others:
        kind = max(told, key=lambda one: told[one])
        return made("text", others, f"{told[kind]} of {complete.num_rows} answers: {kind.replace('_', ' ')}")
    if report is not None and report.verdict == canary_report.NUMERIC:
        return made(DRIFT, 0, next(iter(found.values())))
    return WrongCause(NONE, "", 0, "")


def _prompt(complete: pa.Table) -> tuple[str, str]:
    told = complete.filter(
        pc.and_(
            pc.is_valid(complete.column("prompt_tokens_reported")),
            pc.is_valid(complete.column("prompt_tokens_expected")),
        )
    )
    reported, expected = (
        told.column(f"prompt_tokens_{name}").to_numpy().astype(np.int64) for name in ("reported", "expected")
    )
    off = reported - expected
    values, counts = np.unique(off[off != 0], return_counts=True)
    most = int(values[counts.argmax()])
    share = counts.max() / counts.sum()
    if share >= 0.9:
        kind = "double BOS" if most == 1 else "template"
        return kind, f"{most:+d} prompt tokens on {counts.sum()} of {len(off)} prompts, whatever their text"
    spread = f"{int(values.min()):+d} to {int(values.max()):+d}"
    return "tokenizer", f"{spread} prompt tokens on {counts.sum()} of {len(off)} prompts, more on longer texts"
