"""Why more answers are wrong: by the kind of the failed checks (W0, W1) and by what canaries and counters say.

The kinds come from the verdicts, so that whatever check is added shows here by its name.  A kind that fits several
causes is told apart by the rows: other prompt tokens by a constant are a template, in proportion to the length a
tokenizer; wrong answers at large batches alone are concurrency, on cache hits alone the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names
from telemetry.distributions import binomial_at_least
from telemetry.explain.causes import CAUSES, UNKNOWN
from telemetry.explain.result import Hypothesis
from telemetry.explain.side import Run, values_of

ALPHA: Final = 0.01
EXAMPLES: Final = 5
CONSTANT: Final = 0.95  # share of the rows with one and the same difference
#: Kinds of failed checks that are one cause; others are told apart below.
KINDS: Final = {
    "model": "other_model", "truncated": "truncated", "over_limit": "sampling", "loop": "loop", "empty": "text",
    "replacement_char": "text", "special_token": "text", "finish_reason": "text", "completion_tokens": "text",
}  # fmt: skip
#: What a check of goldens calls those that are broken, where it can tell how.
GOLDENS: Final = {"no-end": "loop", "empty": "text", "cache": "prefix_cache", "concurrency": "concurrency"}
LEAST_CAPPED: Final = 10  # answers that end at one length


def rise(a: Sequence[Run], b: Sequence[Run]) -> float:
    """How much larger the share of wrong answers is, where that is no chance (exact binomial test); else 0."""
    wrong = [sum(int(run.is_label(names.WRONG).sum()) for run in side) for side in (a, b)]
    counted = [sum(int((~run.is_label(names.INVALID)).sum()) for run in side) for side in (a, b)]
    if not min(counted) or not wrong[1]:
        return 0.0
    p = binomial_at_least(wrong[1], sum(wrong), counted[1] / sum(counted))
    more = wrong[1] / counted[1] - wrong[0] / counted[0]
    return more if p <= ALPHA and more > 0 else 0.0


def signs(a: Sequence[Run], b: Sequence[Run]) -> bool:
    """Do canaries, counters or a cap on the length say that answers are wrong, whatever the rows' own verdicts say?"""
    return bool(_from_canaries(a, b) or nonfinite(a, b) or _capped(a, b))


def hypotheses(a: Sequence[Run], b: Sequence[Run]) -> list[Hypothesis]:
    """At most three; the share is that of the additional wrong answers."""
    shares: dict[str, float] = {}
    evidence: dict[str, list[str]] = {}
    rows: dict[str, list[int]] = {}
    strong = [*nonfinite(a, b), *_from_canaries(a, b), *_capped(a, b)]
    for cause, said in strong:
        shares[cause] = max(shares.get(cause, 0.0), 1.0)
        evidence.setdefault(cause, []).append(said)
    kinds = [_kinds(side) for side in (a, b)]
    more = {kind: share - kinds[0].get(kind, 0.0) for kind, share in kinds[1].items()}
    total = sum(value for value in more.values() if value > 0)
    for kind, value in sorted(more.items(), key=lambda one: -one[1]):
        if value <= 0 or value < 0.2 * total:
            continue
        cause, beside = _cause(kind, b)
        line = (
            f"check {kind}: fails {100 * kinds[0].get(kind, 0.0):.2f} % -> {100 * kinds[1][kind]:.2f} % of the answers"
        )
        shares[cause] = shares.get(cause, 0.0) + value / total * (0.5 if strong else 1.0)
        evidence.setdefault(cause, []).extend([line, *beside])
        rows.setdefault(cause, []).extend(int(one) for one in b[0].index[_failing(b[0], kind)][:EXAMPLES])
    found = []
    for name, share in sorted(shares.items(), key=lambda one: -one[1])[:3]:
        known = CAUSES.get(name)
        place = _replica(b)
        found.append(
            Hypothesis(
                name, known.words if known else "answers fail a check, and nothing tells why",
                known.layer if known else "", (*evidence[name], *place),
                known.disprove if known else "run the canaries: tailspan canaries check", min(1.0, share),
                tuple(rows.get(name, _wrong_rows(b[0]))),
            )
        )  # fmt: skip
    return found


def _cause(kind: str, b: Sequence[Run]) -> tuple[str, list[str]]:
    if kind == "prompt_tokens":
        return _prompt(b)
    if kind in KINDS:
        return KINDS[kind], []
    only = _only_where(kind, b)
    if only is not None:
        return only
    if kind in ("dominance", "foreign_script", "answer") or kind.startswith(("golden", "question", "canary")):
        return "broken_model", []
    return UNKNOWN, []


def _prompt(b: Sequence[Run]) -> tuple[str, list[str]]:
    """Another number of prompt tokens: by a constant, or in proportion."""
    off, expected = [], []
    for run in b:
        rows = run.is_label(names.WRONG) & (run["prompt_tokens_reported"] != run["prompt_tokens_expected"])
        rows &= ~np.isnan(run["prompt_tokens_reported"] - run["prompt_tokens_expected"])
        off.append((run["prompt_tokens_reported"] - run["prompt_tokens_expected"])[rows])
        expected.append(run["prompt_tokens_expected"][rows])
    difference = np.concatenate(off)
    if not len(difference):
        return "tokenizer", []
    (usual, count), *_ = Counter(difference.tolist()).most_common(1)
    if count >= CONSTANT * len(difference):
        return "template", [f"{usual:+.0f} tokens in {count} of {len(difference)} of them, whatever their length"]
    share = float(np.median(difference / np.maximum(np.concatenate(expected), 1)))
    return "tokenizer", [f"{100 * share:+.1f} % tokens in the median, other amounts in other prompts"]


def _only_where(kind: str, b: Sequence[Run]) -> tuple[str, list[str]] | None:
    """Are the wrong ones at large batches alone, or on cache hits alone?  By the chance of that were they anywhere."""
    batch, cached, wrong = [], [], []
    for run in b:
        rows = run.answered
        batch.append(run["batch_size_mean"][rows])
        cached.append(np.nan_to_num(run["cached_tokens"][rows]) > 0)
        wrong.append(_failing(run, kind)[rows])
    size, hit, bad = np.concatenate(batch), np.concatenate(cached), np.concatenate(wrong)
    n = int(bad.sum())
    if n < 3:
        return None
    if hit[bad].all() and 0 < hit.mean() < 1 and float(hit.mean()) ** n < ALPHA:
        return "prefix_cache", [f"all {n} wrong answers had tokens from the cache, {100 * hit.mean():.0f} % of all had"]
    if np.isfinite(size).all():
        least = float(size[bad].min())
        share = float((size >= least).mean())
        if share < 1 and share**n < ALPHA:
            return "concurrency", [
                f"all {n} wrong answers shared their steps with {least:.1f} requests or more in the mean, "
                f"{100 * share:.0f} % of all did"
            ]
    return None


def nonfinite(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[str, str]]:
    """The engine's own counter of logits that were not finite grew."""
    counts = [[run.counter(names.M_NONFINITE) for run in side] for side in (a, b)]
    grown = [sum(one or 0.0 for one in side) for side in counts]
    if grown[1] > 0 and grown[1] > 2 * grown[0]:
        return [("non_finite", f"rows of logits that were not finite: {grown[0]:.0f} -> {grown[1]:.0f}")]
    return []


def _from_canaries(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[str, str]]:
    """What a check of canaries beside B says, unless one beside A says the same."""
    known = {cause for run in a for cause, _ in _canary_causes(run.canaries())}
    found = [one for run in b for one in _canary_causes(run.canaries())]
    return list(dict.fromkeys(one for one in found if one[0] not in known))


def _canary_causes(checked: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not checked or checked.get("verdict", "same") == "same":
        return []
    found: list[tuple[str, str]] = []
    for probe in checked.get("probes") or []:
        if probe.get("passed") is False:
            cause = {"room": "truncated", "max_tokens": "sampling", "temperature": "sampling", "seed": "sampling",
                     "n": "sampling", "stop": "sampling"}.get(str(probe.get("name")), "broken_model")  # fmt: skip
            found.append((cause, f"probe {probe.get('name')}: {probe.get('detail')}"))
    broken = {
        name: sum(one.get("kind") == "broken" for one in compared)
        for name, compared in (checked.get("goldens") or {}).items()
    }
    for one in checked.get("findings") or []:
        verdict, said = str(one.get("verdict")), str(one.get("said"))
        if verdict == "numeric drift":
            found.append(("numeric_drift", said))
        elif verdict == "broken" and said.startswith("goldens"):
            found.append((GOLDENS.get(str(one.get("kind"))) or _golden_cause(broken), said))
        elif verdict == "broken" and said.startswith("drift"):
            found.append(("tokenizer" if "another tokenizer" in said else "broken_model", said))
        elif verdict == "broken" and said.startswith("questions"):
            found.append(("broken_model", said))
    # A probe names its fault, and goldens may; that other canaries fail as well is the consequence.
    probes = [one for one in found if one[1].startswith("probe")]
    named = [one for one in found if one[1].startswith("goldens") and one[0] != "broken_model"]
    return probes or named or found


def _golden_cause(broken: dict[str, int]) -> str:
    alone = broken.get("first asked", 0)
    again, loaded = broken.get("asked again", 0), broken.get("under load", 0)
    if alone == 0 and again:
        return "prefix_cache"
    return "concurrency" if alone == 0 and loaded else "broken_model"


def _capped(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[str, str]]:
    """Many answers of B end at one length, with finish reason "length", though more was asked of them."""
    found = [_cap(side) for side in (a, b)]
    if found[1] is None or found[1] == found[0]:
        return []
    length, count, asked = found[1]
    return [("truncated", f"{count} of {asked} answers that should be longer end at {length} tokens")]


def _cap(side: Sequence[Run]) -> tuple[int, int, int] | None:
    lengths = []
    for run in side:
        tokens = np.where(
            np.isnan(run["completion_tokens_counted"]),
            run["completion_tokens_reported"],
            run["completion_tokens_counted"],
        )
        cut = np.asarray(
            pc.fill_null(pc.equal(run.texts["finish_reason"], "length"), False).to_numpy(zero_copy_only=False)
        ).astype(np.bool_)
        rows = run.answered & cut & (tokens + 1 < run["expected_output_tokens"])
        lengths.append(tokens[rows])
    short = np.concatenate(lengths)
    if len(short) < LEAST_CAPPED:
        return None
    (length, count), *_ = Counter(short.tolist()).most_common(1)
    return (int(length), count, len(short)) if count >= 0.8 * len(short) else None


def _kinds(side: Sequence[Run]) -> dict[str, float]:
    """Share of the answers that fail each check."""
    n = sum(int((~run.is_label(names.INVALID)).sum()) for run in side)
    found: dict[str, float] = {}
    for run in side:
        for kind, count in values_of(run.reason, run.is_label(names.WRONG)).items():
            found[kind] = found.get(kind, 0.0) + count / max(1, n)
    return found


def _failing(run: Run, kind: str) -> np.ndarray:
    same = np.asarray(pc.fill_null(pc.equal(run.reason, pa.scalar(kind)), False).to_numpy(zero_copy_only=False))
    found: np.ndarray = same.astype(np.bool_) & run.is_label(names.WRONG)
    return found


def _wrong_rows(run: Run) -> list[int]:
    return [int(one) for one in run.index[run.is_label(names.WRONG)][:EXAMPLES]]


def _replica(b: Sequence[Run]) -> list[str]:
    """One replica of several gave the wrong answers."""
    wrong: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for run in b:
        wrong.update(values_of(run.texts["replica"], run.is_label(names.WRONG)))
        every.update(values_of(run.texts["replica"], run.answered))
    n = wrong.total()
    if n < 3 or len(every) < 2:
        return []
    (worst, count), *_ = wrong.most_common(1)
    share = every[worst] / every.total()
    if binomial_at_least(count, n, share) < ALPHA:
        return [f"{count} of {n} come from replica {worst}, which gave {100 * share:.0f} % of the answers"]
    return []
