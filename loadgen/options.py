"""What one load test is asked to be, by the names of its options; where it comes from is loadgen.plan_file's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from loadgen.arrivals import ArrivalModel
from loadgen.bodies import CHAT
from loadgen.classes import TrafficClass
from loadgen.patience import Patience
from loadgen.traces.trace import Choices

CANARY_SHARE: Final = 0.02  # of the requests, where canaries are named


@dataclass(frozen=True, slots=True)
class Options:
    """None where the default depends on something.  Times are seconds, of trace time for the window."""

    targets: str = ""
    trace: str = "azure-2023-conv"
    slo: str = "chat"
    model: str = "smollm2"
    served_model: str | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    speed: float = 1.0
    rate_scale: float | None = None
    length_scale: float | None = None
    fit: float | None = None
    over_limit: str = "skip"
    dequantise_s: float | None = None
    loop: int = 1
    arrivals: ArrivalModel | None = None
    choices: Choices = field(default_factory=Choices)
    classes: tuple[TrafficClass, ...] = ()
    share_prefixes: bool = True
    patience: Patience | None = None
    api: str = CHAT
    workers: int = 1
    seed: int = 0
    salt: str | None = None
    max_concurrency: int | None = None
    connect_timeout_s: float = 10.0
    first_token_timeout_s: float = 120.0
    total_timeout_s: float = 600.0
    keep_text: str = "wrong"
    canaries: str | None = None  # a canary file; None: none among the load
    canary_share: float = CANARY_SHARE
    exact_output: bool = True
    temperature: float = 1.0
    headers: list[str] = field(default_factory=list)
    api_key_env: str | None = None
    proxy: str | None = None
    ca_file: str | None = None
    verify_tls: bool = True
    otlp_port: int = 4318
    listen: str = "127.0.0.1"  # where spans and /metrics are served
    forward_spans: str | None = None  # OTLP/HTTP collector that gets a copy of every span
    runs: str | None = None
    name: str | None = None
    web_ui: bool = False
    repeats: int = 1
    linger_s: float = 0.0
    metrics_port: int = 0  # 0: a free one
    remote_workers: int = 0  # beside `workers`, on other machines
    bind: str = "127.0.0.1:5557"  # where the master listens for them
    unencrypted: bool = False  # it may be an address of a network
    command: str = ""
