"""One request from its head to the last byte of its answer, whatever comes of it.

What must hold: every exchange closes exactly once, with a closed phase clock, one span and one count; an exchange
whose client is gone tells the engine at once, and closes when the engine has let go of it (until then the clock is
the engine's).  ``Books`` balance at all times: received = live + every outcome.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from engine.phase_clock import PhaseClock
from engine.request import ABORT, ERROR, Output, Request
from engine.server.openai_api import ApiError, Call
from engine.server.stream import Mailbox
from engine.server.tracing import RequestTracer, trace_id
from telemetry import names

if TYPE_CHECKING:
    from engine.core import Engine
    from engine.server.metrics import Metrics

OK_STATUS = 200
CLIENT_GONE = "client_disconnected"


@dataclass(slots=True)
class Books:
    """Counts of exchanges.  outcomes: HTTP status as text, or ``abort`` (client gone)."""

    received: int = 0
    live: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

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
        self.work: Request | None = None
        self.mailbox: Mailbox | None = None
        self.completion_tokens = 0
        self.token_ns: list[int] = []
        self.finish_reason: str | None = None
        self.error: ApiError | None = None
        self._reporter, self._span, self._on_close = reporter, span, on_close
        self._submitted = False
        self._gone = False
        self._closed = False
        reporter.books.received += 1
        reporter.books.live += 1

    # --- on the way ---
    def submit(self, engine: Engine, work: Request, mailbox: Mailbox) -> None:
        """Hand it to the engine.  Raises engine.request.Refusal; then the engine kept nothing."""
        self.work, self.mailbox = work, mailbox
        engine.submit(work)
        self._submitted = True

    def note(self, output: Output) -> None:
        """Take the figures of one output over."""
        if output.token_ids:
            self.completion_tokens += len(output.token_ids)
            self.token_ns.append(output.t_ns)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared."""
        return self.clock.facts.cached_tokens

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
            if self._reporter.engine is not None:
                self._reporter.engine.abort(self.id)
            return
        self._close_gone()

    def _engine_let_go(self, output: Output) -> None:
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
        books.live -= 1
        books.outcomes[outcome] += 1
        sampled = None if self._span is None else trace_id(self._span)
        if metrics is not None:
            finish = self.finish_reason
            if finish is None and self._submitted:
                finish = ABORT if self._gone else ERROR
            metrics.request_over(self.clock, outcome, finish, self.token_ns, sampled)
        if tracer is not None and self._span is not None:
            first = self.clock.facts.step_first
            steps = engine.steps.since(first - 1) if engine is not None and sampled is not None and first >= 0 else ()
            tracer.close(self._span, self.clock, self._attributes(), error=self._failure(), steps=steps, work=self.work)
        self._on_close(self)

    def _failure(self) -> tuple[str, str] | None:
        if self._gone:
            return CLIENT_GONE, "the client went away before the answer was complete"
        if self.error is not None:
            return self.error.code or str(self.error.status), self.error.message
        return None

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
        if self.work is not None:
            found[names.ATTR_INPUT_TOKENS] = len(self.work.prompt_ids)
            found[names.ATTR_OUTPUT_TOKENS] = self.completion_tokens
        if self.finish_reason is not None:
            found[names.ATTR_FINISH_REASONS] = [self.finish_reason]
        if self._submitted and self._reporter.engine is not None:
            found[names.ATTR_RESPONSE_MODEL] = self._reporter.engine.model.name
        return found
