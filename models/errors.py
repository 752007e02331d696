"""The one error that a user is meant to read: what was wrong, with the value, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or environment.  The command line prints it without a traceback and exits with code 4.

    message: what is wrong, naming the value.  where: file, file:line or option.  remedy: what to do about it.
    """

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The beginning of a remedy, "did you mean 'x'? ", where a known name is near this one; otherwise nothing."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[close[0]]!r}? " if close else ""
