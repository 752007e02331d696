"""Which layer to look at: where a late, wrong or dropped verdict points, with its evidence.

application (what was sent is not what was meant), tokenizer or template, model or quantisation, engine (concurrency,
cache), infrastructure (queue, capacity, network), tooling (a version or configuration that changed).  Owns the patterns
over many requests and the sentences; the cause of one request is ``causes``'.  Must always hold: a pointer names how
many requests it rests on and what would disprove it; what may be chance is not called a pattern; where most answers
carry no full telemetry, that is said.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import causes, names
from telemetry.bundle import Bundle
from telemetry.causes import CAUSES, ENGINE, LEAST, MODEL, TOKENIZER, TOOLING, floats
from telemetry.distributions import binomial_at_least
from telemetry.slo import Slo
from telemetry.wrong_cause import NONE, WrongCause

#: Whom ``wrong_cause`` names -> the layer.
LAYER_OF: Final = {
    "model": MODEL,
    "model or quantisation": MODEL,
    "model or engine": MODEL,
    "tokenizer/template": TOKENIZER,
    "engine": ENGINE,
    "engine or template": ENGINE,
    "deployment": TOOLING,
}
#: A pattern: so unlikely by chance, and so many of the bad requests.
ALPHA: Final = 0.001
CONCENTRATED: Final = 0.8
SHOWN: Final = 3
BUILD_KEYS: Final = ("version", "model_sha", "tokenizer_sha", "template_sha", "quant", "kernels")

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pointer:
    """requests: that it rests on, of ``label``.  evidence: what was seen, a sentence each.  check: what to do next."""

    layer: str
    cause: str
    label: str
    requests: int
    words: str
    evidence: tuple[str, ...]
    check: str


@dataclass(frozen=True, slots=True)
class Where:
    """pointers: the most requests first.  telemetry: share of the answers that carry the server's full account."""

    pointers: tuple[Pointer, ...]
    telemetry: float | None


#: Of a run without a bad request.
NOTHING: Final = Where((), None)


def where(bundle: Bundle, slo: Slo, before: Sequence[Bundle] = (), looks: WrongCause | None = None) -> Where:
    """Where the bad requests of a run point.

    before: runs to compare versions with (a baseline), the newest last.  looks: what checks and canaries together make
    of the wrong answers; it is told with them.
    """
    verdicts = bundle.verdicts(slo)
    bad = _is(verdicts, (names.LATE, names.WRONG, names.DROPPED))
    if not bad.any():
        return NOTHING
    rows = _aligned(bundle.table("requests", causes.COLUMNS), verdicts)
    place = np.flatnonzero(bad)
    chosen = verdicts.filter(pa.array(bad))
    served = (bundle.manifest.get("plan") or {}).get("served_model")
    found = causes.of_requests(rows.filter(pa.array(bad)), chosen, slo, served)
    _patterns(found, place, rows, _is(verdicts, (names.GOOD, names.LATE, names.WRONG)))
    label = np.array(chosen.column("label").to_pylist(), dtype=object)
    pointers = []
    for (cause, of_label), count in Counter(zip(found.tolist(), label.tolist(), strict=True)).most_common():
        mask = np.zeros(verdicts.num_rows, dtype=np.bool_)
        mask[place[(found == cause) & (label == of_label)]] = True
        pointers.append(_pointer(cause, of_label, count, mask, rows, bundle))
    intended = floats(rows, "intended_s")[bad]
    first_bad_s = float(np.nanmin(intended)) if not np.isnan(intended).all() else None
    pointers += _tooling(bundle, before, len(place), first_bad_s)
    answered = rows.filter(pc.equal(verdicts.column("answered"), "yes"))
    return Where(tuple(_named(pointers, looks)), _telemetry(answered))


def _named(pointers: list[Pointer], looks: WrongCause | None) -> list[Pointer]:
    """The same, the largest pointer of wrong answers with the kind of wrong that they look like."""
    at = next((at for at, one in enumerate(pointers) if one.label == names.WRONG), None)
    if at is None or looks is None or looks.kind == NONE:
        return pointers
    one = pointers[at]
    layer = LAYER_OF[looks.layer.split(":")[0]] if one.cause == "answers" else one.layer
    named = replace(
        one,
        layer=layer,
        words=f"{one.words}; it looks like {looks.kind} ({looks.layer})",
        evidence=(looks.evidence, *one.evidence),
    )
    return [*pointers[:at], named, *pointers[at + 1 :]]


def _is(verdicts: pa.Table, labels: Sequence[str]) -> Bools:
    found: Bools = pc.is_in(verdicts.column("label"), pa.array(labels)).to_numpy()
    return found.astype(np.bool_)


def _aligned(requests: pa.Table, verdicts: pa.Table) -> pa.Table:
    """A row for each verdict, in their order; of nulls where a request left none."""
    if requests.column("index").equals(verdicts.column("index")):
        return requests
    return requests.take(pc.index_in(verdicts.column("index"), requests.column("index").combine_chunks()))


# --- patterns over many requests --------------------------------------------------------------------------------------


def _patterns(found: npt.NDArray[np.object_], place: npt.NDArray[np.int64], rows: pa.Table, judged: Bools) -> None:
    """Wrong answers that keep to large batches, to cache hits or to one replica are no matter of the model.

    found: causes of the bad requests; place: where those lie in rows; judged: rows that were answered.
    """
    answers = found == "answers"
    if answers.sum() < LEAST:
        return
    wrong = np.zeros(rows.num_rows, dtype=np.bool_)
    wrong[place[answers]] = True
    batch, cached = floats(rows, "batch_size_mean"), floats(rows, "cached_tokens")
    if _on_one_replica(wrong, judged, rows):
        found[answers] = "replica"
    elif _keeps_to(wrong, judged & (cached > 0), judged & ~np.isnan(cached)):
        found[answers] = "wrong_on_hits"
    elif _keeps_to(wrong, judged & (batch >= _smallest(batch, wrong)), judged & ~np.isnan(batch)):
        found[answers] = "wrong_in_batches"


def _smallest(batch: npt.NDArray[np.float64], wrong: Bools) -> float:
    """The batch above which nine in ten of the wrong answers lie."""
    known = batch[wrong & ~np.isnan(batch)]
    return float(np.quantile(known, 0.1, method="lower")) if len(known) else np.inf


def _keeps_to(bad: Bools, group: Bools, known: Bools) -> bool:
    """Do the bad ones lie in a group far more often than chance would put them there, and the rest not?"""
    n, inside = int((bad & known).sum()), int((bad & group).sum())
    if n < LEAST or not known.any():
        return False
    share = float(group.sum()) / float(known.sum())
    return inside >= CONCENTRATED * n and share < 1 and binomial_at_least(inside, n, share) < ALPHA


def _on_one_replica(bad: Bools, judged: Bools, rows: pa.Table) -> bool:
    """Do nearly all bad ones come from one of several replicas?"""
    replicas = pc.unique(rows.column("replica")).drop_null().to_pylist()
    if len(replicas) < 2:
        return False
    known = judged & pc.is_valid(rows.column("replica")).to_numpy()
    return any(
        _keeps_to(bad, known & pc.fill_null(pc.equal(rows.column("replica"), one), False).to_numpy(), known)
        for one in replicas
    )


# --- evidence ---------------------------------------------------------------------------------------------------------


def _pointer(cause: str, label: str, count: int, chosen: Bools, rows: pa.Table, bundle: Bundle) -> Pointer:
    of = CAUSES[cause]
    evidence = [*_evidence(cause, chosen, rows, bundle)]
    return Pointer(of.layer, cause, label, count, of.words, tuple(evidence), of.check)


def _evidence(cause: str, chosen: Bools, rows: pa.Table, bundle: Bundle) -> Sequence[str]:
    if cause in ("template", "tokenizer", "other_prompts", "other_lengths"):
        return [*_deltas(chosen, rows), *_digests(bundle)]
    if cause in ("wrong_in_batches", "wrong_on_hits"):
        name = "batch_size_mean" if cause == "wrong_in_batches" else "cached_tokens"
        what = "mean batch" if cause == "wrong_in_batches" else "cached tokens"
        inside, outside = floats(rows, name)[chosen], floats(rows, name)[~chosen]
        return [f"{what} {_median(inside)} of the wrong, {_median(outside)} of the others"]
    if cause == "replica":
        replicas = Counter(rows.filter(pa.array(chosen)).column("replica").to_pylist())
        return [", ".join(f"{name}: {count}" for name, count in replicas.most_common(SHOWN))]
    if cause == "other_model":
        models = Counter(rows.filter(pa.array(chosen)).column("model").to_pylist())
        asked = (bundle.manifest.get("plan") or {}).get("served_model")
        return [f"asked for {asked}, answered by {', '.join(map(str, models))}"]
    if cause == "answers":
        return _non_finite(bundle)
    part = next((part for part, of in causes.OF_PART.items() if of == cause), None)
    if part is not None or cause == "too_slow":
        return _times(cause, chosen, rows)
    return []


def _deltas(chosen: Bools, rows: pa.Table) -> list[str]:
    off = (floats(rows, "prompt_tokens_reported") - floats(rows, "prompt_tokens_expected"))[chosen]
    known = Counter(off[~np.isnan(off)].astype(int).tolist())
    told = ", ".join(f"{delta:+d} in {count}" for delta, count in known.most_common(SHOWN))
    return [f"the server's count less ours: {told}"] if told else []


def _digests(bundle: Bundle) -> list[str]:
    """Our files beside those that the server says it has."""
    ours = bundle.manifest.get("hashes") or {}
    builds = _builds(bundle)
    found = []
    for part in ("tokenizer", "template", "model"):
        theirs = {build.get(f"{part}_sha") for _, _, build in builds} - {None, ""}
        if part in ours and theirs:
            same = theirs == {ours[part]}
            found.append(f"{part}: the server has {'the same' if same else 'another'} digest as the reference")
    return found


def _non_finite(bundle: Bundle) -> list[str]:
    series = bundle.table("series", ["name", "value"])
    values = series.filter(pc.match_substring(series.column("name"), names.M_NONFINITE)).column("value").to_numpy()
    rose = float(values.max() - values.min()) if len(values) else 0.0
    return [f"{rose:.0f} logits were not finite"] if rose > 0 else []


def _times(cause: str, chosen: Bools, rows: pa.Table) -> list[str]:
    if cause == "too_slow":
        first, each = floats(rows, "floor_ttft_s")[chosen], floats(rows, "floor_tpot_s")[chosen]
        return [f"floors of these requests: {_median(first)} s to the first token, {_median(each)} s a token"]
    total = float(np.nansum((floats(rows, "end_s") - floats(rows, "intended_s"))[chosen]))
    sent, end = floats(rows, "sent_s"), floats(rows, "end_s")
    time = 0.0
    for part, of in causes.OF_PART.items():
        if of != cause:
            continue
        if part == names.CLIENT_WAIT:
            values = sent - floats(rows, "intended_s")
        elif part == names.NETWORK:
            values = end - sent - floats(rows, "server_duration_s")
        else:
            values = floats(rows, f"phase_{part}_s")
        time += float(np.nansum(values[chosen]))
    found = [f"{100 * time / total:.0f} % of their time"] if total > 0 else []
    batch = floats(rows, "batch_size_mean")[chosen]
    if cause == "decode" and (~np.isnan(batch)).any():
        found.append(f"mean batch {_median(batch)}")
    return found


def _median(values: npt.NDArray[np.float64]) -> str:
    known = values[~np.isnan(values)]
    return f"{float(np.median(known)):.3g}" if len(known) else "unknown"


# --- tooling ----------------------------------------------------------------------------------------------------------

Build = tuple[str, float, Mapping[str, str]]  # source, first seen (s), labels


def _builds(bundle: Bundle) -> list[Build]:
    """Every set of build labels of every server, with the moment at which it was first seen."""
    series = bundle.table("series", ["t_s", "source", "name", "labels"])
    rows = series.filter(pc.equal(series.column("name"), names.M_BUILD_INFO)).to_pylist()
    found: dict[tuple[str, str], float] = {}
    for row in sorted(rows, key=lambda row: row["t_s"]):
        found.setdefault((row["source"], row["labels"] or "{}"), row["t_s"])
    return [(source, at, json.loads(labels)) for (source, labels), at in found.items()]


def _tooling(bundle: Bundle, before: Sequence[Bundle], bad: int, first_bad_s: float | None) -> list[Pointer]:
    """A version or configuration that changed in the run, between replicas, or since the runs before."""
    if not bad:
        return []
    builds = _builds(bundle)
    found: list[str] = []
    for source in dict.fromkeys(source for source, _, _ in builds):
        own = [(at, labels) for of, at, labels in builds if of == source]
        for (_, old), (at, new) in itertools.pairwise(own):
            if changed := _changes(old, new):
                gap = "" if first_bad_s is None else f"; the first bad request was due at {first_bad_s:.0f} s"
                found.append(f"{source} changed at {at:.0f} s of the run: {changed}{gap}")
    last = {source: labels for source, _, labels in builds}
    reference = next(iter(last.values()), None)
    for source, labels in last.items():
        if reference is not None and (changed := _changes(reference, labels)):
            found.append(f"replicas differ: {source} has {changed}")
    if before:
        found += _since(bundle, before[-1], reference)
    if not found:
        return []
    words = "a version or configuration changed"
    check = "run the same load on the version before it"
    return [Pointer(TOOLING, "changed", "", bad, words, tuple(found), check)]


def _since(bundle: Bundle, older: Bundle, reference: Mapping[str, str] | None) -> list[str]:
    """What differs from an older run, and how long ago that was."""
    hours = (bundle.manifest.get("created_unix_ns", 0) - older.manifest.get("created_unix_ns", 0)) / 3.6e12
    ago = f"since run {older.run_id}, {hours:.1f} h before"
    found = []
    theirs = next((labels for _, _, labels in _builds(older)), None)
    if reference is not None and theirs is not None and (changed := _changes(theirs, reference)):
        found.append(f"{ago}: {changed}")
    for key in ("versions", "hashes"):
        old, new = older.manifest.get(key) or {}, bundle.manifest.get(key) or {}
        if changed := _changes(old, new, [one for one in new if one in old]):
            found.append(f"{ago}, on our side: {changed}")
    return found


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str] = BUILD_KEYS) -> str:
    """``quant bf16 -> int4, version 1.0 -> 1.1``; empty where nothing changed."""
    return ", ".join(
        f"{key} {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys if old.get(key) != new.get(key)
    )


def _short(value: Any) -> str:
    text = str(value) if value not in (None, "") else "none"
    return text if len(text) <= 24 else text[:12] + "…"


def _telemetry(answered: pa.Table) -> float | None:
    """Share of the answers that carry the server's duration and all its phases; None without an answer."""
    if not answered.num_rows:
        return None
    full = ~np.isnan(floats(answered, "server_duration_s"))
    for name in names.PHASES:
        full &= ~np.isnan(floats(answered, f"phase_{name}_s"))
    return float(full.mean())
