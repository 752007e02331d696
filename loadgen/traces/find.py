"""Where a trace lies: a path, the folders of TAILSPAN_TRACES, the cache, the network, or the shipped stand-in.

A file counts as a known trace only when its sha256 is the pinned one; one that differs is passed over and named.
`Found.sentence` always says which place it was, so that no report can take the stand-in for the real trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadgen.traces.catalogue import KNOWN, SHIPPED_FOLDER, Known
from loadgen.traces.fetch import FetchError, fetch, has_sha
from models.cache import cache_dir
from models.errors import UserError, did_you_mean

FOLDERS_VARIABLE: Final = "TAILSPAN_TRACES"


@dataclass(frozen=True, slots=True)
class Found:
    """A trace file to read.  source: "path", "folder", "cache", "fetched", "shipped" or "stand-in"."""

    path: Path
    name: str
    source: str
    sentence: str


def cache_folder() -> Path:
    """Where fetched traces are kept."""
    return cache_dir() / "traces"


def folders() -> list[Path]:
    """The folders of TAILSPAN_TRACES, in order."""
    return [Path(part).expanduser() for part in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if part]


def on_disk(known: Known) -> tuple[Found | None, list[str]]:
    """The trace where it lies on this machine already, and the files of its name that are not it."""
    differing: list[str] = []
    if known.url is None:
        path = SHIPPED_FOLDER / known.file
        return Found(path, known.name, "shipped", f"{known.about}; shipped with tailspan"), differing
    places = [(folder / known.file, "folder") for folder in folders()]
    places.append((cache_folder() / known.file, "cache"))
    for path, source in places:
        if has_sha(path, known.sha256):
            place = f"${FOLDERS_VARIABLE}" if source == "folder" else "the cache"
            return Found(path.resolve(), known.name, source, f"the real {known.name} trace, from {place}: {path}"), []
        if path.is_file():
            differing.append(f"{path} is not {known.name} (its sha256 differs)")
    return None, differing


def locate(name: str, progress: Callable[[int, int | None], None] | None = None, where: str = "--trace") -> Found:
    """The file of a trace given by name or path; fetches a known one that is not here yet.

    Where a known trace cannot be had, its stand-in is returned, and the sentence says so.  Raises UserError.
    """
    known = KNOWN.get(name)
    if known is None:
        path = Path(name).expanduser()
        if path.is_file():
            return Found(path.resolve(), path.stem, "path", f"the trace file {path}")
        if path.exists():
            what = "a folder" if path.is_dir() else "no regular file"
            raise UserError(f"{what}, and no trace can be read from it", where=str(path), remedy="name a file of rows")
        raise UserError(
            f"no trace of that name or file: {name}",
            where=where,
            remedy=did_you_mean(name, KNOWN) + f"give a file, or one of {', '.join(KNOWN)} (tailspan traces list)",
        )
    found, differing = on_disk(known)
    if found:
        return found
    seen = f"; {'; '.join(differing)}" if differing else ""
    try:
        path = fetch(known, cache_folder(), progress)
    except FetchError as failure:
        stand_in = KNOWN[known.stand_in] if known.stand_in else None
        if stand_in is None:
            raise UserError(
                f"{known.name} is not on this machine and could not be fetched: {failure}{seen}",
                where=where,
                remedy=f"put {known.file} into a folder named by {FOLDERS_VARIABLE}, or try again with the network",
            ) from None
        return Found(
            SHIPPED_FOLDER / stand_in.file,
            stand_in.name,
            "stand-in",
            f"{stand_in.name} (SYNTHETIC, made with the statistics of {known.name}), because the real trace could not "
            f"be had: {failure}{seen}",
        )
    return Found(path, known.name, "fetched", f"the real {known.name} trace, fetched from {known.url}{seen}")
