"""The run while it goes, judged: outcomes by class, reason and replica, as the bundle will say them in the end.

The parent reads the parts that the senders append, batch by batch, judges the new rows by the very function that judges
the bundle, and hands the text of /metrics to the Locust master, which serves it.  Must always hold: a row is counted
once; after `finish` the counters are those of the bundle's verdicts, requests without a row included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from loadgen.progress import Totals
from telemetry import names, outcomes, validity
from telemetry.bundle import Bundle
from telemetry.slo import Slo

METRICS_FILE: Final = "metrics.prom"
Key = tuple[str, str, str, str]  # outcome, reason, class, replica


class RowWatch(Protocol):
    """What is needed of loadgen.canaries.watch.CanaryWatch."""

    def take(self, rows: Iterable[Mapping[str, Any]]) -> None: ...


class Live:
    """Counts the outcomes of a bundle that is being written."""

    def __init__(self, bundle: Bundle, slo: Slo, scheduled: int, watch: RowWatch | None = None) -> None:
        """watch: is shown the rows of canaries as they come."""
        self._watch = watch
        self._bundle = bundle
        self._slo = slo
        self._scheduled = scheduled
        self._parts: dict[Path, _Part] = {}
        self.counts: Counter[Key] = Counter()
        self._bound_s: float | None = None  # of lag, as the run will be judged by

    @property
    def labels(self) -> Counter[str]:
        """Requests by label."""
        found: Counter[str] = Counter()
        for (label, _, _, _), count in self.counts.items():
            found[label] += count
        return found

    def update(self) -> None:
        """Judge the rows that came since the last call."""
        for path in sorted((self._bundle.path / "requests").glob("*.arrow")):
            part = self._parts.setdefault(path, _Part(path))
            for rows in part.new_rows():
                if self._watch is not None:
                    chosen = rows.filter(pc.is_valid(rows.column("canary_kind")))
                    self._watch.take(chosen.to_pylist() if chosen.num_rows else [])
                table = rows.select([*outcomes.columns(self._slo), "replica"]).sort_by("index")
                verdicts = outcomes.judge(table, self._slo, self._scheduled, "running")
                self.counts.update(counted(table, verdicts))
                bound_s = validity.lag_bound(table, self._slo)
                self._bound_s = bound_s if self._bound_s is None else min(self._bound_s, bound_s)

    def finish(self) -> None:
        """Count again from the whole bundle, whose status is final."""
        rows = self._bundle.table("requests", ["index", "class", "replica"])
        self.counts = counted(rows, self._bundle.verdicts(self._slo))

    def exposition(self, totals: Totals) -> bytes:
        """The text of /metrics."""
        registry = CollectorRegistry()
        manifest = self._bundle.manifest
        trace = str((manifest.get("trace") or {}).get("name", ""))
        run = {"run": self._bundle.run_id, "slo": self._slo.name, "trace": trace}
        registry.register(_Collector(self.counts, totals, run, self._bound_s))
        return generate_latest(registry)

    def table(self) -> list[dict[str, Any]]:
        """The counts as rows for Locust's page."""
        columns = ("outcome", "reason", "class", "replica")
        counts = sorted(self.counts.items())
        return [{**dict(zip(columns, key, strict=True)), "requests": count} for key, count in counts]


def counted(rows: pa.Table, verdicts: pa.Table) -> Counter[Key]:
    """Verdicts by label, reason, class and replica; rows: index, class, replica; a request may have none."""
    place = pc.index_in(verdicts.column("index"), rows.column("index").combine_chunks())
    columns = {
        "label": verdicts.column("label"),
        "reason": verdicts.column("reason"),
        "class": rows.column("class").take(place),
        "replica": rows.column("replica").take(place),
    }
    table = pa.table({name: pc.fill_null(column.cast(pa.string()), "") for name, column in columns.items()})
    grouped = table.group_by(list(columns)).aggregate([([], "count_all")])
    return Counter(
        {(row["label"], row["reason"], row["class"], row["replica"]): row["count_all"] for row in grouped.to_pylist()}
    )


class _Part:
    """One growing Arrow stream, read message by message; an unfinished last one is read again later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._schema: pa.Schema | None = None

    def new_rows(self) -> Iterator[pa.Table]:
        try:
            with pa.OSFile(str(self._path)) as file:
                while True:
                    file.seek(self._offset)
                    message = pa.ipc.read_message(file)
                    if self._schema is None:
                        self._schema = pa.ipc.read_schema(message)
                    else:
                        batch = pa.ipc.read_record_batch(message, self._schema)
                        yield pa.Table.from_batches([batch])
                    self._offset = file.tell()
        except (EOFError, OSError, pa.ArrowException):
            return  # the end, for now


class _Collector:
    """The figures of one moment, in the words of telemetry.names."""

    def __init__(self, counts: Counter[Key], totals: Totals, run: dict[str, str], bound_s: float | None) -> None:
        self._counts = counts
        self._totals = totals
        self._run = run
        self._bound_s = bound_s

    def collect(self) -> Iterator[Metric]:
        outcomes_ = CounterMetricFamily(
            names.M_OUTCOMES, "Requests by verdict", labels=("outcome", "reason", "class", "replica")
        )
        for key, count in sorted(self._counts.items()):
            outcomes_.add_metric(key, count)
        yield outcomes_
        info = GaugeMetricFamily(names.M_RUN_INFO, "The run that goes", labels=tuple(self._run))
        info.add_metric(tuple(self._run.values()), 1.0)
        yield info
        totals = self._totals
        counters = {
            names.M_CLIENT_DUE: (totals.due, "Requests whose moment has come"),
            names.M_CLIENT_SENT: (totals.sent, "Requests sent"),
            names.M_CLIENT_RETRIES: (totals.retries, "Attempts beyond the first"),
        }
        for name, (count, what) in counters.items():
            yield CounterMetricFamily(name, what, value=count)
        gauges: dict[str, tuple[float, str]] = {
            names.M_SCHEDULE_LAG: (totals.lag_p99_s, "Begin of work behind the intended send, p99 of the worst worker"),
            names.M_CLIENT_LOOP_LAG: (totals.loop_lag_p99_s, "Lateness of the event loop, p99 of the worst worker"),
            names.M_CLIENT_CPU: (totals.cpu_ratio, "CPU of the busiest sender, in cores"),
            names.M_CLIENT_INFLIGHT: (totals.inflight, "Requests in flight"),
        }
        if self._bound_s is not None:
            what = "p99 of lag beyond which the run is limited by its client"
            gauges[names.M_CLIENT_LAG_BOUND] = (self._bound_s, what)
        for name, (figure, what) in gauges.items():
            yield GaugeMetricFamily(name, what, value=figure)
