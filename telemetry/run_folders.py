"""Where run bundles lie, in which order, and which of them a reference on the command line means.

Must always hold: the order is that in which the runs were begun, whatever their folders are called.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

from models.errors import UserError, did_you_mean

MANIFEST: Final = "manifest.json"
ID_TIME: Final = "%Y%m%d-%H%M%S"  # the beginning of a run's id


class NoSuchRun(UserError):
    """A reference stands for no run at all."""


def runs_root() -> Path:
    """$TAILSPAN_RUNS, else ``runs`` in the working directory."""
    return Path(os.environ.get("TAILSPAN_RUNS") or "runs")


def list_runs(root: Path | str | None = None) -> list[Path]:
    """The bundles under a root, newest first."""
    parent = Path(root) if root is not None else runs_root()
    if not parent.is_dir():
        return []
    return sorted((path.parent for path in parent.glob(f"*/{MANIFEST}")), key=age, reverse=True)


def newest(root: Path | str | None = None) -> Path | None:
    """The newest bundle under a root, None when there is none."""
    runs = list_runs(root)
    return runs[0] if runs else None


def resolve(reference: Path | str, root: Path | str | None = None) -> Path:
    """The folder of a bundle from its path, its id, a unique prefix of its id, or ``latest``."""
    parent = Path(root) if root is not None else runs_root()
    text = str(reference)
    if text == "latest":
        if (path := newest(parent)) is not None:
            return path
        raise NoSuchRun("no run yet", where=str(parent), remedy="make one: tailspan demo, or tailspan run --help")
    for path in (Path(text), parent / text):
        if text and (path / MANIFEST).is_file():
            return path
    found = [path for path in list_runs(parent) if text and path.name.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found[:6])
        raise UserError(f"{text!r} is the start of {len(found)} run ids: {names}", remedy="give more of the id")
    if os.sep in text and Path(text).exists():
        raise UserError(f"no run bundle: there is no {MANIFEST} in it", where=text, remedy="tailspan runs list")
    ids = [path.name for path in list_runs(parent)]
    recent = ", ".join(ids[:3]) or "none"
    raise NoSuchRun(
        f"no run bundle {text!r} (a bundle is a folder with a {MANIFEST}); newest runs: {recent}",
        where=str(parent),
        remedy=f"{did_you_mean(text, ids)}tailspan runs list",
    )


def age(path: Path) -> tuple[int, str]:
    """What bundles are ordered by, the older first: the moment at which the run was begun, by its manifest.

    A folder may have been copied under another name, so its name only decides between equals, and stands in (its
    beginning is the time to the second) where no manifest can be read.
    """
    try:
        created = json.loads((path / MANIFEST).read_bytes())["created_unix_ns"]
        if isinstance(created, int):
            return created, path.name
    except (OSError, ValueError, LookupError, TypeError):
        pass
    try:
        return int(time.mktime(time.strptime(path.name[:15], ID_TIME)) * 1e9), path.name
    except (ValueError, OverflowError):
        return 0, path.name
