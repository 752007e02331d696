"""What is known of one kind of server: how it is recognised, and which of its figures are which of our phases.

Must always hold: a phase that a server does not tell is never guessed; what a name really contains stands beside it.
The names of a server's metrics, spans and fields are spelled in that server's file and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

#: An account of one request: seconds by phase (telemetry.names.PHASES), and DURATION, the server's whole.
Account = dict[str, float]
DURATION: Final = "duration"
Span = Mapping[str, Any]  # a row of telemetry.schema.SPANS, its attributes parsed


@dataclass(frozen=True, slots=True)
class Mean:
    """Seconds of one phase in the mean over a run: growth of ``total`` over growth of ``count`` (both series).

    labels: that a sample must carry.  count "": the requests of the run.  per: what the mean is over.  minus: a mean
    that is taken off.  contains: what the name holds beside the phase, "" where it is exactly that.
    """

    phase: str
    total: str
    count: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    per: str = "request"
    minus: Mean | None = None
    contains: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One kind of server.

    prefixes: of the names of its metrics.  owners: ``owned_by`` in its model list.  servers: its Server header.
    metrics: where it serves Prometheus text.  version: path and key of its version (JSON).
    means: phases over a run.  pressure: our word -> the gauge or counter that tells it.
    of_spans: the account of a request from the spans of its trace, None where they do not tell.
    of_body, of_headers: seconds by phase from the last JSON object, or from the headers (lower case), of an answer.
    completed: does the queue follow from what the client saw, once of_body has told the rest?
    contains: phase -> what else an account of a request holds under it.  hint: how to get more out of the server.
    """

    name: str
    title: str
    prefixes: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    metrics: str = "/metrics"
    version: tuple[str, str] | None = None
    means: tuple[Mean, ...] = ()
    pressure: Mapping[str, str] = field(default_factory=dict)
    of_spans: Callable[[Sequence[Span]], Account | None] | None = None
    of_body: Callable[[Mapping[str, Any]], Account | None] | None = None
    of_headers: Callable[[Mapping[bytes, bytes]], Account | None] | None = None
    completed: bool = False
    contains: Mapping[str, str] = field(default_factory=dict)
    hint: str = ""


def seconds(value: Any) -> float | None:
    """A finite time of at least 0; else None."""
    fits = type(value) in (int, float) and 0 <= value < 1e9
    return float(value) if fits else None


def histogram(phase: str, name: str, contains: str = "", **labels: str) -> Mean:
    """The mean of a Prometheus histogram that has one entry a request."""
    return Mean(phase, f"{name}_sum", f"{name}_count", labels, contains=contains)


def rest_is_front(phases: Account, duration: float) -> Account | None:
    """Complete an account: what no phase tells is the front end (HTTP, tokeniser, detokeniser), kept under ingress.

    None where the phases are longer than the whole by more than 1 ms: then they overlap, and no split is true.
    """
    rest = duration - sum(phases.values())
    if rest < -1e-3:
        return None
    whole = {**phases, "ingress": phases.get("ingress", 0.0) + max(0.0, rest)}
    return {**whole, DURATION: sum(whole.values())}
