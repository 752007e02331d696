"""What every trace reader makes: rows in columns, batch by batch, and the account of the rows.

A reader puts rows into `Rows` (`keep` or `drop`) and yields `Rows.take()` each time it is full, so that no file is
ever held as a whole.  `rows_read == rows_kept + sum(rows_dropped.values())` always holds, and each drop has a reason
with its first place.  A `Trace` is what a run needs of a file: arrivals as exact integer nanoseconds after the file's
first arrival, never decreasing, equal stamps in file order; of a part of the file, if only a part was asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.errors import UserError
from models.wording import several

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

#: A file that loses this share of its rows is warned about, and at the second share it is refused.
WARN_SHARE: Final = 0.05
REFUSE_SHARE: Final = 0.50
FAILED_EMPTY: Final = "recorded_failure_no_tokens"  # the recorder saw neither a prompt nor an answer
FAILED_UNANSWERED: Final = "recorded_failure_no_answer"  # a prompt went in and no token came out
#: Drops that say nothing about the quality of the rows: an editor's last empty lines, failures that were recorded.
HARMLESS: Final = ("blank_line", FAILED_EMPTY, FAILED_UNANSWERED)
BATCH_ROWS: Final = 65_536
NO_SESSION: Final = -1
KEEP: Final = "keep"
DROP: Final = "drop"
FAIL: Final = "fail"
APPEND: Final = "append"


class BadValueError(Exception):
    """A field that cannot be used: the reason of the drop."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user decides where a file does not say it itself.

    columns: of an own format, our name -> the file's.  failures: recorded failures, "keep" or "drop".  restart: a clock
    that starts again in mid-file, "fail" or "append".  seed: of a generator.  block_size: tokens of a prefix block.
    """

    format: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: str | None = None
    block_size: int | None = None
    failures: str = DROP
    restart: str = FAIL
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as a plan and a manifest keep it."""
        plain = Choices()
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) != getattr(plain, name)}


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in columns.  session: a number per conversation, NO_SESSION without one.  ids: the prefix ids of all rows
    one after another; those of row n end at ids_end[n].  failed: the recorder saw no answer."""

    stamp_ns: I64
    input_tokens: I32
    output_tokens: I32
    row: I64
    session: I64
    failed: Bools
    ids: I64
    ids_end: I64

    def __len__(self) -> int:
        return len(self.stamp_ns)

    def take(self, chosen: I64) -> Batch:
        """These rows in this order."""
        ids, ends = taken_ids(self.ids, self.ids_end, chosen)
        return Batch(
            self.stamp_ns[chosen],
            self.input_tokens[chosen],
            self.output_tokens[chosen],
            self.row[chosen],
            self.session[chosen],
            self.failed[chosen],
            ids,
            ends,
        )

    @classmethod
    def joined(cls, parts: list[Batch]) -> Batch:
        """All rows of the parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        shifts = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
        ends = [part.ids_end + shift for part, shift in zip(parts, shifts, strict=True)]
        return cls(
            np.concatenate([part.stamp_ns for part in parts]),
            np.concatenate([part.input_tokens for part in parts]),
            np.concatenate([part.output_tokens for part in parts]),
            np.concatenate([part.row for part in parts]),
            np.concatenate([part.session for part in parts]),
            np.concatenate([part.failed for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate(ends),
        )


def taken_ids(ids: I64, ends: I64, chosen: I64) -> tuple[I64, I64]:
    """The prefix ids of some rows: flat, and where those of each row end."""
    if not len(ids) or not len(chosen):
        return ids[:0], np.zeros(len(chosen), dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1]))[chosen]
    counts = ends[chosen] - starts
    new_ends = np.cumsum(counts)
    within = np.arange(new_ends[-1]) - np.repeat(new_ends - counts, counts)
    return ids[np.repeat(starts, counts) + within], new_ends


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Which prompts begin alike.  Two rows share their first n blocks where their first n ids are equal.

    block_size: tokens of a block (the last of a row may be shorter); 0: the ids name components of unknown length.
    """

    ids: I64
    ends: I64
    block_size: int

    def of(self, row: int) -> I64:
        """The ids of one row of the trace's arrays."""
        return self.ids[self.ends[row - 1] if row else 0 : self.ends[row]]

    def take(self, chosen: I64) -> Prefixes:
        return Prefixes(*taken_ids(self.ids, self.ends, chosen), self.block_size)


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace file as read, or the asked part of it.  The arrays have one entry per row that was read into it."""

    name: str
    format: str
    path: Path
    sha256: str
    arrival_ns: I64  # after the first arrival of the file, not decreasing
    input_tokens: I32
    output_tokens: I32
    row: I64  # data row in the file, 0-based
    rows_read: int
    rows_dropped: dict[str, int]
    first_drop: dict[str, str]  # reason -> "line 7, column ContextTokens: '1,024'"
    inversions: int  # rows that stood before an earlier one; sorted stably
    notes: tuple[str, ...] = ()
    synthetic: bool = False
    rows_kept: int = 0  # of the whole file
    last_ns: int = 0  # the file's last arrival
    session: I64 | None = None
    prefixes: Prefixes | None = None
    failed: Bools | None = None

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def span_s(self) -> float:
        return self.last_ns / 1e9

    def account(self) -> str:
        """One line: rows read, kept, dropped by reason with the first place of each."""
        text = f"{several(self.rows_read, 'row')} read, {self.rows_kept:,} kept"
        for reason, count in sorted(self.rows_dropped.items()):
            text += f", {count:,} dropped ({reason}; first: {self.first_drop[reason]})"
        if self.inversions:
            text += f", {self.inversions:,} out of order (sorted)"
        if self.failed is not None:
            text += f", {int(self.failed.sum()):,} recorded failures among them"
        return text


@dataclass(slots=True)
class Rows:
    """Collects rows while a file is read, and the drops with their first place.  notes: for the user."""

    path: Path
    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_drop: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    block_size: int = 0
    _stamp: array[int] = field(default_factory=lambda: array("q"))
    _input: array[int] = field(default_factory=lambda: array("i"))
    _output: array[int] = field(default_factory=lambda: array("i"))
    _row: array[int] = field(default_factory=lambda: array("q"))
    _session: array[int] = field(default_factory=lambda: array("q"))
    _failed: array[int] = field(default_factory=lambda: array("b"))
    _ids: array[int] = field(default_factory=lambda: array("q"))
    _ids_end: array[int] = field(default_factory=lambda: array("q"))

    def keep(
        self,
        stamp_ns: int,
        input_tokens: int,
        output_tokens: int,
        session: int = NO_SESSION,
        ids: list[int] | None = None,
        failed: bool = False,
    ) -> None:
        self._stamp.append(stamp_ns)
        self._input.append(input_tokens)
        self._output.append(output_tokens)
        self._row.append(self.read)
        self._session.append(session)
        self._failed.append(failed)
        if ids:
            self._ids.extend(ids)
        self._ids_end.append(len(self._ids))
        self.read += 1
        self.kept += 1

    def drop(self, reason: str, line: int, column: str | None, value: str) -> None:
        self.read += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if reason not in self.first_drop:
            place = f"line {line}" + (f", column {column}" if column else "")
            self.first_drop[reason] = f"{place}: {value[:60]!r}" if value else place

    def many(self, stamp_ns: I64, input_tokens: I32, output_tokens: I32) -> Batch:
        """Take whole columns of rows without session, ids or failure, as a batch of their own."""
        count = len(stamp_ns)
        rows = np.arange(self.read, self.read + count, dtype=np.int64)
        self.read += count
        self.kept += count
        none = np.full(count, NO_SESSION, dtype=np.int64)
        zeros = np.zeros(count, dtype=np.int64)
        return Batch(stamp_ns, input_tokens, output_tokens, rows, none, zeros.astype(np.bool_), zeros[:0], zeros)

    @property
    def full(self) -> bool:
        return len(self._stamp) >= BATCH_ROWS

    def take(self) -> Batch:
        """The rows kept since the last call."""
        columns = (self._stamp, self._input, self._output, self._row, self._session, self._failed)
        self._stamp, self._input, self._output, self._row = array("q"), array("i"), array("i"), array("q")
        self._session, self._failed = array("q"), array("b")
        ids, ends = self._ids, self._ids_end
        self._ids, self._ids_end = array("q"), array("q")
        stamp, inputs, outputs, row, session, failed = (np.array(column) for column in columns)
        return Batch(stamp, inputs, outputs, row, session, failed.astype(np.bool_), np.array(ids), np.array(ends))

    def judge(self, format: str) -> None:
        """Refuse a file that lost half of its rows, note one that lost 5 %.  Raises UserError."""
        bad = {reason: count for reason, count in self.dropped.items() if reason not in HARMLESS}
        judged = self.kept + sum(bad.values())
        if self.kept and sum(bad.values()) / judged < REFUSE_SHARE:
            share = sum(bad.values()) / judged
            if share >= WARN_SHARE:
                self.notes.append(f"{share:.1%} of the rows were dropped")
            return
        worst = max(bad, key=lambda reason: bad[reason]) if bad else None
        if worst is None:
            failures = sum(count for reason, count in self.dropped.items() if reason != "blank_line")
            raise UserError(
                f"all {failures:,} rows are recorded failures" if failures else "the trace has no rows",
                where=f"{self.path}:2",
                remedy="keep them: --trace-failures keep"
                if failures
                else "give a file with at least one arrival, or fetch a known trace: tailspan traces list",
            )
        place = self.first_drop[worst]
        line = place.removeprefix("line ").split(",")[0].split(":")[0]
        raise UserError(
            f"{sum(bad.values()):,} of {judged:,} rows cannot be used; first {worst}, {place}",
            where=f"{self.path}:{line}",
            remedy=f"a trace that loses half of its rows is refused; mend the file or export it again as {format}",
        )

    def trace(self, name: str, format: str, sha256: str, notes: list[str], *, synthetic: bool = False) -> Trace:
        """A trace of the rows collected so far, for rows that come from no file.  Raises UserError."""
        from loadgen.traces.order import InOrder

        order = InOrder(self.path)
        batches = [*order.feed(self.take()), *order.rest()]
        self.notes += notes
        self.judge(format)
        whole = Batch.joined(batches)
        return collected(whole, self, name, format, sha256, order, synthetic=synthetic)


def collected(
    batch: Batch, rows: Rows, name: str, format: str, sha256: str, order: Any, *, synthetic: bool = False
) -> Trace:
    """The trace of rows in order (loadgen.traces.order.InOrder knows the first and last stamp of the file)."""
    return Trace(
        name=name,
        format=format,
        path=rows.path,
        sha256=sha256,
        arrival_ns=batch.stamp_ns - order.first_ns,
        input_tokens=batch.input_tokens,
        output_tokens=batch.output_tokens,
        row=batch.row,
        rows_read=rows.read,
        rows_dropped=dict(rows.dropped),
        first_drop=dict(rows.first_drop),
        inversions=order.inversions,
        notes=tuple(rows.notes),
        synthetic=synthetic,
        rows_kept=rows.kept,
        last_ns=order.last_ns - order.first_ns,
        session=batch.session if (batch.session != NO_SESSION).any() else None,
        prefixes=Prefixes(batch.ids, batch.ids_end, rows.block_size) if len(batch.ids) else None,
        failed=batch.failed if batch.failed.any() else None,
    )
