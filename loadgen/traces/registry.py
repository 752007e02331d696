"""Which reader reads a file: told by its content, never by its name, and never guessed where two fit.

A new format is one module with FORMAT, recognises(head) and read(path), and one line in READERS.
Files that are no trace at all (a web page, a Git-LFS pointer, something compressed) are named for what they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadgen.traces import azure_2023
from loadgen.traces.catalogue import KNOWN
from loadgen.traces.trace import Rows, Trace
from models.errors import UserError

HEAD_BYTES: Final = 64 * 1024
LFS_HEAD: Final = b"version https://git-lfs.github.com/spec"
LIST_REMEDY: Final = "give a trace file, or a known name: tailspan traces list"


@dataclass(frozen=True, slots=True)
class Reader:
    """One format: how it is recognised and how it is read."""

    format: str
    recognises: Callable[[bytes], bool]
    read: Callable[[Path], tuple[Rows, list[str]]]


READERS: Final = (Reader(azure_2023.FORMAT, azure_2023.recognises, azure_2023.read),)


def read(path: Path, name: str | None = None) -> Trace:
    """Read a trace file of any known format.  name: how the trace is called in reports; its file name otherwise.

    A file whose sha256 is in the catalogue goes by its catalogue name, wherever it lies.  Raises UserError.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except IsADirectoryError:
        raise UserError("this is a folder, not a trace file", where=str(path), remedy=LIST_REMEDY) from None
    except OSError as error:
        raise UserError(f"the trace cannot be read ({error.strerror})", where=str(path), remedy=LIST_REMEDY) from None
    reader = recognise(head, path)
    known = next((entry for entry in KNOWN.values() if entry.sha256 == digest), None)
    rows, notes = reader.read(path)
    return rows.trace(
        known.name if known else (name or path.stem),
        reader.format,
        digest,
        notes,
        synthetic=known is not None and known.synthetic,
    )


def recognise(head: bytes, path: Path) -> Reader:
    """The one reader that fits these first bytes.  Raises UserError where none or more than one does."""
    where = f"{path}:1"
    no_trace = what_it_is(head)
    if no_trace:
        raise UserError(f"this is {no_trace}, not a trace", where=where, remedy="download the raw file again")
    fitting = [reader for reader in READERS if reader.recognises(head)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(
            f"the file fits {len(fitting)} formats: {', '.join(reader.format for reader in fitting)}",
            where=where,
            remedy="give its format by name",
        )
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    known = ", ".join(reader.format for reader in READERS)
    raise UserError(
        f"no known trace format (first line: {first[:80]!r})",
        where=where,
        remedy=f"formats read: {known}; the header must have the columns {', '.join(azure_2023.COLUMNS)} "
        "and stamps without a zone",
    )


def what_it_is(head: bytes) -> str | None:
    """Name the kinds of file that people take for a trace by accident; None where it is none of them."""
    start = head.removeprefix(azure_2023.BOM).lstrip()[:512].lower()
    if not start:
        return "an empty file"
    if head.startswith(LFS_HEAD):
        return "a Git-LFS pointer (the file itself was not downloaded)"
    if start.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "a web page"
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh")):
        return "a compressed file (unpack it first)"
    if b"\x00" in head[:4096]:
        return "a binary file"
    return None
