"""Runs kept by a name, to compare later ones with: ``tailspan runs baseline set main RUN…``.

Owns the files ``baselines/NAME.json`` beside the bundles; each lists run ids, oldest first.  Must always hold: a
baseline holds VALID and complete runs of one and the same load only; setting a name replaces it at once or not at all.

Several runs are worth much more than one: they show how far two runs of the same thing lie apart.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.errors import UserError, did_you_mean
from models.wording import several
from telemetry import names
from telemetry.bundle import COMPLETE, Bundle, NoSuchRun, list_runs, runs_root
from telemetry.parts import write_atomically

FOLDER: Final = "baselines"
KEPT: Final = 20  # runs of a name; the oldest leave
LENGTH_TOLERANCE: Final = 0.001
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Load:
    """What makes two runs comparable: the trace, how many requests of it, over how long."""

    trace_sha256: str
    scheduled: int
    length_s: float | None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Load:
        """From a run's manifest."""
        sha = str((manifest.get("hashes") or {}).get("trace") or "")
        length = manifest.get("length_s")
        return cls(sha, int(manifest.get("scheduled") or 0), float(length) if isinstance(length, int | float) else None)

    def differences(self, other: Load) -> list[str]:
        """Sentences on what differs; empty where the two may be compared."""
        found = []
        if self.trace_sha256 != other.trace_sha256:
            found.append(f"another trace (sha256 {other.trace_sha256[:12] or 'unknown'}, not {self.trace_sha256[:12]})")
        if self.scheduled != other.scheduled:
            found.append(f"{several(other.scheduled, 'request')}, not {self.scheduled}")
        if self.length_s and other.length_s and abs(self.length_s - other.length_s) > LENGTH_TOLERANCE * self.length_s:
            found.append(f"over {other.length_s:.1f} s, not {self.length_s:.1f} s")
        return found


def set_baseline(name: str, runs: Sequence[str], root: Path | None = None, *, add: bool = False) -> list[str]:
    """Make a name stand for runs (ids, paths or ``latest``), or add them to it; returns its ids.

    UserError for a run that is not complete and VALID, or whose load is not that of the others.
    """
    path = _file(name, root)
    ids = list(_ids(path)) if add and path.is_file() else []
    first = Load.of(Bundle.open(ids[0], root).manifest) if ids else None
    for reference in runs:
        bundle = Bundle.open(reference, root)
        verdict = (bundle.manifest.get("validity") or {}).get("verdict")
        if bundle.status != COMPLETE or verdict != names.VALID:
            raise UserError(
                f"run {bundle.run_id} is {bundle.status} and {verdict or 'not judged'}; a baseline has to be VALID",
                where=name,
                remedy="run it again on a quiet machine",
            )
        load = Load.of(bundle.manifest)
        first = first or load
        if differences := first.differences(load):
            raise UserError(
                f"run {bundle.run_id} had another load than the others: {'; '.join(differences)}",
                where=name,
                remedy="give runs of the same trace, window and scale; or set the name anew with these alone",
            )
        if bundle.path.parent.resolve() != path.parent.parent.resolve():
            raise UserError(
                f"run {bundle.run_id} lies in {bundle.path.parent}, not beside the baseline",
                where=name,
                remedy=f"copy its folder into {path.parent.parent}, or name that folder by --root",
            )
        ids = [known for known in ids if known != bundle.path.name] + [bundle.path.name]
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = ids[-KEPT:]
    text = json.dumps({"name": name, "runs": kept, "set_unix_ns": time.time_ns()}, indent=2)
    write_atomically(path, text.encode() + b"\n")
    return kept


def resolve_baseline(name: str, root: Path | None = None, where: str = "--baseline") -> list[Bundle]:
    """The bundles that a baseline's name, or a run's id or path, stands for.

    where: the option or the command that the name was given to.  UserError where there is none.
    """
    path = _file(name, root) if _NAME.fullmatch(name) else None
    if path is None or not path.is_file():
        try:
            return [Bundle.open(name, root)]
        except NoSuchRun as problem:
            known, ids = sorted(list_baselines(root)), [path.name for path in list_runs(root)]
            raise NoSuchRun(
                f"no baseline and no run {name!r}; baselines: {', '.join(known) or 'none'}; newest runs: "
                f"{', '.join(ids[:3]) or 'none'}",
                where=where,
                remedy=f"{did_you_mean(name, (*known, *ids))}tailspan runs list, tailspan runs baseline list",
            ) from problem
    found = []
    for run_id in _ids(path):
        try:
            found.append(Bundle.open(run_id, root))
        except UserError as problem:
            raise UserError(
                f"run {run_id} of baseline {name!r} is gone: {problem.message}",
                where=str(path),
                remedy=f"set it anew: tailspan runs baseline set {name} RUN",
            ) from problem
    return found


def require_same_load(runs: Sequence[Bundle], load: Load, name: str | None) -> None:
    """UserError where a run of a baseline had another load than the one at hand: the two cannot be compared."""
    for one in runs:
        if differences := Load.of(one.manifest).differences(load):
            raise UserError(
                f"this load cannot be compared with that of run {one.run_id}: {'; '.join(differences)}",
                where=f"--baseline {name}",
                remedy="replay the same load (same trace, window, seed and scales), or set the baseline anew",
            )


def list_baselines(root: Path | None = None, broken: list[UserError] | None = None) -> dict[str, list[str]]:
    """Name to run ids.  A file that cannot be read is left out; why goes into ``broken``."""
    found = {}
    for path in sorted(((root if root is not None else runs_root()) / FOLDER).glob("*.json")):
        try:
            found[path.stem] = list(_ids(path))
        except UserError as problem:
            if broken is not None:
                broken.append(problem)
    return found


def remove_baseline(name: str, root: Path | None = None) -> None:
    """Forget a name; its runs stay.  UserError where there is none."""
    path = _file(name, root)
    if not path.is_file():
        raise UserError(f"no baseline {name!r}", where=str(path.parent), remedy="tailspan runs baseline list")
    path.unlink()


def _file(name: str, root: Path | None) -> Path:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is not a name for a baseline", where="baseline", remedy="use letters, digits, '.', '_' and '-'"
        )
    return (root if root is not None else runs_root()) / FOLDER / f"{name}.json"


def _ids(path: Path) -> list[str]:
    try:
        found = json.loads(path.read_bytes())["runs"]
        if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
            raise ValueError("no runs")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else f"no list of runs: {problem}"
        remedy = f"set it anew: tailspan runs baseline set {path.stem} RUN; or delete the file"
        raise UserError(f"cannot be read: {why}", where=str(path), remedy=remedy) from problem
    return found
