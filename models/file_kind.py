"""First look at a model file: is it there, and is it what its name says rather than a stand-in?

Downloads leave three classic stand-ins that every parser reports as gibberish: a Git LFS pointer, an HTML error page
and an empty file.  They are named here, before any parser sees them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.errors import UserError

_AGAIN = "fetch the file again"
_JSON_LIMIT = 256 * 2**20  # bytes; the largest tokenizer.json in the field is about 35 MB


def first_bytes(path: Path, count: int = 512) -> bytes:
    """The first bytes of a real file.  Raises UserError for a missing, unreadable or empty file and for stand-ins."""
    try:
        with path.open("rb") as file:
            start = file.read(count)
    except FileNotFoundError as error:
        raise UserError("no such file", where=str(path), remedy="check the path") from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from error
    if not start:
        raise UserError("the file is empty", where=str(path), remedy=_AGAIN)
    if start.startswith(b"version https://git-lfs"):
        raise UserError(
            "this is a Git LFS pointer, not the file itself", where=str(path), remedy="run `git lfs pull` in its folder"
        )
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise UserError("this is an HTML page, not a model file", where=str(path), remedy=_AGAIN)
    return start


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.  Raises UserError naming the file and the line of the mistake."""
    first_bytes(path)
    if path.stat().st_size > _JSON_LIMIT:
        raise UserError(f"larger than {_JSON_LIMIT >> 20} MiB", where=str(path), remedy=_AGAIN)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON: {error.msg}", where=f"{path}:{error.lineno}", remedy=_AGAIN) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", where=str(path), remedy=_AGAIN) from error
    if not isinstance(content, dict):
        raise UserError(f"a JSON object is needed, not {type(content).__name__}", where=str(path), remedy=_AGAIN)
    return content
