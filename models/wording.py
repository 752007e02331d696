"""English of messages."""

from __future__ import annotations


def several(n: int, one: str, many: str | None = None) -> str:
    """A number with its noun: 1 request, 2 requests, 0 classes.  many: the plural where it is not one with an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
