"""What every trace reader returns: arrivals and lengths in arrival order, and the account of the rows.

Arrivals are exact integer nanoseconds after the first kept row, never decreasing; equal stamps keep file order.
`rows_read == rows_kept + sum(rows_dropped.values())` always holds, and each drop has a reason with its first place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from models.errors import UserError

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

#: A file that loses this share of its rows is warned about, and at the second share it is refused.
WARN_SHARE: Final = 0.05
REFUSE_SHARE: Final = 0.50
#: Drops that say nothing about the quality of the rows (an editor's last empty lines).
HARMLESS: Final = ("blank_line",)


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace file as read.  The four arrays have one entry per kept row."""

    name: str
    format: str
    path: Path
    sha256: str
    arrival_ns: I64  # after the first kept row, not decreasing
    input_tokens: I32
    output_tokens: I32
    row: I64  # data row in the file, 0-based
    rows_read: int
    rows_dropped: dict[str, int]
    first_drop: dict[str, str]  # reason -> "line 7, column ContextTokens: '1,024'"
    inversions: int  # rows that stood before an earlier one; sorted stably
    notes: tuple[str, ...] = ()
    synthetic: bool = False

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def rows_kept(self) -> int:
        return len(self.arrival_ns)

    @property
    def span_s(self) -> float:
        return float(self.arrival_ns[-1]) / 1e9 if len(self) else 0.0

    def account(self) -> str:
        """One line: rows read, kept, dropped by reason with the first place of each."""
        text = f"{self.rows_read:,} rows read, {self.rows_kept:,} kept"
        for reason, count in sorted(self.rows_dropped.items()):
            text += f", {count:,} dropped ({reason}; first: {self.first_drop[reason]})"
        if self.inversions:
            text += f", {self.inversions:,} out of order (sorted)"
        return text


@dataclass(slots=True)
class Rows:
    """Collects the rows of a file while it is read, and the drops with their first place."""

    path: Path
    stamp_ns: list[int] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_drop: dict[str, str] = field(default_factory=dict)

    def keep(self, stamp_ns: int, input_tokens: int, output_tokens: int) -> None:
        self.stamp_ns.append(stamp_ns)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.row.append(self.read)
        self.read += 1

    def drop(self, reason: str, line: int, column: str | None, value: str) -> None:
        self.read += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if reason not in self.first_drop:
            place = f"line {line}" + (f", column {column}" if column else "")
            self.first_drop[reason] = f"{place}: {value[:60]!r}" if value else place

    def trace(self, name: str, format: str, sha256: str, notes: list[str], *, synthetic: bool = False) -> Trace:
        """Sort stably, start at zero, and refuse a file that lost half of its rows.  Raises UserError."""
        bad = {reason: count for reason, count in self.dropped.items() if reason not in HARMLESS}
        judged = len(self.stamp_ns) + sum(bad.values())
        if not self.stamp_ns or (judged and sum(bad.values()) / judged >= REFUSE_SHARE):
            worst = max(bad, key=lambda reason: bad[reason]) if bad else None
            if worst is None:
                raise UserError(
                    "the trace has a header but no rows",
                    where=f"{self.path}:2",
                    remedy="give a file with at least one arrival, or fetch a known trace: tailspan traces list",
                )
            place = self.first_drop[worst]
            line = place.removeprefix("line ").split(",")[0].split(":")[0]
            raise UserError(
                f"{sum(bad.values()):,} of {judged:,} rows cannot be used; first {worst}, {place}",
                where=f"{self.path}:{line}",
                remedy=f"a trace that loses half of its rows is refused; mend the file or export it again as {format}",
            )
        share = sum(bad.values()) / judged
        if share >= WARN_SHARE:
            notes = [*notes, f"{share:.1%} of the rows were dropped"]
        stamps = np.asarray(self.stamp_ns, dtype=np.int64)
        order = np.argsort(stamps, kind="stable")
        inversions = int(np.count_nonzero(np.diff(stamps) < 0))
        stamps = stamps[order]
        return Trace(
            name=name,
            format=format,
            path=self.path,
            sha256=sha256,
            arrival_ns=stamps - stamps[0],
            input_tokens=np.asarray(self.input_tokens, dtype=np.int32)[order],
            output_tokens=np.asarray(self.output_tokens, dtype=np.int32)[order],
            row=np.asarray(self.row, dtype=np.int64)[order],
            rows_read=self.read,
            rows_dropped=dict(self.dropped),
            first_drop=dict(self.first_drop),
            inversions=inversions,
            notes=tuple(notes),
            synthetic=synthetic,
        )
