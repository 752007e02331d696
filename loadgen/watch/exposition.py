"""The verdicts of a watch on /metrics, for alerts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from models.errors import UserError
from telemetry import names
from telemetry.objective import BROKEN, HELD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadgen.watch.watch import Watch


class Exposition:
    """Serves on 127.0.0.1 (or ``host``) until closed; port 0: any free one.  Raises UserError when it is taken."""

    def __init__(self, watch: Watch, port: int, host: str = "127.0.0.1") -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(watch))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}",
                where="--metrics-port",
                remedy="name a free port, or 0 for any",
            ) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        """What the watch knows now."""
        watch = self._watch
        look = watch.look
        breach = watch.breaches.now
        yield _gauge(
            names.M_WATCH_BREACH, "1 while the SLO is broken, by looks or by canaries", float(breach is not None)
        )
        yield _gauge(names.M_WATCH_REQUESTS, "Requests in the last look", float(look.requests if look else 0))
        yield _gauge(names.M_WATCH_SILENCE, "Seconds since the last span of a request came", watch.silence_s)
        yield _gauge(names.M_WATCH_DISK, "Bytes of closed windows", float(watch.retention.bytes))
        yield _gauge(names.M_WATCH_WINDOWS, "Closed windows on disk", float(len(watch.retention.windows)))
        count = CounterMetricFamily(names.M_WATCH_BREACHES, "Breaches called since the start")
        count.add_metric([], watch.breaches.count)
        yield count
        held = GaugeMetricFamily(
            names.M_WATCH_HOLDS, "1: the objective holds, 0: broken, NaN: undecided", labels=["objective"]
        )
        value = GaugeMetricFamily(names.M_WATCH_VALUE, "What was measured in the last look", labels=["objective"])
        for one in look.objectives if look else ():
            text = one.objective.text
            held.add_metric([text], {HELD: 1.0, BROKEN: 0.0}.get(one.verdict, float("nan")))
            if one.value is not None:
                value.add_metric([text], one.value)
        yield held
        yield value
        labels = GaugeMetricFamily(names.M_WATCH_LABELS, "Requests of the last look by verdict", labels=["outcome"])
        for name, number in (look.labels if look else {}).items():
            labels.add_metric([name], number)
        yield labels
        if watch.canaries is not None:
            asked = CounterMetricFamily(names.M_WATCH_CANARIES, "Canaries asked, by result", labels=["result"])
            for name, number in watch.canaries.counts.items():
                asked.add_metric([name], number)
            yield asked


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
