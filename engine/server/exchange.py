"""One request from its head to the last byte of its answer, whatever comes of it.

What must hold: every exchange closes exactly once, with a closed phase clock, one span and one count; an exchange
whose client is gone tells the engine at once, and closes when the engine has let go of it (until then the clock is
the engine's).  ``Books`` balance at all times: received = live + every outcome.

An answer of several choices is several requests of the engine.  Its account is that of the choice that ended last:
the one that the client waited for.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.phase_clock import PhaseClock
from engine.request import ABORT, ERROR, Output, Refusal, Request
from engine.server.choices import Choice
from engine.server.openai_api import ApiError, Call
from engine.server.stream import Mailbox
from telemetry import names

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from engine.core import Engine
    from engine.server.metrics import Metrics
    from engine.server.tracing import RequestTracer

OK_STATUS = 200
CLIENT_GONE = "client_disconnected"


@dataclass(slots=True)
class Books:
    """Counts of exchanges.  outcomes: HTTP status as text, or ``abort`` (client gone).

    refused: requests that came while none were taken, by reason (their outcome is 503); dropped: streams that the
    server gave up, by reason (their outcome is ``abort``).  Written on the event loop, read anywhere by ``read``.
    """

    received: int = 0
    live: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def opened(self) -> None:
        """A request came."""
        with self._lock:
            self.received += 1
            self.live += 1

    def closed(self, outcome: str) -> None:
        """It is over."""
        with self._lock:
            self.live -= 1
            self.outcomes[outcome] += 1

    def turned_away(self, reason: str) -> None:
        """A request came while none were taken."""
        with self._lock:
            self.refused[reason] += 1

    def gave_up(self, reason: str) -> None:
        """The server dropped a stream."""
        with self._lock:
            self.dropped[reason] += 1

    def read(self) -> Books:
        """One moment of them."""
        with self._lock:
            return Books(self.received, self.live, Counter(self.outcomes), Counter(self.refused), Counter(self.dropped))

    def violations(self) -> list[str]:
        """Broken laws, [] when they hold."""
        over = sum(self.outcomes.values())
        return (
            []
            if self.received == self.live + over
            else [f"received {self.received}, but {self.live} live and {over} over"]
        )


@dataclass(frozen=True, slots=True)
class Reporter:
    """Where a closed exchange is reported.  metrics and engine are None until the engine is up."""

    books: Books
    tracer: RequestTracer | None
    metrics: Metrics | None
    engine: Engine | None


class Exchange:
    """State of one request in the server; belongs to the event loop."""

    def __init__(
        self, request_id: str, head_ns: int, reporter: Reporter, span: Span | None, on_close: Callable[[Exchange], None]
    ) -> None:
        self.id = request_id
        self.clock = PhaseClock(head_ns)
        self.call: Call | None = None
        self.choices: list[Choice] = []
        self.mailbox: Mailbox | None = None
        self.error: ApiError | None = None
        self._reporter, self._span, self._on_close = reporter, span, on_close
        self._submitted = False
        self._gone = False
        self._closed = False
        self._gone_why = CLIENT_GONE
        reporter.books.opened()

    # --- on the way ---
    def submit(self, engine: Engine, works: Sequence[Request], mailbox: Mailbox) -> None:
        """Hand it to the engine, one request a choice.  Raises engine.request.Refusal; then nothing of it goes on."""
        self.choices = [Choice(index, work) for index, work in enumerate(works)]
        self.mailbox = mailbox
        for at, work in enumerate(works):
            try:
                engine.submit(work)
            except Refusal:
                for earlier in works[:at]:
                    engine.abort(earlier.id)
                raise
        self._submitted = True

    def part_clock(self, n: int) -> PhaseClock:
        """The clock of one of ``n`` choices: it goes on from here."""
        return self.clock if n == 1 else copy.deepcopy(self.clock)

    def note(self, output: Output) -> Choice:
        """Take the figures of one output over; returns the choice that it is of."""
        choice = self.choices[0]
        if len(self.choices) > 1:
            choice = next(one for one in self.choices if one.work.id == output.request_id)
        choice.note(output)
        if len(self.choices) > 1 and all(one.finish_reason is not None for one in self.choices):
            self.clock = self.slowest.work.clock
        return choice

    def stop_engine(self) -> None:
        """Tell the engine to end what is left of it."""
        if self._reporter.engine is not None:
            for choice in self.choices:
                if choice.finish_reason is None:
                    self._reporter.engine.abort(choice.work.id)

    @property
    def slowest(self) -> Choice:
        """The choice that ended last (the first, while none has); the exchange must have been submitted."""
        return max(self.choices, key=lambda choice: choice.last.t_ns if choice.last is not None else 0)

    @property
    def completion_tokens(self) -> int:
        """Tokens made, of all choices."""
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared; the other choices found what the first computed."""
        return self.choices[0].work.clock.facts.cached_tokens if self.choices else 0

    def fail(self, error: ApiError) -> None:
        """The answer is this error."""
        self.error = error
        if not self._submitted and self.clock.phase != names.SEND:
            self.clock.refused(time.monotonic_ns())

    def sent(self) -> None:
        """The last bytes of the answer proper were written."""
        self.clock.sent(time.monotonic_ns())

    def account(self) -> dict[str, object]:
        """The clock's account as it goes to the client; the clock must be closed."""
        return {"request_id": self.id, **self.clock.account()}

    # --- the end ---
    def abandon(self, error: ApiError | None = None) -> None:
        """Nobody will get an answer: the client is gone, or the server failed (``error``).

        What the engine holds is freed at once, and the exchange closes when it is.  Harmless at any time, in any state.
        """
        if self._closed:
            return
        if self.clock.sent_ns is not None:  # it went after the answer was complete
            self.close()
            return
        self._gone, self.error = error is None, error
        if self._submitted and self.mailbox is not None and not self.mailbox.over:
            self.mailbox.on_over = self._engine_let_go
            self.stop_engine()
            return
        self._engine_let_go()

    def drop(self, reason: str) -> None:
        """The server gives its client up, for a reason of its own."""
        if not self._closed:
            self._reporter.books.gave_up(reason)
            self._gone_why = reason
            self.abandon()

    def _engine_let_go(self) -> None:
        for output in self.mailbox.rest() if self._submitted and self.mailbox is not None else ():
            self.note(output)
        self._close_gone()

    def _close_gone(self) -> None:
        now = time.monotonic_ns()
        if self.clock.phase != names.SEND:
            self.clock.refused(now)
        self.clock.sent(max(now, self.clock.last_token_ns or now))
        self.close()

    def close(self) -> None:
        """Report it, once.  The clock must be closed."""
        if self._closed:
            return
        self._closed = True
        outcome = ABORT if self._gone else str(OK_STATUS if self.error is None else self.error.status)
        books, tracer, metrics, engine = (
            self._reporter.books,
            self._reporter.tracer,
            self._reporter.metrics,
            self._reporter.engine,
        )
        books.closed(outcome)
        sampled = tracer.trace_id(self._span) if tracer is not None and self._span is not None else None
        last = self.slowest if self.choices else None
        work = last.work if last is not None else None
        if metrics is not None:
            finish = last.finish_reason if last is not None else None
            if finish is None and self._submitted:
                finish = ABORT if self._gone else ERROR
            made = last.token_ns if last is not None else []
            metrics.request_over(self.clock, finish, made, sampled, self._prediction_error_s())
        if tracer is not None and self._span is not None:
            first = self.clock.facts.step_first
            steps = engine.steps.since(first - 1) if engine is not None and sampled is not None and first >= 0 else ()
            tracer.close(self._span, self.clock, self._attributes(), error=self._failure(), steps=steps, work=work)
        self._on_close(self)

    def _failure(self) -> tuple[str, str] | None:
        if self._gone:
            if self._gone_why != CLIENT_GONE:
                return self._gone_why, "the server gave the stream up"
            return CLIENT_GONE, "the client went away before the answer was complete"
        if self.error is not None:
            return self.error.code or str(self.error.status), self.error.message
        return None

    def _prediction_error_s(self) -> float | None:
        if not self.choices:
            return None
        work, first = self.choices[0].work, self.choices[0].work.clock.first_token_ns
        if work.predicted_ttft_ns is None or first is None:
            return None
        return abs(first - work.arrived_ns - work.predicted_ttft_ns) / 1e9

    def _attributes(self) -> dict[str, AttributeValue]:
        found: dict[str, AttributeValue] = {names.ATTR_RESPONSE_ID: self.id}
        if not self._gone:
            found[names.ATTR_HTTP_STATUS] = OK_STATUS if self.error is None else self.error.status
        if self.call is not None:
            found[names.ATTR_REQUEST_MODEL] = self.call.model
            found[names.ATTR_TEMPERATURE] = self.call.temperature
            found[names.ATTR_TOP_P] = self.call.top_p
            found[names.ATTR_TOP_K] = self.call.top_k
            if self.call.max_tokens is not None:
                found[names.ATTR_MAX_TOKENS] = self.call.max_tokens
            if self.call.seed is not None:
                found[names.ATTR_SEED] = self.call.seed
            used: dict[str, AttributeValue] = {
                "n": self.call.n,
                "response_format": self.call.response_format,
                "echo": self.call.echo,
            }
            found.update({names.ATTR_SAMPLING_PREFIX + key: value for key, value in used.items()})
        if self.choices:
            found[names.ATTR_INPUT_TOKENS] = len(self.choices[0].work.prompt_ids)
            found[names.ATTR_OUTPUT_TOKENS] = self.completion_tokens
        reasons = [choice.finish_reason for choice in self.choices if choice.finish_reason is not None]
        if reasons:
            found[names.ATTR_FINISH_REASONS] = reasons
        if self._submitted and self._reporter.engine is not None:
            found[names.ATTR_RESPONSE_MODEL] = self._reporter.engine.model.name
        return found
