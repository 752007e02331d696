"""The one error that a user is meant to read: what was wrong, with the value, where, and what to do."""

from __future__ import annotations


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
