"""The cache of converted models: where it is, and how a folder gets into it whole or not at all.

What must hold: a folder under its final name is complete.  It is made under a temporary name by the one process that
holds the lock, and renamed; a process that dies in between leaves only a temporary folder, which the next one removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import UserError


def cache_dir() -> Path:
    """$TAILSPAN_CACHE, else $XDG_CACHE_HOME/tailspan, else ~/.cache/tailspan."""
    if own := os.environ.get("TAILSPAN_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "tailspan"
    return Path.home() / ".cache" / "tailspan"


def made(folder: Path) -> Path:
    """folder, made if needed.  Raises UserError if the cache cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache folder cannot be made: {error.strerror}",
            where=str(folder),
            remedy="set TAILSPAN_CACHE to a folder that can be written",
        ) from error
    return folder


@contextmanager
def locked(name: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache's lock of that name against other processes and threads; tells waiting if it must wait."""
    path = made(cache_dir() / "locks") / f"{name}.lock"
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            remedy="set TAILSPAN_CACHE to a folder that can be written",
        ) from error
    with file:
        # The kernel drops the lock with the file, also when the process is killed.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"another process is preparing {name}, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_once(folder: Path, build: Callable[[Path], None], *, waiting: Callable[[str], None]) -> Path:
    """folder, filled by build(temporary folder) if it is not there yet; safe with many processes at once.

    Raises what build raises (nothing is left then) and UserError for a full or read-only disk.
    """
    if folder.is_dir():
        return folder
    with locked(folder.name, waiting):
        if folder.is_dir():
            return folder
        made(folder.parent)
        for left in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
        try:
            temporary.mkdir()
            build(temporary)
            temporary.rename(folder)
        except OSError as error:
            raise UserError(
                f"the cache cannot be written: {error.strerror or error}",
                where=str(folder.parent),
                remedy="free some disk space, or set TAILSPAN_CACHE to another folder",
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def require_space(folder: Path, size: int) -> None:
    """Raise UserError unless size bytes and a little more are free on folder's disk."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.02 + 2**20:
        raise UserError(
            f"{size / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free",
            where=str(folder),
            remedy="free some disk space, or set TAILSPAN_CACHE to a folder on another disk",
        )


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read once (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """sha256_of(path), remembered in the cache by path, size and modification time, so that a big file is read once."""
    stat = path.stat()
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    note = cache_dir() / "digests" / f"{key}.json"
    facts = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if {name: known.get(name) for name in facts} == facts:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, AttributeError):
        known = None  # no note yet, or a damaged one: hash again
    digest = sha256_of(path)
    made(note.parent)
    temporary = note.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({**facts, "sha256": digest}), encoding="utf-8")
    temporary.replace(note)
    return digest
