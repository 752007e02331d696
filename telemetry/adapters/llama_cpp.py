"""llama.cpp's server: ``timings`` in the last object of every answer, metrics ``llamacpp:…`` (with --metrics).

``prompt_ms`` is the time of the prompt's own batches, ``predicted_ms`` from then to the last token.  It tells no queue:
what the client waited for the first token beyond prompt_ms and one round trip was spent waiting for a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from telemetry import names
from telemetry.adapters.adapter import Account, Adapter, Mean, seconds

_QUEUE: Final = "HTTP and tokenising; it is the client's time to first token less prompt_ms less one round trip"
_BUSY: Final = "time in which other slots were served by the same batches"


def of_body(found: Mapping[str, Any]) -> Account | None:
    """Prefill and decode from ``timings``; None where there are none."""
    timings = found.get("timings")
    if not isinstance(timings, dict):
        return None
    prompt, predicted = seconds(timings.get("prompt_ms")), seconds(timings.get("predicted_ms"))
    if prompt is None or predicted is None:
        return None
    return {names.PREFILL: prompt / 1e3, names.DECODE: predicted / 1e3}


ADAPTER: Final = Adapter(
    name="llama.cpp",
    title="llama.cpp",
    prefixes=("llamacpp:",),
    owners=("llamacpp", "llama.cpp"),
    servers=("llama.cpp",),
    version=("/props", "build_info"),
    means=(
        Mean(names.PREFILL, "llamacpp:prompt_seconds_total", contains=_BUSY),
        Mean(names.DECODE, "llamacpp:tokens_predicted_seconds_total", contains=_BUSY),
    ),
    pressure={"running": "llamacpp:requests_processing", "waiting": "llamacpp:requests_deferred"},
    of_body=of_body,
    completed=True,
    contains={names.QUEUE: _QUEUE, names.PREFILL: _BUSY, names.DECODE: _BUSY},
    hint="start it with --metrics for its counters; the times of single requests come with every answer",
)
