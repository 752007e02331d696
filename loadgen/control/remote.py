"""Workers on other machines: plan and trace go to them, the parts of their rows come back, over Locust's messages.

Owns both halves.  Must always hold: a byte of a part is written at its own offset and once, so that a message that
comes twice does no harm and a gap is noticed; a worker's rows reach the master within a second of reaching its disk,
and all of them before its last word; the trace that a worker uses has the sha256 of the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

REMOTE_VARIABLE: Final = "TAILSPAN_REMOTE"  # set in a worker that shares no disk with the master
CHUNK: Final = 512 << 10  # bytes of a message
TABLES: Final = ("requests", "attempts")


class PartShipper:
    """The worker's half: what is new in its part files since the last call."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._sent: dict[Path, int] = {}

    def new_pieces(self) -> Iterator[dict[str, Any]]:
        """Pieces of at most CHUNK bytes: table, file name, offset, data."""
        for table in TABLES:
            for path in sorted((self._bundle / table).glob("*.arrow")):
                with path.open("rb") as file:
                    file.seek(self._sent.get(path, 0))
                    while data := file.read(CHUNK):
                        offset = self._sent.get(path, 0)
                        self._sent[path] = offset + len(data)
                        yield {"table": table, "file": path.name, "offset": offset, "data": data}


class PartStore:
    """The master's half: writes pieces into the bundle.  missing: what came beyond a gap, and was not written."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self.missing = 0

    def take(self, piece: dict[str, Any]) -> None:
        """Write one piece at its offset; one that came before is written over with the same bytes."""
        table, name = piece["table"], Path(piece["file"]).name
        if table not in TABLES or not name.endswith(".arrow"):
            self.missing += 1
            return
        path = self._bundle / table / f"remote-{name}"
        path.parent.mkdir(exist_ok=True)
        path.touch(exist_ok=True)
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if piece["offset"] > size:
                self.missing += 1
                return
            file.seek(piece["offset"])
            file.write(piece["data"])


def described(plan: Path, workers: int) -> dict[str, Any]:
    """What a worker is told first: the plan's text, how many workers there are, and the size of the trace."""
    text = plan.read_text(encoding="utf-8")
    return {"text": text, "workers": workers, "trace_bytes": Path(json.loads(text)["trace_path"]).stat().st_size}


def trace_piece(plan: Path, offset: int) -> bytes:
    """CHUNK bytes of the plan's trace."""
    with Path(json.loads(plan.read_text(encoding="utf-8"))["trace_path"]).open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK)


class PlanReceiver:
    """The worker's half: collects the plan and the trace.  `wants` is the next offset, None when all is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: dict[str, Any] = {}
        self._size = 0
        self._trace = folder / "trace"
        self.workers = 0
        self.wants: int | None = 0

    @property
    def plan(self) -> Path:
        return self._folder / "plan.json"

    def take_plan(self, told: dict[str, Any]) -> None:
        """The first message; a trace of this sha256 that lies here already is used."""
        self._plan = json.loads(told["text"])
        self._size = told["trace_bytes"]
        self.workers = told["workers"]
        name = Path(self._plan["trace_path"]).name
        here = [
            Path(part).expanduser() / name for part in os.environ.get("TAILSPAN_TRACES", "").split(os.pathsep) if part
        ]
        found = next((path for path in here if sha256(path) == self._plan["trace_sha256"]), None)
        if found is not None:
            self._finish(found)
        else:
            # The name tells some readers what lies beside it; here nothing does, so it is kept as it is.
            self._trace = self._folder / name
            self._trace.write_bytes(b"")
            self.wants = 0

    def take_piece(self, offset: int, data: bytes) -> str | None:
        """The next piece of the trace.  Returns what is wrong with the whole, None while nothing is."""
        if offset != self.wants:
            return None
        with self._trace.open("ab") as file:
            file.write(data)
        self.wants = offset + len(data)
        if self.wants < self._size and data:
            return None
        if sha256(self._trace) != self._plan["trace_sha256"]:
            return "the trace did not arrive as it was sent"
        self._finish(self._trace)
        return None

    def _finish(self, trace: Path) -> None:
        self.wants = None
        self._plan["trace_path"] = str(trace)
        self.plan.write_text(json.dumps(self._plan), encoding="utf-8")


def sha256(path: Path) -> str | None:
    """Of a file; None where there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
