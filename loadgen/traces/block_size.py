"""How many tokens a prefix block of a trace has: told by every row that names its blocks.

A row of n tokens in blocks of b has ceil(n / b) ids.  Must always hold: the size that is used fits every kept row; a
row that fits no size the rows before it allow is dropped and counted; where two sizes fit all rows and none is the
format's own, the user is asked.
"""

from __future__ import annotations

from loadgen.traces.trace import BadValueError, Rows
from models.errors import UserError

SIZES = tuple(1 << k for k in range(14))  # 1 .. 8192: engines use powers of two


class BlockSize:
    """usual: the size of the format.  asked: the size that the user gave, None to find out."""

    def __init__(self, usual: int, asked: int | None = None) -> None:
        self._usual = usual
        self._possible = frozenset(SIZES if asked is None else (asked,))
        self._told = False  # a row with ids was seen

    def take(self, tokens: int, blocks: int) -> None:
        """One row.  Raises BadValueError("block_count") where it agrees with no size that is possible so far."""
        if blocks == 0:
            return  # a prompt of which nothing is known
        fitting = frozenset(size for size in self._possible if -(-tokens // size) == blocks)
        if not fitting:
            raise BadValueError("block_count")
        self._possible = fitting
        self._told = True

    def found(self, rows: Rows) -> int:
        """The size; a note where it is not the format's own.  Raises UserError where two others are left."""
        if self._usual in self._possible:
            return self._usual
        if len(self._possible) > 1:
            raise UserError(
                f"the prefix blocks are not of {self._usual} tokens; {', '.join(map(str, sorted(self._possible)))} fit",
                where=str(rows.path),
                remedy="say which: --block-size N",
            )
        (size,) = self._possible
        if self._told:
            rows.notes.append(f"prefix blocks of {size} tokens (inferred: {self._usual} is impossible)")
        return size
