"""Is a bundle sound?  Each check is one sentence that holds for every row, with the first rows for which it does not.

Owns ``tailspan runs check``.  Must always hold: a check that had nothing to look at says so instead of passing in
silence, and a finding that is not ok names rows and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from models.errors import UserError
from models.wording import several
from telemetry import names, outcomes
from telemetry.adapters.registry import of_manifest
from telemetry.bundle import COMPLETE, RUNNING, Bundle
from telemetry.schema import TABLES
from telemetry.slo import Slo

TOLERANCE_S: Final = 0.001
EXAMPLES: Final = 5

_COLUMNS: Final = (
    "index", "target", "intended_s", "sent_s", "first_token_s", "last_token_s", "end_s", "error", "server_duration_s",
    *(f"phase_{name}_s" for name in names.PHASES), "trace_id", "span_id", "sampled",
)  # fmt: skip
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Finding:
    """name: of the check.  message: what was looked at, or what is wrong.  rows: indices of the first bad requests."""

    name: str
    ok: bool
    message: str
    rows: tuple[int, ...] = ()
    remedy: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": list(self.rows)}


def check(bundle: Bundle, slo: Slo) -> list[Finding]:
    """All findings on a bundle, in the order in which a cause would show; later ones need the earlier."""
    findings = list(_files(bundle))
    if not all(finding.ok for finding in findings if finding.name == "readable"):
        return findings
    requests = bundle.table("requests", _COLUMNS)
    scheduled = bundle.scheduled
    findings.append(_indices(requests, scheduled))
    verdicts = bundle.verdicts(slo)
    findings.extend(_labels(verdicts, scheduled, requests.num_rows, bundle.status))
    answered = requests.filter(_answered(requests, verdicts))
    findings.append(_moments(requests))
    findings.extend(_phases(answered, _our_engines(bundle), set(of_manifest(bundle.manifest))))
    findings.extend(_spans(bundle, requests, answered))
    return findings


def _files(bundle: Bundle) -> Iterator[Finding]:
    repair = f"tailspan runs check {bundle.run_id} --repair"
    for name in TABLES:
        try:
            read = bundle.read(name)
        except (UserError, OSError, pa.ArrowException) as problem:
            yield Finding("readable", False, f"{name}: {problem}", remedy="restore it from a copy of the bundle")
            continue
        torn = read.torn_bytes
        loose = [part.path.name for part in read.parts if part.path.suffix == ".arrow"]
        message = f"{name}: {several(read.table.num_rows, 'row')} in {several(len(read.parts), 'file')}"
        yield Finding("readable", True, message)
        if torn and bundle.status == COMPLETE and not bundle.closing():
            yield Finding(
                "intact", False, f"{name}: {torn} bytes of an unfinished write in a complete run", remedy=repair
            )
        elif torn:
            yield Finding("intact", True, f"{name}: {torn} bytes of an unfinished write were left out")
        if loose and bundle.status != RUNNING:
            closing = bundle.closing()
            told = ", its writer is still closing it" if closing else ""
            message = f"{name}: {several(len(loose), 'part is', 'parts are')} not gathered yet{told}"
            yield Finding("compacted", closing, message, remedy=None if closing else repair)
    if bundle.status == RUNNING and not bundle.writer_near():
        yield Finding("ended", True, f"running, as its writer on {bundle.manifest['writer']['host']} says")
    elif bundle.status == RUNNING and not bundle.writer_alive():
        yield Finding("ended", False, "the manifest says running, but its writer is gone", remedy=repair)


def _indices(requests: pa.Table, scheduled: int) -> Finding:
    index = requests.column("index").to_numpy()
    unique, count = np.unique(index, return_counts=True)
    twice = unique[count > 1]
    outside = unique[(unique < 0) | (unique >= scheduled)]
    bad = np.concatenate([twice, outside])
    message = f"{several(len(index), 'row')}, each of another request of the {scheduled} scheduled"
    if len(bad):
        message = (
            f"{several(len(twice), 'request has', 'requests have')} several rows, "
            f"{several(len(outside), 'row is', 'rows are')} outside the schedule"
        )
    return Finding("indices", not len(bad), message, _examples(bad))


def _labels(verdicts: pa.Table, scheduled: int, rows: int, status: str) -> Iterator[Finding]:
    index = verdicts.column("index").to_numpy()
    # while it runs, rows come between the look at them and the judgement
    expected = max(rows, verdicts.num_rows) if status == RUNNING else scheduled
    labels = outcomes.counts(verdicts)
    known = _truth(pc.is_in(verdicts.column("label"), pa.array(names.LABELS)))
    total = sum(labels.values())
    ok = total == expected == len(np.unique(index)) and bool(known.all())
    told = " + ".join(f"{count} {label}" for label, count in labels.items())
    yield Finding("labels", ok, f"one label each: {told} = {total} of {expected}", _examples(index[~known]))
    needs = _truth(pc.is_in(verdicts.column("label"), pa.array([names.DROPPED, names.INVALID])))
    reason = verdicts.column("reason")
    legal = _truth(pc.fill_null(pc.is_in(reason, pa.array([*names.DROP_REASONS, *names.INVALID_REASONS])), False))
    bad = needs & ~legal
    yield Finding(
        "reasons",
        not bad.any(),
        f"{int(needs.sum())} dropped or invalid, {int(bad.sum())} without a reason",
        _examples(index[bad]),
    )


def _answered(requests: pa.Table, verdicts: pa.Table) -> pa.ChunkedArray:
    index = verdicts.filter(pc.equal(verdicts.column("answered"), outcomes.YES)).column("index").combine_chunks()
    return pc.is_in(requests.column("index"), index)


def _moments(requests: pa.Table) -> Finding:
    """Intended send <= sent <= first token <= last token <= end, among those that happened."""
    columns = [_floats(requests, f"{name}_s") for name in ("intended", "sent", "first_token", "last_token", "end")]
    bad = np.zeros(requests.num_rows, dtype=np.bool_)
    latest = columns[0]
    for moment in columns[1:]:
        bad |= moment < latest - 1e-6  # false for NaN
        latest = np.fmax(latest, moment)
    message = (
        f"the moments of {several(len(bad), 'row')} are in order"
        if not bad.any()
        else f"{several(int(bad.sum()), 'row goes', 'rows go')} back in time"
    )
    return Finding("moments", not bad.any(), message, _rows(requests, bad))


def _our_engines(bundle: Bundle) -> set[str]:
    """host:port of the targets that our engine serves: those whose metrics carry its build info."""
    series = bundle.table("series", ["source", "name"])
    sources = series.filter(pc.equal(series.column("name"), names.M_BUILD_INFO)).column("source")
    return {outcomes.host_of(source) for source in pc.unique(sources).to_pylist() if source}


def _phases(answered: pa.Table, ours: set[str], others: set[str]) -> Iterator[Finding]:
    phases = {name: _floats(answered, f"phase_{name}_s") for name in names.PHASES}
    duration = _floats(answered, "server_duration_s")
    complete = ~np.isnan(duration)
    for values in phases.values():
        complete &= ~np.isnan(values)
    targets = answered.column("target")
    giving = set(pc.unique(targets.filter(pa.array(complete))).to_pylist())
    # a server that is not ours tells of those requests alone whose spans were sampled
    owing = [t for t in pc.unique(targets).to_pylist() if (t in giving - others) or outcomes.host_of(t or "") in ours]
    if answered.num_rows and not owing:
        yield Finding("phases", True, f"{answered.num_rows} answered; this server gives no account of its phases")
        return
    due = _truth(pc.is_in(targets, pa.array(owing, pa.string())))
    missing = due & ~complete
    yield Finding(
        "phases",
        not missing.any(),
        f"{int((due & complete).sum())} of {int(due.sum())} answered rows carry all {len(names.PHASES)} server phases",
        _rows(answered, missing),
    )
    error = np.abs(np.sum(list(phases.values()), axis=0) - duration) if answered.num_rows else np.empty(0)
    off = complete & (error > TOLERANCE_S)
    worst = float(error[complete].max()) if complete.any() else 0.0
    yield Finding(
        "phase sums",
        not off.any(),
        f"{several(int(complete.sum()), 'row sums', 'rows sum')} to the server's duration "
        f"within {worst * 1e3:.6f} ms (1 ms allowed)",
        _rows(answered, off),
    )
    network = _floats(answered, "end_s") - _floats(answered, "sent_s") - duration
    negative = complete & (network < -TOLERANCE_S)
    yield Finding(
        "network",
        not negative.any(),
        f"{int(negative.sum())} of {int(complete.sum())} answers took the server longer than the client",
        _rows(answered, negative),
    )


def _spans(bundle: Bundle, requests: pa.Table, answered: pa.Table) -> Iterator[Finding]:
    """For sampled requests: the client span, the server span, its children and attributes say what the row says."""
    sampled = [
        row for row in requests.filter(pc.fill_null(requests.column("sampled"), False)).to_pylist() if row["trace_id"]
    ]
    if not sampled:
        yield Finding("spans", True, "no request was sampled")
        return
    if not (bundle.path / "spans").is_dir():
        yield Finding(
            "spans",
            True,
            f"{several(len(sampled), 'request was', 'requests were')} sampled; their spans went to another collector",
        )
        return
    traces = _by_trace(bundle.table("spans"), {row["trace_id"] for row in sampled})
    others = set(of_manifest(bundle.manifest))  # their spans are where their phases come from
    with_account = {
        row["index"]
        for row in answered.select(["index", "target", "server_duration_s"]).to_pylist()
        if row["server_duration_s"] is not None and row["target"] not in others
    }
    finished = [row for row in sampled if row["end_s"] is not None]
    yield _compare("client spans", finished, traces, _client_problem, bundle.status)
    served = [row for row in sampled if row["index"] in with_account]
    yield _compare("server spans", served, traces, _server_problem, bundle.status)


def _compare(
    name: str,
    rows: Sequence[dict[str, Any]],
    traces: dict[str, list[dict[str, Any]]],
    problem: Callable[[dict[str, Any], list[dict[str, Any]]], str | None],
    status: str,
) -> Finding:
    missing: list[int] = []
    wrong: list[tuple[int, str]] = []
    for row in rows:
        found = problem(row, traces.get(row["trace_id"], []))
        if found == _NO_SPAN:
            missing.append(row["index"])
        elif found is not None:
            wrong.append((row["index"], found))
    agree = len(rows) - len(missing) - len(wrong)
    message = f"{agree} of {len(rows)} sampled requests agree with their rows within 1 ms"
    if wrong:
        message += f"; {len(wrong)} do not, first: {wrong[0][1]}"
    if missing:
        message += f"; {len(missing)} have no span"
    # A process that was killed takes its last spans with it: only a complete run must have them all.
    ok = not wrong and (not missing or status != COMPLETE)
    return Finding(name, ok, message, _examples(np.array([index for index, _ in wrong] + missing)))


_NO_SPAN: Final = "no span"


def _client_problem(row: dict[str, Any], spans: list[dict[str, Any]]) -> str | None:
    span = next((s for s in spans if s["kind"] == "CLIENT" and s["span_id"] == row["span_id"]), None)
    if span is None:
        return _NO_SPAN
    return _difference("client span", _duration(span), row["end_s"] - row["intended_s"])


def _server_problem(row: dict[str, Any], spans: list[dict[str, Any]]) -> str | None:
    root = next((s for s in spans if s["name"] == names.SERVER_SPAN), None)
    if root is None:
        return _NO_SPAN
    if root["parent_span_id"] != row["span_id"]:
        return f"request {row['index']}: the server span is not a child of the client span"
    children = [s for s in spans if s["parent_span_id"] == root["span_id"]]
    if found := _difference("server span", _duration(root), row["server_duration_s"]):
        return found
    if found := _difference("children of the server span", sum(map(_duration, children)), _duration(root)):
        return found
    by_phase = dict.fromkeys(names.PHASES, 0.0)
    for child in children:
        attributes = json.loads(child["attributes"] or "{}")
        own = attributes.get(names.ATTR_PHASE_DURATION)
        by_phase[child["name"]] = by_phase.get(child["name"], 0.0) + (_duration(child) if own is None else own / 1e9)
        by_phase[names.STALL] += attributes.get(names.ATTR_PHASE_STALL, 0) / 1e9
    attributes = json.loads(root["attributes"] or "{}")
    for name in names.PHASES:
        expected = row[f"phase_{name}_s"]
        if found := _difference(f"child spans of {name}", by_phase[name], expected):
            return found
        stated = attributes.get(names.ATTR_PHASE_PREFIX + name)
        if stated is None:
            return f"request {row['index']}: {names.ATTR_PHASE_PREFIX}{name} is missing"
        if found := _difference(names.ATTR_PHASE_PREFIX + name, stated / 1e9, expected):
            return found
    return None


def _difference(what: str, found: float, expected: float | None) -> str | None:
    if expected is None or abs(found - expected) > TOLERANCE_S:
        return f"{what} {found * 1e3:.3f} ms, row {'none' if expected is None else f'{expected * 1e3:.3f} ms'}"
    return None


def _duration(span: dict[str, Any]) -> float:
    return float(span["end_unix_ns"] - span["start_unix_ns"]) / 1e9


def _by_trace(spans: pa.Table, wanted: set[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    chosen = spans.filter(pc.is_in(spans.column("trace_id"), pa.array(sorted(wanted), pa.string())))
    columns = ["trace_id", "span_id", "parent_span_id", "name", "kind", "start_unix_ns", "end_unix_ns", "attributes"]
    for span in chosen.select(columns).to_pylist():
        found.setdefault(span["trace_id"], []).append(span)
    return found


def _rows(table: pa.Table, bad: Bools) -> tuple[int, ...]:
    return _examples(table.column("index").to_numpy()[bad])


def _examples(index: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in index[:EXAMPLES])


def _truth(values: Any) -> Bools:
    array: Bools = values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values.to_numpy()
    return array.astype(np.bool_)


def _floats(table: pa.Table, name: str) -> Floats:
    values: Floats = table.column(name).cast(pa.float64()).to_numpy()
    return values
