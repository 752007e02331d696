"""Which reader reads a file: told by its content, never by its name, and never guessed where two fit.

A new format is one module with FORMAT, recognises(head) and read(path, rows, choices), and one line in READERS.
Files that are no trace at all (a web page, a Git-LFS pointer, something compressed) are named for what they are.
`read` gives a Trace, of the whole file or of a window of it; `stream` gives the rows in order without keeping any, so
that a file of 27 million rows needs the memory of a few batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from loadgen.traces import (
    azure_2023,
    azure_2024,
    bailian,
    burstgpt,
    burstgpt_3,
    mooncake,
    own,
    ragpulse,
    servegen,
    vidur,
)
from loadgen.traces.catalogue import KNOWN
from loadgen.traces.lines import BOM
from loadgen.traces.order import InOrder
from loadgen.traces.trace import APPEND, DROP, FAIL, KEEP, Batch, Choices, Rows, Trace, collected
from models.errors import UserError, did_you_mean

HEAD_BYTES: Final = 64 * 1024
LFS_HEAD: Final = b"version https://git-lfs.github.com/spec"
LIST_REMEDY: Final = "give a trace file, or a known name: tailspan traces list"


@dataclass(frozen=True, slots=True)
class Reader:
    """One format: how it is recognised and how it is read."""

    format: str
    recognises: Callable[[bytes], bool]
    read: Callable[[Path, Rows, Choices], Iterator[Batch]]


READERS: Final = tuple(
    Reader(module.FORMAT, module.recognises, module.read)
    for module in (azure_2023, azure_2024, burstgpt, burstgpt_3, mooncake, bailian, ragpulse, servegen, vidur)
)
OWN_READERS: Final = tuple(Reader(name, lambda head: False, own.read) for name in own.FORMATS)
FORMATS: Final = tuple(reader.format for reader in (*READERS, *OWN_READERS))


def checked(choices: Choices) -> Choices:
    """Raises UserError for a choice that does not exist."""
    for value, allowed, option in (
        (choices.format, (None, *FORMATS), "--trace-format"),
        (choices.failures, (KEEP, DROP), "--trace-failures"),
        (choices.restart, (FAIL, APPEND), "--trace-restart"),
        (choices.time_unit, (None, *own.UNITS), "--time-unit"),
    ):
        if value not in allowed:
            known = ", ".join(str(one) for one in allowed if one is not None)
            raise UserError(
                f"{value!r} is not a choice",
                where=option,
                remedy=did_you_mean(str(value), (one for one in allowed if one)) + f"choose {known}",
            )
    if choices.block_size is not None and not 1 <= choices.block_size <= 1 << 20:
        raise UserError(f"blocks of {choices.block_size} tokens", where="--block-size", remedy="give 1 to 1048576")
    if choices.format in own.FORMATS or choices.columns:
        own.checked(choices)
    return choices


@dataclass(slots=True)
class Stream:
    """A file that is being read.  rows and order are complete once `batches` is through."""

    reader: Reader
    rows: Rows
    order: InOrder
    batches: Iterator[Batch]


def stream(path: Path, choices: Choices | None = None) -> Stream:
    """The usable rows of a trace file in order of time, batch by batch.  Raises UserError, also while iterated."""
    chosen = checked(choices or Choices())
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except IsADirectoryError:
        raise UserError("this is a folder, not a trace file", where=str(path), remedy=LIST_REMEDY) from None
    except OSError as error:
        raise UserError(f"the trace cannot be read ({error.strerror})", where=str(path), remedy=LIST_REMEDY) from None
    reader = recognise(head, path, chosen)
    rows = Rows(path)
    order = InOrder(path)

    def batches() -> Iterator[Batch]:
        for batch in reader.read(path, rows, chosen):
            yield from order.feed(batch)
        yield from order.rest()
        rows.judge(reader.format)

    return Stream(reader, rows, order, batches())


def read(
    path: Path,
    name: str | None = None,
    choices: Choices | None = None,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
) -> Trace:
    """Read a trace file of any known format.  name: how the trace is called in reports; its file name otherwise.

    start_s, duration_s: only the rows of this window are kept in memory, all are counted.  A file whose sha256 is in
    the catalogue goes by its catalogue name, wherever it lies.  Raises UserError.
    """
    source = stream(path, choices)
    kept: list[Batch] = []
    start_ns = round(start_s * 1e9)
    end_ns = None if duration_s is None else start_ns + round(duration_s * 1e9)
    for batch in source.batches:
        since = batch.stamp_ns - source.order.first_ns
        first = int(np.searchsorted(since, start_ns, side="left"))
        last = len(since) if end_ns is None else int(np.searchsorted(since, end_ns, side="left"))
        kept.append(batch if (first, last) == (0, len(since)) else batch.take(np.arange(first, max(first, last))))
    digest = sha256_of(path)
    known = next((entry for entry in KNOWN.values() if entry.sha256 == digest), None)
    return collected(
        Batch.joined(kept),
        source.rows,
        known.name if known else (name or path.stem),
        source.reader.format,
        digest,
        source.order,
        synthetic=known is not None and known.synthetic,
    )


def sha256_of(path: Path) -> str:
    """Of the file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recognise(head: bytes, path: Path, choices: Choices | None = None) -> Reader:
    """The one reader for these first bytes.  Raises UserError where none or more than one fits."""
    chosen = choices or Choices()
    where = f"{path}:1"
    is_own = chosen.format in own.FORMATS or (chosen.format is None and bool(chosen.columns))
    no_trace = what_it_is(head)
    if no_trace and not (is_own and own.format_of(head) == own.PARQUET):
        remedy = "download the raw file again"
        if head.startswith(b"PAR1"):
            remedy = own.MAP_REMEDY
        raise UserError(f"this is {no_trace}, not a trace", where=where, remedy=remedy)
    if is_own:
        wanted = chosen.format or own.format_of(head)
        return next(reader for reader in OWN_READERS if reader.format == wanted)
    if chosen.format is not None:
        return next(reader for reader in READERS if reader.format == chosen.format)
    fitting = [reader for reader in READERS if reader.recognises(head)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(
            f"the file fits {len(fitting)} formats: {', '.join(reader.format for reader in fitting)}",
            where=where,
            remedy="say which: --trace-format NAME",
        )
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    known = ", ".join(reader.format for reader in READERS)
    raise UserError(
        f"no known trace format (first line: {first[:80]!r})",
        where=where,
        remedy=f"formats read: {known}; for a file of your own: {own.MAP_REMEDY}",
    )


def what_it_is(head: bytes) -> str | None:
    """Name the kinds of file that people take for a trace by accident; None where it is none of them."""
    start = head.removeprefix(BOM).lstrip()[:512].lower()
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
