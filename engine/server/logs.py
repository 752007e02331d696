"""The server's log on stderr: plain lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final

from models.errors import UserError

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"} and, where there is one, "exception"; time is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str, form: str) -> None:
    """Log from ``level`` on, in ``form``.  Raises UserError for a level or a form that there is not."""
    if level.lower() not in LEVELS:
        raise UserError(f"{level!r} is no log level", where="--log-level", remedy=f"one of {', '.join(LEVELS)}")
    if form not in FORMATS:
        raise UserError(f"{form!r} is no log format", where="--log-format", remedy=f"one of {', '.join(FORMATS)}")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
