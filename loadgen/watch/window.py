"""One window of production: an open bundle into which spans, metrics and canaries go, until it is closed and judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from loadgen.finish import versions
from loadgen.scrape import Scraper
from loadgen.watch.production import is_request, row_of
from loadgen.way import DIRECT, Way
from telemetry.bundle import COMPLETE, Bundle
from telemetry.part_writer import PartWriter
from telemetry.receiver import Receiver
from telemetry.slo import Slo
from telemetry.summary import Summary, summarize

WATCH: Final = "watch"  # key of the manifest that says: a window of production, no run


class OpenWindow:
    """Rows of the current window.  zero_unix_ns: its first moment; all times in it are seconds after that.

    Must always hold: every span that the receiver took is in the window that was open then; a request has one row.
    """

    def __init__(
        self,
        root: Path,
        target: str,
        slo: Slo,
        receiver: Receiver,
        *,
        zero_unix_ns: int,
        zero_ns: int,
        server: Mapping[str, Any],
        headers: Mapping[str, str],
        way: Way = DIRECT,
        metrics_path: str = "/metrics",
        scrape_s: float = 5.0,
        after: Mapping[str, int] | None = None,
    ) -> None:
        self.target, self.slo, self.zero_unix_ns = target, slo, zero_unix_ns
        self.bundle = Bundle.create(
            root,
            {"keep_text": "none"},
            name="watch",
            command="tailspan watch",
            slo=slo.manifest_entry(),
            versions=versions(),
            clock={"zero_monotonic_ns": zero_ns, "zero_unix_ns": zero_unix_ns},
            trace={"name": "production"},
            targets=[target],
            server={target: dict(server)},
            open_loop=True,
            simulated=server.get("simulated"),
            **{WATCH: True},
        )
        self.rows = 0
        self._requests: PartWriter = self.bundle.writer("requests", "watch")
        receiver.switch(self.bundle.path / "spans")
        paths = {target: metrics_path}
        self._scraper = Scraper(self.bundle, [target], headers, zero_ns, way, paths, interval_s=scrape_s, after=after)
        self._scraper.start()

    def take(self, spans: Sequence[Mapping[str, Any]], canaries: frozenset[str]) -> list[dict[str, Any]]:
        """Write the rows of requests among spans; gives them.  canaries: traces that are our own questions."""
        found = []
        for span in spans:
            if not is_request(span) or span["trace_id"] in canaries:
                continue
            parsed = {**span, "attributes": json.loads(span["attributes"] or "{}")}
            found.append(row_of(parsed, self.rows, self.target, self.zero_unix_ns))
            self.rows += 1
        if found:
            self._requests.append(found)
            self._requests.flush()
        return found

    def add(self, row: dict[str, Any]) -> None:
        """Write one row of our own (a canary); its index is given here."""
        self._requests.append({**row, "index": self.rows})
        self._requests.flush()
        self.rows += 1

    def hush(self) -> dict[str, int]:
        """Scrape once more and no more; the newest steps that were read."""
        self._scraper.stop()
        return self._scraper.last_steps

    def close(self, length_s: float) -> Summary:
        """Gather its parts and judge it; it was hushed before."""
        self._requests.close()
        self.bundle.update(
            status=COMPLETE,
            scheduled=self.rows,
            length_s=length_s,
            workers=[{"name": "watch", "status": "ok"}],
        )
        self.bundle.compact()
        summary = summarize(self.bundle, self.slo)
        self.bundle.update(validity=summary.validity.to_dict())
        return summary


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # compacted between listing and looking
            continue
    return total
