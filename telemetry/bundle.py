"""The run bundle: one folder that anyone can copy, mail and read with pandas or DuckDB.

Owns: the folder layout (``manifest.json``, one folder of parts per table, ``verdicts-<SLO hash>.parquet``), run ids and
how a bundle is found.  What is inside the part files is ``telemetry.parts``.
Must always hold: the manifest on disk is a complete one, old or new, at any moment; rows are facts and never change,
save that when the parts are compacted texts are dropped by the plan's ``keep_text`` and phases that another kind of
server told by its spans or answers are filled in; no secret reaches the manifest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from models.errors import UserError
from telemetry import hard_checks, outcomes, validity
from telemetry.part_writer import PartWriter
from telemetry.parts import TableRead, compact, read_table, write_atomically
from telemetry.run_folders import ID_TIME, MANIFEST, NoSuchRun, age, list_runs, newest, resolve, runs_root
from telemetry.schema import SCHEMA_VERSION, TABLES
from telemetry.slo import Slo, of_manifest

__all__ = [
    "MANIFEST", "Bundle", "NoSuchRun", "PartWriter", "age", "list_runs", "newest", "resolve", "runs_root",
]  # fmt: skip

RUNNING: Final = "running"
COMPLETE: Final = "complete"
INCOMPLETE: Final = "incomplete"
INTERRUPTED: Final = "interrupted"
STATUSES: Final = (RUNNING, COMPLETE, INCOMPLETE, INTERRUPTED)

KEEP_NONE: Final = "none"
KEEP_WRONG: Final = "wrong"  # the default: texts of answers that fail a hard check, and of canaries
KEEP_ALL: Final = "all"
KEEP_TEXT: Final = (KEEP_NONE, KEEP_WRONG, KEEP_ALL)

JUDGE_VERSION: Final = 3  # raise it when outcomes.judge changes its mind, so that kept verdicts are made anew
ELSEWHERE_S: Final = 30.0  # a run that another host writes, and that wrote nothing for so long, has lost its writer
#: Called with the folder of a bundle before it is repaired; the command line adds what the load generator knows.
BEFORE_REPAIR: Final[list[Callable[[Path], object]]] = []
_BASIS_KEY: Final = b"tailspan.basis"
_SECRET_KEYS: Final = frozenset({"api_key", "apikey", "authorization", "password", "secret", "token", "bearer"})


class Bundle:
    """One run's folder.  ``manifest`` is the content of manifest.json as last read or written."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def create(cls, root: Path | str | None, plan: Mapping[str, Any], **fields: Any) -> Bundle:
        """A new bundle under ``root`` (default: the runs root) with status "running"; fields go into its manifest."""
        parent = Path(root) if root is not None else runs_root()
        for _ in range(16):
            run_id = f"{time.strftime(ID_TIME)}-{secrets.token_hex(2)}"
            path = parent / run_id
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                continue
            except OSError as problem:
                raise UserError(
                    f"cannot make a run folder: {problem.strerror}",
                    where=str(path),
                    remedy="set TAILSPAN_RUNS to a folder that you may write to",
                ) from problem
        else:
            raise UserError("sixteen run ids in a row were taken", where=str(parent), remedy="try again")
        bundle = cls(path, {})
        bundle.update(
            **{
                "schema_version": SCHEMA_VERSION,
                "run_id": run_id,
                "status": RUNNING,
                "created_unix_ns": time.time_ns(),
                "writer": {"pid": os.getpid(), "host": socket.gethostname(), "started": _process_start(os.getpid())},
                "plan": dict(plan),
                **fields,
            }
        )
        return bundle

    @classmethod
    def open(cls, reference: Path | str, root: Path | str | None = None) -> Bundle:
        """Open by path, run id, unique prefix of one, or ``latest``.  UserError when there is no such bundle."""
        path = resolve(reference, root)
        return cls(path, _read_manifest(path))

    @property
    def run_id(self) -> str:
        return str(self.manifest.get("run_id", self.path.name))

    @property
    def status(self) -> str:
        return str(self.manifest.get("status", INCOMPLETE))

    def update(self, **fields: Any) -> None:
        """Set top-level fields of the manifest and replace the file by an atomic rename."""
        if (self.path / MANIFEST).exists():
            self.manifest = _read_manifest(self.path)
        self.manifest.update({key: _without_secrets(value) for key, value in fields.items()})
        text = json.dumps(self.manifest, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
        write_atomically(self.path / MANIFEST, text.encode() + b"\n")

    def reload(self) -> None:
        """Read the manifest again: another process may be writing it."""
        self.manifest = _read_manifest(self.path)

    def writer(self, table: str, worker_name: str) -> PartWriter:
        """A writer of one more part of a table."""
        return PartWriter(self.path / table, TABLES[table], worker_name)

    def read(self, table: str, columns: Sequence[str] | None = None) -> TableRead:
        """A table with the parts that it came from and what was torn; in the order in which it was written."""
        return read_table(self.path / table, TABLES[table], columns)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a table (requests sorted by index), or the columns named."""
        table = self.read(name, columns).table
        if name == "requests" and "index" in table.column_names and table.num_rows:
            index = table.column("index").to_numpy()
            if (index[1:] < index[:-1]).any():
                table = table.take(pc.sort_indices(table, sort_keys=[("index", "ascending")]))
        return table

    def compact(self) -> bool:
        """Gather the parts of every table into one Parquet file each; false if all was done.

        Texts stay by ``keep_text``, and what a server that is not ours told of its phases goes into the rows' columns.

        Only for a bundle whose writers are closed or dead.  UserError on a full disk: then the parts are still there.
        """
        from telemetry.adapters.accounts import filler  # reads bundles itself

        keep = self.manifest.get("plan", {}).get("keep_text", KEEP_WRONG)
        fill = filler(self)
        done = False

        def of_requests(rows: pa.Table) -> pa.Table:
            rows = rows if fill is None else fill(rows)
            return rows if keep == KEEP_ALL else _with_texts_dropped(rows, keep)

        for name, schema in TABLES.items():
            if (self.path / name).is_dir():
                done = compact(self.path / name, schema, of_requests if name == "requests" else None) or done
        return done

    def verdicts(self, slo: Slo, columns: Sequence[str] | None = None) -> pa.Table:
        """The verdicts under an SLO (schema outcomes.VERDICTS, or the columns named); kept beside the facts once the
        run is over."""
        cache = self.path / f"verdicts-{slo.hash[:12]}.parquet"
        basis = self._basis()
        if self.status != RUNNING and cache.is_file():
            with pq.ParquetFile(cache) as file:
                if (file.metadata.metadata or {}).get(_BASIS_KEY) == basis:
                    return file.read(columns=columns)
        table = outcomes.judge(
            self.table("requests", outcomes.columns(slo)),
            slo,
            self.scheduled,
            self.status,
            workers_lost=bool(validity.lost_workers(self.manifest)),
            stalls=outcomes.stall_windows(self.table("series")),
            checks=self.checks(),
        )
        if self.status != RUNNING and os.access(self.path, os.W_OK):
            sink = pa.BufferOutputStream()
            pq.write_table(table.replace_schema_metadata({_BASIS_KEY: basis}), sink, compression="zstd")
            write_atomically(cache, sink.getvalue().to_pybytes())
        return table if columns is None else table.select(columns)

    def add_checks(self, name: str, table: pa.Table) -> None:
        """Keep what a check found of answers (schema outcomes.CHECKS), beside the facts, in place of its last finding.

        ValueError for another schema, or a name that is none (lower-case letters, digits, ``_`` and ``-``).
        """
        if not re.fullmatch(r"[a-z0-9_-]+", name) or not table.schema.equals(outcomes.CHECKS):
            raise ValueError(f"checks {name!r} with columns {table.schema.names}: see outcomes.CHECKS")
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_atomically(self.path / f"checks-{name}.parquet", sink.getvalue().to_pybytes())

    def checks(self) -> pa.Table:
        """All findings on answers that were added (schema outcomes.CHECKS); empty where none was."""
        found = [pq.read_table(file).cast(outcomes.CHECKS) for file in sorted(self.path.glob("checks-*.parquet"))]
        return pa.concat_tables([outcomes.CHECKS.empty_table(), *found])

    @property
    def scheduled(self) -> int:
        """Requests in the schedule; of a bundle that does not say, the rows there are."""
        stated = self.manifest.get("scheduled")
        return int(stated) if stated is not None else self.table("requests", ["index"]).num_rows

    def repair(self) -> bool:
        """Bring a bundle whose writer died into the state of a finished one, marked incomplete; false: it was.

        Compacts what is there, counts rows and torn bytes, and judges the run.  Idempotent.  UserError while the writer
        still lives.
        """
        if self.status == RUNNING and self.writer_alive():
            raise UserError(
                f"run {self.run_id} is still being written by process {self.manifest['writer']['pid']}",
                where=str(self.path),
                remedy="wait for its end, or stop it with Ctrl-C, which leaves a readable bundle",
            )
        for prepare in BEFORE_REPAIR:
            prepare(self.path)
        compacted = self.compact()
        if not compacted and self.status != RUNNING and "validity" in self.manifest:
            return False
        status = INCOMPLETE if self.status == RUNNING else self.status
        policy = of_manifest(self.manifest)
        found = self.read("requests", [*outcomes.columns(policy), "sent_s"])
        manifest = {**self.manifest, "status": status}
        judged = validity.assess(found.table, manifest, policy)
        self.update(
            status=status,
            validity=judged.to_dict(),
            repaired={"rows": found.table.num_rows, "torn_bytes": found.torn_bytes, "unix_ns": time.time_ns()},
        )
        return True

    def _basis(self) -> bytes:
        """What verdicts rest on: the sizes of the parts, the schedule and how the run ended."""
        tables = ("requests", "series")
        parts = sorted(
            (f"{p.parent.name}/{p.name}", p.stat().st_size) for t in tables for p in self.path.glob(f"{t}/*.*")
        )
        lost = validity.lost_workers(self.manifest)
        checks = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(self.path.glob("checks-*.parquet"))]
        basis = [JUDGE_VERSION, self.status, self.manifest.get("scheduled"), lost, parts, *checks]
        return json.dumps(basis).encode()

    def closing(self) -> bool:
        """Whether the run is over, and its writer is still gathering the parts and judging it."""
        over = self.status != RUNNING and "validity" not in self.manifest
        return over and any(self.path.glob("*/*.arrow")) and self.writer_alive()

    def writer_near(self) -> bool:
        """Whether the process that created this bundle was on this host, so that one can see whether it lives."""
        host = self.manifest.get("writer", {}).get("host")
        return host is None or host == socket.gethostname()

    def writer_alive(self) -> bool:
        """Whether the process that created this bundle still runs.

        On another host, or in another container, it cannot be looked for: there it lives while it writes, which a run
        does every second from its start to its end.
        """
        writer = self.manifest.get("writer", {})
        pid = writer.get("pid")
        if not isinstance(pid, int):
            return False
        if writer.get("host") != socket.gethostname():
            written = (file.stat().st_mtime for file in self.path.glob("*/*") if file.is_file())
            newest_s = max(written, default=(self.path / MANIFEST).stat().st_mtime)
            return time.time() - newest_s < ELSEWHERE_S
        started = _process_start(pid)
        # A minute's tolerance: the start is derived from the wall clock, which may be set while a run goes.
        return started is not None and abs(started - float(writer.get("started") or 0)) < 60


def _with_texts_dropped(rows: pa.Table, keep: str) -> pa.Table:
    position = rows.column_names.index("text")
    nulls = pa.nulls(rows.num_rows, pa.string())
    if keep == KEEP_WRONG:
        wrong = pa.array(hard_checks.failures(rows) >= 0)
        complete = pc.is_null(rows.column("error"))
        kept = pc.or_(pc.and_(complete, wrong), pc.is_valid(rows.column("canary_kind")))
        return rows.set_column(position, "text", pc.if_else(kept, rows.column("text"), None))
    return rows.set_column(position, "text", nulls)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except OSError as problem:
        raise UserError(
            f"cannot be read: {problem.strerror}", where=str(file), remedy="tailspan runs list"
        ) from problem
    except ValueError as problem:
        raise UserError(
            f"not JSON: {problem}", where=str(file), remedy="restore it from a copy of the bundle"
        ) from problem
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise UserError("not a manifest of tailspan: no schema_version", where=str(file), remedy="tailspan runs list")
    if version > SCHEMA_VERSION:
        raise UserError(
            f"written with schema version {version}; this version of tailspan reads up to {SCHEMA_VERSION}",
            where=str(file),
            remedy="use the version of tailspan named in it under versions, or a newer one",
        )
    return dict(manifest)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): "(removed)"
            if str(key).lower().replace("-", "_") in _SECRET_KEYS and item
            else _without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    raise TypeError(f"{type(value).__name__} in a manifest")


def _process_start(pid: int) -> float | None:
    """Creation time of a process, so that a reused pid is not taken for the writer; None when it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None
