"""Rows in the order of their stamps, from a file that is nearly so, in bounded memory.

Owns the sorting of a stream.  Must always hold: what comes out never decreases, and equal stamps keep file order.
A file of up to REORDER rows is sorted whole; in a longer one a row may stand up to REORDER rows too late, and one that
stands later still is an error that names its row: no window and no statistic could be trusted any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from loadgen.traces.trace import Batch
from models.errors import UserError

REORDER: Final = 1 << 20


class InOrder:
    """first_ns, last_ns: the earliest and the latest stamp of what came out.  inversions: steps back in the file."""

    def __init__(self, path: Path, reorder: int = REORDER) -> None:
        self._path = path
        self._reorder = reorder
        self._held: list[Batch] = []
        self._held_rows = 0
        self._previous: int | None = None
        self._released = False
        self.first_ns = 0
        self.last_ns = 0
        self.inversions = 0

    def feed(self, batch: Batch) -> Iterator[Batch]:
        """Take the next rows of the file; yields those whose place is known."""
        if not len(batch):
            return
        stamps = batch.stamp_ns
        self.inversions += int(np.count_nonzero(np.diff(stamps) < 0))
        if self._previous is not None and stamps[0] < self._previous:
            self.inversions += 1
        self._previous = int(stamps[-1])
        self._held.append(batch)
        self._held_rows += len(batch)
        if self._held_rows >= 2 * self._reorder:
            whole = self._sorted()
            yield self._release(whole.take(np.arange(len(whole) - self._reorder)))
            self._held = [whole.take(np.arange(len(whole) - self._reorder, len(whole)))]
            self._held_rows = self._reorder

    def rest(self) -> Iterator[Batch]:
        """The end of the file: what is still held."""
        if self._held:
            whole, self._held, self._held_rows = self._sorted(), [], 0
            yield self._release(whole)

    def _sorted(self) -> Batch:
        whole = Batch.joined(self._held)
        if (np.diff(whole.stamp_ns) >= 0).all():
            return whole
        return whole.take(np.argsort(whole.stamp_ns, kind="stable"))

    def _release(self, batch: Batch) -> Batch:
        first = int(batch.stamp_ns[0])
        if not self._released:
            self.first_ns = first
        elif first < self.last_ns:
            raise UserError(
                f"data row {int(batch.row[0]):,} is {(self.last_ns - first) / 1e9:,.3f} s earlier than one more than "
                f"{self._reorder:,} rows before it",
                where=str(self._path),
                remedy="sort the file by time",
            )
        self._released = True
        self.last_ns = int(batch.stamp_ns[-1])
        return batch
