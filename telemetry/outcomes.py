"""One label per logical request: invalid, dropped, wrong, late or good, the first that holds.

Owns the judgement, from the facts of a row and an SLO alone.  Must always hold: every request of the schedule has
exactly one label, so the labels sum to the attempted requests; a dropped or invalid request has a reason; nothing is
good that was not complete, in time and free of failed checks; "yes" for correct is said only of what was verified.

Order and meaning: *invalid* is our own fault (late send, malformed request, lost worker, cut by the end), *dropped* is
no complete answer, *wrong* a complete one that fails a hard check, however fast, *late* one past a deadline counted
from the intended send, and *good* the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import fluidity, hard_checks, names
from telemetry.slo import Slo

YES: Final = "yes"
NO: Final = "no"
UNCHECKED: Final = "unchecked"
LATE_KINDS: Final = ("ttft", "gap", "e2e")

#: A request is invalid when we began it later than this, or than LAG_SHARE of its deadline, whichever is more.
LAG_FLOOR_S: Final = 0.050
LAG_SHARE: Final = 0.05

#: The columns of a verdict table.  reason: of a drop or an invalid request, else the kind of late or wrong.
VERDICTS: Final = pa.schema(
    [
        ("index", pa.int64()),
        ("answered", pa.string()),  # yes, no
        ("in_time", pa.string()),  # yes, no
        ("correct", pa.string()),  # yes, no, unchecked
        ("label", pa.string()),
        ("reason", pa.string()),
        ("late", pa.bool_()),  # complete, but past a deadline, whatever its label
        ("late_kind", pa.string()),
        ("wrong_kind", pa.string()),
        ("verified", pa.bool_()),  # correct = yes: a check that knows the right answer has seen it
        ("fluidity", pa.float64()),  # 0..1; null where the SLO does not ask for it, or no token came
    ]
)
#: The columns of the requests table that ``judge`` reads.
COLUMNS: Final = (
    "index", "class", "target", "intended_s", "lag_s", "first_token_s", "end_s", "max_gap_s", "status", "error",
    "done_marker", "input_tokens", *hard_checks.COLUMNS,
)  # fmt: skip

#: What a check that knows the right answer found: a row per request and check (``Bundle.add_checks``).
CHECKS: Final = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("check", pa.string(), nullable=False),  # its name; the wrong_kind of an answer that fails it
        pa.field("passed", pa.bool_(), nullable=False),
    ]
)


def columns(slo: Slo) -> tuple[str, ...]:
    """The columns that ``judge`` reads under an SLO: the moments of all chunks only where it asks for fluidity."""
    return (*COLUMNS, "chunk_s", "chunk_tokens") if slo.wants_fluidity else COLUMNS


#: Windows in which a server had requests running and made no token: target -> [(start_s, end_s)], run time.
Stalls = Mapping[str, Sequence[tuple[float, float]]]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int8]

#: Positions in this list (and, behind it, of the names of checks) are the codes of reasons.
_REASONS: Final = (*names.INVALID_REASONS, *names.DROP_REASONS, *LATE_KINDS, *hard_checks.WRONG_KINDS)


def judge(
    requests: pa.Table,
    slo: Slo,
    scheduled: int,
    status: str,
    *,
    workers_lost: bool = False,
    stalls: Stalls | None = None,
    checks: pa.Table | None = None,
) -> pa.Table:
    """The verdicts (schema VERDICTS) on all requests of the schedule, sorted by index.

    checks: schema CHECKS; a complete answer that passes one is correct, one that fails any is wrong. requests: at least
    ``columns(slo)``.  status: of the manifest; while it is "running" only rows that exist are judged, afterwards a
    request without a row is invalid: its worker was lost, or the run ended before it did.  A second row of an index,
    and one outside the schedule, is ignored here and reported by ``check``.
    """
    rows = _one_per_index(requests, scheduled)
    index = rows.column("index").to_numpy()
    absent = np.full(scheduled, status != "running")
    absent[index] = False
    missing = np.flatnonzero(absent)
    why = names.WORKER_LOST if workers_lost or status == "complete" else names.CUT_BY_END
    checks = CHECKS.empty_table() if checks is None else checks
    wrong_kinds = _wrong_kinds(checks)
    judged = _judge_rows(rows, slo, stalls or {}, checks, wrong_kinds).with_missing(len(missing), why)

    late, wrong = judged.late_kind >= 0, judged.wrong_kind >= 0
    yes_no = (NO, YES, UNCHECKED)
    reasons = (*_REASONS[: -len(hard_checks.WRONG_KINDS)], *wrong_kinds)
    table = pa.Table.from_arrays(
        [
            pa.array(np.concatenate([index, missing])),
            _strings(judged.answered.astype(np.int8), yes_no),
            _strings((judged.answered & ~late).astype(np.int8), yes_no),
            _strings(np.where(wrong, np.int8(0), np.where(judged.verified, np.int8(1), np.int8(2))), yes_no),
            _strings(judged.label, names.LABELS),
            _strings(judged.reason, reasons),
            pa.array(late),
            _strings(judged.late_kind, LATE_KINDS),
            _strings(judged.wrong_kind, wrong_kinds),
            pa.array(judged.verified),
            pa.array(judged.fluidity, pa.float64(), mask=np.isnan(judged.fluidity)),
        ],
        schema=VERDICTS,
    )
    return table.take(pc.sort_indices(table, sort_keys=[("index", "ascending")])) if len(missing) else table


def label_places(verdicts: pa.Table) -> Codes:
    """Per verdict, the place of its label in ``names.LABELS``.  ValueError for a label that is not in it."""
    found: list[Codes] = []
    for chunk in verdicts.column("label").dictionary_encode().chunks:
        place = np.array([names.LABELS.index(label) for label in chunk.dictionary.to_pylist()], dtype=np.int8)
        found.append(place[chunk.indices.to_numpy()])
    return np.concatenate(found) if found else np.empty(0, dtype=np.int8)


@dataclass(frozen=True, slots=True)
class _Judged:
    """Arrays over rows; label, reason, late_kind and wrong_kind are positions in their vocabularies, -1: none."""

    answered: Bools
    label: Codes
    reason: Codes
    late_kind: Codes
    wrong_kind: Codes
    verified: Bools
    fluidity: npt.NDArray[np.float64]

    def with_missing(self, count: int, why: str) -> _Judged:
        """The same with ``count`` requests behind that have no row."""

        def more(codes: Codes, code: int) -> Codes:
            return np.concatenate([codes, np.full(count, code, dtype=np.int8)])

        return _Judged(
            np.concatenate([self.answered, np.zeros(count, dtype=np.bool_)]),
            more(self.label, names.LABELS.index(names.INVALID)),
            more(self.reason, _REASONS.index(why)),
            more(self.late_kind, -1),
            more(self.wrong_kind, -1),
            np.concatenate([self.verified, np.zeros(count, dtype=np.bool_)]),
            np.concatenate([self.fluidity, np.full(count, np.nan)]),
        )


def _judge_rows(rows: pa.Table, slo: Slo, stalls: Stalls, checks: pa.Table, wrong_kinds: Sequence[str]) -> _Judged:
    error = rows.column("error")
    failed, ended = _known(error), _known(rows.column("end_s"))
    deadlines = slo.deadline_columns(rows)

    # invalid: ours.  An error that is one of our reasons has that reason; a late send outranks it.
    invalid = _codes(error, names.INVALID_REASONS, offset=_REASONS.index(names.INVALID_REASONS[0]))
    invalid[~ended & ~failed] = _REASONS.index(names.CUT_BY_END)
    d_ttft, _, d_e2e = deadlines
    deadline = np.where(np.isfinite(d_ttft), d_ttft, np.where(np.isfinite(d_e2e), d_e2e, 0.0))
    lag = np.nan_to_num(_floats(rows, "lag_s"), nan=0.0)
    invalid[lag > np.maximum(LAG_FLOOR_S, LAG_SHARE * deadline)] = _REASONS.index(names.SCHEDULE_LAG)

    # dropped: no complete answer.  An error we have no name for is the server's.
    dropped = _codes(error, names.DROP_REASONS, offset=_REASONS.index(names.DROP_REASONS[0]))
    dropped[failed & (dropped < 0)] = _REASONS.index(names.SERVER_ERROR)
    cut = ~failed & ~_known(rows.column("finish_reason")) & ~_true(rows.column("done_marker"))
    status = _floats(rows, "status")
    refused = ~failed & ((status < 200) | (status >= 300))  # false for NaN: no status came
    dropped[cut] = _REASONS.index(names.STREAM_CUT)
    dropped[refused] = _REASONS.index(names.SERVER_ERROR)
    dropped[_hung(rows, stalls)] = _REASONS.index(names.HANG)
    answered = ended & (dropped < 0) & ~failed

    # wrong and late: of complete answers
    failed_check, passed_check = _checked(rows, checks, wrong_kinds)
    wrong = hard_checks.failures(rows)
    wrong = np.where(answered, np.where(wrong >= 0, wrong, failed_check), np.int8(-1))
    fluid = _fluidity(rows, slo, d_ttft) if slo.wants_fluidity else np.full(rows.num_rows, np.nan)
    least = slo.fluidity_columns(rows)[1]
    late = _late_kind(rows, answered, *deadlines, halting=fluid < least)  # false where either is not known

    label = np.full(rows.num_rows, names.LABELS.index(names.GOOD), dtype=np.int8)
    reason = np.full(rows.num_rows, -1, dtype=np.int8)
    for name, why, offset in (
        (names.LATE, late, _REASONS.index(LATE_KINDS[0])),
        (names.WRONG, wrong, _REASONS.index(hard_checks.WRONG_KINDS[0])),
        (names.DROPPED, dropped, 0),
        (names.INVALID, invalid, 0),
    ):
        holds = why >= 0
        label[holds] = names.LABELS.index(name)
        reason[holds] = why[holds] + offset
    passed_check |= _true(rows.column("answer_matches"))
    verified = answered & passed_check & (wrong < 0)
    return _Judged(answered, label, reason, late, wrong, verified, np.where(answered, fluid, np.nan))


def _wrong_kinds(checks: pa.Table) -> tuple[str, ...]:
    """The hard checks, then the other checks by name: the first that an answer fails is its kind."""
    others = sorted(set(pc.unique(checks.column("check")).to_pylist()) - set(hard_checks.WRONG_KINDS))
    if len(_REASONS) + len(others) > np.iinfo(np.int8).max:
        raise ValueError(f"{len(others)} kinds of checks are more than a verdict table can name")
    return (*hard_checks.WRONG_KINDS, *others)


def _checked(rows: pa.Table, checks: pa.Table, wrong_kinds: Sequence[str]) -> tuple[Codes, Bools]:
    """Per row: the first check it failed (position in wrong_kinds, -1: none), and whether it passed one."""
    failed = np.full(rows.num_rows, -1, dtype=np.int8)
    passed = np.zeros(rows.num_rows, dtype=np.bool_)
    place = pc.index_in(checks.column("index"), rows.column("index").combine_chunks())
    kinds = pc.index_in(checks.column("check"), pa.array(wrong_kinds))
    known = _known(place)
    where, kind = pc.fill_null(place, 0).to_numpy()[known], kinds.to_numpy()[known].astype(np.int8)
    good = checks.column("passed").to_numpy().astype(np.bool_)[known]
    passed[where[good]] = True
    order = np.argsort(-kind[~good], kind="stable")  # the first kind is written last and stays
    failed[where[~good][order]] = kind[~good][order]
    return failed, passed


def _fluidity(rows: pa.Table, slo: Slo, d_ttft: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    pace, _ = slo.fluidity_columns(rows)
    return fluidity.of_rows(rows, d_ttft, pace)


def _late_kind(
    rows: pa.Table,
    answered: Bools,
    d_ttft: npt.NDArray[np.float64],
    d_gap: npt.NDArray[np.float64],
    d_e2e: npt.NDArray[np.float64],
    *,
    halting: Bools,
) -> Codes:
    intended, end = _floats(rows, "intended_s"), _floats(rows, "end_s")
    first = _floats(rows, "first_token_s")
    first = np.where(np.isnan(first), end, first)  # an answer without a visible token came when it ended
    gap = _floats(rows, "max_gap_s")
    kind = np.full(rows.num_rows, -1, dtype=np.int8)
    kind[answered & (end - intended > d_e2e)] = LATE_KINDS.index("e2e")
    kind[answered & (halting | (~np.isnan(gap) & (gap > d_gap)))] = LATE_KINDS.index("gap")
    kind[answered & (first - intended > d_ttft)] = LATE_KINDS.index("ttft")
    return kind


def _hung(rows: pa.Table, stalls: Stalls) -> Bools:
    """Timed out, and for the last half of the wait at least the server had work running and made no token."""
    hung = np.zeros(rows.num_rows, dtype=np.bool_)
    if not stalls:
        return hung
    timeouts = pa.array((names.TIMEOUT_FIRST_TOKEN, names.TIMEOUT_TOTAL))
    timed_out = np.flatnonzero(_true(pc.is_in(rows.column("error"), timeouts)) & _known(rows.column("end_s")))
    intended, end = _floats(rows, "intended_s"), _floats(rows, "end_s")
    targets = rows.column("target")
    windows = {host_of(target): spans for target, spans in stalls.items()}
    for row in timed_out:  # few: only requests that timed out
        half = (intended[row] + end[row]) / 2
        for start, stop in windows.get(host_of(targets[row].as_py() or ""), ()):
            if start <= half and stop >= end[row]:
                hung[row] = True
    return hung


def stall_windows(series: pa.Table) -> dict[str, list[tuple[float, float]]]:
    """When each scraped server had requests running and its token counters stood still: evidence of a hang.

    A window joins scrapes in a row with running > 0 and equal sums of prompt and generation tokens; it is taken to last
    until the first scrape that shows progress, and for ever when none does.
    """
    wanted = {names.M_RUNNING: 0, names.M_GENERATION_TOKENS: 1, names.M_PROMPT_TOKENS: 1}
    samples: dict[str, dict[float, list[float]]] = {}
    base = pc.replace_substring_regex(series.column("name"), "_total$", "")
    chosen = series.set_column(series.column_names.index("name"), "name", base).filter(
        pc.is_in(base, pa.array(list(wanted)))
    )
    for sample in chosen.to_pylist():
        moment = samples.setdefault(sample["source"], {}).setdefault(sample["t_s"], [0.0, 0.0])
        moment[wanted[sample["name"]]] += sample["value"]
    found: dict[str, list[tuple[float, float]]] = {}
    for source, moments in samples.items():
        windows: list[tuple[float, float]] = []
        start: float | None = None
        previous: tuple[float, float, float] | None = None
        for at, (running, tokens) in sorted(moments.items()):
            still = previous is not None and running > 0 and previous[1] > 0 and tokens == previous[2]
            if still and start is None and previous is not None:
                start = previous[0]
            elif not still and start is not None:
                windows.append((start, at))
                start = None
            previous = (at, running, tokens)
        if start is not None:
            windows.append((start, float("inf")))
        if windows:
            found[source] = windows
    return found


def counts(verdicts: pa.Table) -> dict[str, int]:
    """Requests per label, all five present."""
    found = dict.fromkeys(names.LABELS, 0)
    for entry in pc.value_counts(verdicts.column("label")).to_pylist():
        found[entry["values"]] = entry["counts"]
    return found


def reasons(verdicts: pa.Table) -> dict[str, dict[str, int]]:
    """Requests per label and reason, most frequent first."""
    grouped = verdicts.group_by(["label", "reason"]).aggregate([([], "count_all")])
    found: dict[str, dict[str, int]] = {label: {} for label in names.LABELS}
    for entry in sorted(grouped.to_pylist(), key=lambda e: (-e["count_all"], str(e["reason"]))):
        if entry["reason"] is not None:
            found[entry["label"]][entry["reason"]] = entry["count_all"]
    return found


def _one_per_index(requests: pa.Table, scheduled: int) -> pa.Table:
    index = requests.column("index").to_numpy()
    ordered = bool((index[1:] > index[:-1]).all())
    if ordered and (not len(index) or (index[0] >= 0 and index[-1] < scheduled)):
        return requests.combine_chunks()
    _, first = np.unique(index, return_index=True)
    first = first[(index[first] >= 0) & (index[first] < scheduled)]
    return requests.take(pa.array(first)).combine_chunks()


def host_of(url: str) -> str:
    """host:port of a URL: what the target of a row and the source of a scrape have in common."""
    return urlsplit(url).netloc or url


def _known(column: pa.ChunkedArray) -> Bools:
    known: Bools = pc.is_valid(column).to_numpy()
    return known


def _true(column: pa.ChunkedArray) -> Bools:
    values: Bools = pc.fill_null(column, False).to_numpy().astype(np.bool_)
    return values


def _codes(column: pa.ChunkedArray, vocabulary: Sequence[str], offset: int) -> Codes:
    """Position in the vocabulary plus offset; -1 for null and for what is not in it."""
    found = pc.index_in(column, pa.array(vocabulary))
    codes: Codes = pc.fill_null(pc.add(found, offset), -1).to_numpy().astype(np.int8)
    return codes


def _strings(codes: Codes, vocabulary: Sequence[str]) -> pa.Array:
    mask = codes < 0
    return pa.DictionaryArray.from_arrays(
        pa.array(np.where(mask, 0, codes), pa.int8(), mask=mask), pa.array(vocabulary)
    ).cast(pa.string())


def _floats(table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """A column with NaN for null."""
    values: npt.NDArray[np.float64] = table.column(name).cast(pa.float64()).to_numpy().copy()
    return values
