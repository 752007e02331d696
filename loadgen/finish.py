"""After the last answer: client spans, compaction, the verdict.

The server's last spans may still be on their way when its last answer is there; they are waited for, briefly.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from telemetry.bundle import Bundle
from telemetry.receiver import Receiver
from telemetry.slo import Slo
from telemetry.spans import emit_client_spans, tracer_provider
from telemetry.summary import Summary, summarize

SERVICE: Final = "tailspan-loadgen"
QUIET_S: Final = 1.0  # no new span for this long: all have come (an exporter sends at least every 0.5 s)
LIMIT_S: Final = 5.0
_PACKAGES: Final = ("tailspan", "locust", "numpy", "pyarrow", "tokenizers", "uvloop", "httptools")


def versions() -> dict[str, str]:
    """Of Python and of what a run's figures rest on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def close_spans(bundle: Bundle, receiver: Receiver, *, quickly: bool) -> dict[str, Any]:
    """Wait for the server's last spans, add the client spans of sampled rows, stop receiving.  Returns the counts."""
    sent = 0
    if receiver.spans and not quickly:
        _settle(receiver)
    if bundle.manifest.get("clock"):
        provider = tracer_provider(SERVICE, receiver.url)
        sent = emit_client_spans(_sampled(bundle), bundle.manifest, provider)
        provider.close()
    receiver.stop()
    forwarded = {} if receiver.forward is None else {"forwarded": receiver.forward.to_dict()}
    return {"received": receiver.spans, "refused_payloads": receiver.bad, "client": sent, **forwarded}


def _sampled(bundle: Bundle) -> Iterator[dict[str, Any]]:
    import pyarrow.compute as pc

    table = bundle.table("requests")
    if table.num_rows:
        skipped = {"chunk_s", "chunk_tokens", "text"}
        table = table.filter(pc.fill_null(table.column("sampled"), False))
        table = table.select([name for name in table.column_names if name not in skipped])
    for batch in table.to_batches(max_chunksize=1024):
        yield from batch.to_pylist()


def _settle(receiver: Receiver) -> None:
    """Wait until no span has come for QUIET_S."""
    end = time.monotonic() + LIMIT_S
    seen, since = receiver.spans, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < QUIET_S:
        time.sleep(0.1)
        if receiver.spans != seen:
            seen, since = receiver.spans, time.monotonic()


def judge(bundle: Bundle, slo: Slo) -> Summary:
    """Gather the parts and judge the run; its validity goes into the manifest."""
    bundle.compact()
    summary = summarize(bundle, slo)
    bundle.update(validity=summary.validity.to_dict())
    return summary
