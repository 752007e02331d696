"""What one worker is asked to send: the calls in schedule order and the settings they share.

The planning half of the generator builds these; the sender process reads them.  Neither knows anything else of the
other.  A `Call` is complete: its body is the exact bytes that go on the wire.
Secrets live in `SendSettings.headers` alone, which is never printed and never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from loadgen.patience import Patience
from loadgen.way import Way

#: What text of the answers is kept: none (it never reaches the disk); that of wrong answers and canaries (which these
#: are is known when the parts of a bundle are compacted; until then the rows hold all); all.
KEEP_TEXT: Final = ("none", "wrong", "all")


@dataclass(slots=True)  # frozen would double the time to make one; nothing changes it all the same
class Call:
    """One logical request.  Times are seconds after the run's zero; trace_id and span_id lower-case hex (32, 16)."""

    index: int  # position in the whole schedule, 0-based, over all workers
    trace_row: int  # data row of the trace file, 0-based
    klass: str
    intended_s: float
    body: bytes  # JSON, ready to send
    path: str  # below the target's base, "/v1/chat/completions"
    input_tokens: int
    expected_output_tokens: int
    prompt_tokens_expected: int
    trace_id: str
    span_id: str
    sampled: bool
    canary_kind: str | None = None
    canary_id: str | None = None  # of the golden
    canary_place: str | None = None  # see loadgen.canaries.mixed
    target: int | None = None  # which of the targets; None: in turn
    expected_answer: str | None = None  # what a right answer contains, where that is known
    input_scripts: frozenset[str] | None = None  # of the prompt; None: its answer may be in any script
    input_script: str | None = None  # of most letters of the prompt
    input_sketch: list[int] | None = None  # see loadgen.textfacts


def after_ns(call: Call) -> int:
    """Its moment in ns after the run's zero."""
    return round(call.intended_s * 1e9)


@dataclass(frozen=True, slots=True)
class SendSettings:
    """How every call of a worker is sent.  Timeouts run from the start of work on a call (connecting: by itself)."""

    targets: tuple[str, ...]  # base URLs, asked in turn by call index
    model: str | None = None  # the name that the bodies ask for
    headers: dict[str, str] = field(default_factory=dict, repr=False)  # may hold the API key
    connect_timeout_s: float = 10.0
    first_token_timeout_s: float = 120.0
    total_timeout_s: float = 600.0
    max_concurrency: int | None = None  # more wait on our side; the run is then not open loop
    line_limit: int = 1 << 20  # bytes of one SSE line or one HTTP header
    body_limit: int = 64 << 20  # bytes of one answer
    flush_s: float = 0.1  # between writes of what has ended
    keep_text: str = "wrong"  # one of KEEP_TEXT
    tokenizer_ref: str = ""  # model whose tokenizer counts the answers; "": no count of our own
    patience: Patience | None = None  # None: one attempt, as long as the timeouts allow
    retry_seed: int = 0  # of the jitter in the pauses
    proxy: str | None = field(default=None, repr=False)  # URL of an HTTP proxy; may hold its password
    ca_file: str | None = None  # certificates to trust instead of the system's
    verify_tls: bool = True

    @property
    def way(self) -> Way:
        """How the targets are reached."""
        return Way(self.proxy, self.ca_file, self.verify_tls)


class CallSource(Protocol):
    """The calls of one worker, in schedule order, each made when it is asked for: a day of load fits no memory."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Call]: ...
