"""Reads each target while the run goes: /metrics every second into `series`, the step log into `steps`.

A thread of the parent owns both writers.  Must always hold: a target that is slow, gone or speaks another language
costs the run nothing; what was read is on disk within a second, so that a killed engine keeps most of its steps.
Histogram buckets are kept from the first and the last scrape only: they are cumulative, and they are most of the rows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from loadgen.preflight import get
from loadgen.way import DIRECT, Way
from telemetry.bundle import Bundle
from telemetry.schema import STEPS

INTERVAL_S: Final = 1.0
STEPS_INTERVAL_S: Final = 3.0
TIMEOUT_S: Final = 2.0
GENERATOR: Final = "generator"
_STEP_COLUMNS: Final = frozenset(STEPS.names)


def newest_steps(targets: Sequence[str], headers: Mapping[str, str], way: Way = DIRECT) -> dict[str, int]:
    """The number of each target's newest step, so that what it did before a run is none of it; -1 where it has none."""
    found = {}
    for target in dict.fromkeys(targets):
        try:
            status, body = get(f"{target}/debug/steps?newest=1", headers, TIMEOUT_S, way)
            with pa.ipc.open_stream(body) as stream:
                numbers = stream.read_all().column("step").to_pylist() if status == 200 else []
        except (OSError, pa.ArrowInvalid, ValueError, KeyError):
            numbers = []
        found[target] = max(numbers, default=-1)
    return found


class Scraper:
    """Scrapes until stop().  zero_ns: the run's zero on the monotonic clock.  failures: target -> scrapes in vain.

    paths: where a target serves its metrics, where that is not /metrics.  interval_s: between two scrapes.
    after: the newest step of a target that is none of this run's (``newest_steps``); without it all that it keeps are
    read.
    """

    def __init__(
        self,
        bundle: Bundle,
        targets: Sequence[str],
        headers: Mapping[str, str],
        zero_ns: int,
        way: Way = DIRECT,
        paths: Mapping[str, str] | None = None,
        interval_s: float = INTERVAL_S,
        after: Mapping[str, int] | None = None,
    ) -> None:
        self._bundle = bundle
        self._way = way
        self._targets = list(dict.fromkeys(targets))
        self._paths = dict(paths or {})
        self._interval_s = interval_s
        self._headers = dict(headers)
        self._zero_ns = zero_ns
        self._lock = threading.Lock()
        self._noted: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._last_step = dict.fromkeys(self._targets, -1) | dict(after or {})
        self._no_steps: set[str] = set()
        self.failures = dict.fromkeys(self._targets, 0)
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def last_steps(self) -> dict[str, int]:
        """The newest step that was read of each target; after stop()."""
        return dict(self._last_step)

    def note(self, **values: float | None) -> None:
        """A sample of the generator itself: metric name -> value; from any thread."""
        t = self._now()
        rows = [
            {"t_s": t, "source": GENERATOR, "name": name, "labels": "{}", "value": float(value)}
            for name, value in values.items()
            if value is not None
        ]
        with self._lock:
            self._noted += rows

    def stop(self) -> None:
        """Read everything once more, then close the tables."""
        self._stop.set()
        self._thread.join()

    def _now(self) -> float:
        return (time.monotonic_ns() - self._zero_ns) / 1e9

    def _run(self) -> None:
        with self._bundle.writer("series", "parent") as series, self._bundle.writer("steps", "parent") as steps:
            due = time.monotonic()
            next_steps = due
            first = True
            while True:
                last = self._stop.wait(max(0.0, due - time.monotonic()))
                due = max(due + self._interval_s, time.monotonic())
                for target in self._targets:
                    series.append(self._metrics(target, buckets=first or last))
                first = False
                with self._lock:
                    noted, self._noted = self._noted, []
                series.append(noted)
                series.flush()
                if last or time.monotonic() >= next_steps:
                    next_steps = time.monotonic() + STEPS_INTERVAL_S
                    for target in self._targets:
                        steps.append(self._steps(target))
                    steps.flush()
                if last:
                    return

    def _metrics(self, target: str, *, buckets: bool) -> list[dict[str, Any]]:
        try:
            status, body = get(target + self._paths.get(target, "/metrics"), self._headers, TIMEOUT_S, self._way)
            t = self._now()
            if status != 200:
                raise ValueError(f"status {status}")
            return [
                {
                    "t_s": t,
                    "source": target,
                    "name": sample.name,
                    "labels": json.dumps(sample.labels, sort_keys=True),
                    "value": float(sample.value),
                }
                for family in text_string_to_metric_families(body.decode("utf-8", "replace"))
                for sample in family.samples
                if not sample.name.endswith("_created") and (buckets or not sample.name.endswith("_bucket"))
            ]
        except (OSError, ValueError):  # gone, slow, or no metrics of this kind
            self.failures[target] += 1
            return []

    def _steps(self, target: str) -> list[dict[str, Any]]:
        """New rows of the step log; a target without one is not asked again."""
        if target in self._no_steps:
            return []
        try:
            status, body = get(
                f"{target}/debug/steps?after={self._last_step[target]}", self._headers, TIMEOUT_S, self._way
            )
            if status != 200:
                self._no_steps.add(target)
                return []
            with pa.ipc.open_stream(body) as stream:
                rows: list[dict[str, Any]] = stream.read_all().to_pylist()
        except OSError:
            return []  # gone or slow: ask again
        except (pa.ArrowInvalid, ValueError):
            self._no_steps.add(target)
            return []
        known = [{key: value for key, value in row.items() if key in _STEP_COLUMNS} for row in rows]
        if known:
            self._last_step[target] = max(int(row["step"]) for row in known)
        return known
