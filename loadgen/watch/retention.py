"""What stays on disk: the newest windows, and those that a breach refers to, within a number and a size.

Must always hold: what is deleted is a window of this watch and closed; a breach that is kept keeps its windows, until
the disk limit leaves no other way.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.watch.window import size_of


@dataclass(frozen=True, slots=True)
class Kept:
    """A closed window, oldest first in a list."""

    path: Path
    size: int


def surplus(windows: Sequence[Kept], pinned: frozenset[str], most: int, most_bytes: int) -> list[Kept]:
    """Which to delete: the oldest beyond ``most`` or ``most_bytes``; pinned ones only for the bytes, and last."""
    free = [one for one in windows if one.path.name not in pinned]
    gone = free[: max(0, len(free) - most)]
    left = [one for one in windows if one not in gone]
    total = sum(one.size for one in left)
    for one in sorted(
        left[:-1], key=lambda one: one.path.name in pinned
    ):  # stable: oldest first within each; the newest stays
        if total <= most_bytes:
            break
        gone.append(one)
        total -= one.size
    return gone


class Retention:
    """Deletes as windows close."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self.windows: list[Kept] = []
        self.deleted = 0

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.windows)

    def closed(self, path: Path, pinned: frozenset[str]) -> None:
        """One more window is there."""
        self.windows.append(Kept(path, size_of(path)))
        for one in surplus(self.windows, pinned, self._most, self._most_bytes):
            shutil.rmtree(one.path, ignore_errors=True)
            self.windows.remove(one)
            self.deleted += 1
