"""Text Generation Inference: metrics ``tgi_…``; its times of a request stand in headers of whole answers only.

A streamed answer has its head before there is anything to tell, so a streamed run has means alone
(router/src/server.rs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from telemetry import names
from telemetry.adapters.adapter import DURATION, Account, Adapter, Mean, histogram, seconds

_PREFILL: Final = "a mean over batches, not requests: a request waits for the prefill of its whole batch"
_INFERENCE: Final = "the prefill, which the headers do not tell apart"


def of_headers(headers: Mapping[bytes, bytes]) -> Account | None:
    """Validation, queue and inference of a whole answer (ms in the headers); None where they are missing."""
    told = {}
    keys = {names.TOKENIZE: b"x-validation-time", names.QUEUE: b"x-queue-time", names.DECODE: b"x-inference-time"}
    for phase, key in keys.items():
        try:
            value = seconds(float(headers[key]))
        except (KeyError, ValueError):
            return None
        if value is None:
            return None
        told[phase] = value / 1e3
    return {**told, DURATION: sum(told.values())}


_BATCH: Final = Mean(
    names.PREFILL,
    "tgi_batch_forward_duration_sum",
    "tgi_batch_forward_duration_count",
    {"method": "prefill"},
    per="batch",
    contains=_PREFILL,
)
ADAPTER: Final = Adapter(
    name="tgi",
    title="TGI",
    prefixes=("tgi_",),
    version=("/info", "version"),
    means=(
        histogram(names.TOKENIZE, "tgi_request_validation_duration"),
        histogram(names.QUEUE, "tgi_request_queue_duration"),
        _BATCH,
        Mean(
            names.DECODE,
            "tgi_request_inference_duration_sum",
            "tgi_request_inference_duration_count",
            minus=_BATCH,
            contains="the inference time less the mean prefill of a batch",
        ),
    ),
    pressure={"running": "tgi_batch_current_size", "waiting": "tgi_queue_size"},
    of_headers=of_headers,
    contains={names.DECODE: _INFERENCE, names.TOKENIZE: "checks of the request"},
    hint="its times of single requests come with answers that are not streamed",
)
