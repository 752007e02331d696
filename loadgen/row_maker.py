"""Rows of requests that ended, handed on in batches.

Owns what concerns the sending in a row, beside schedule and answer (worker, target, replica, lag, connection), and the
rows that are made and not yet flushed.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from loadgen.job import after_ns
from loadgen.rows import Encoder, request_row
from loadgen.spool import Ended
from loadgen.textfacts import PlainEncoder, leak_counter, text_facts

BATCH_ROWS: Final = 64  # rows to a record batch: some 1 ms of work at most


class RowSink(Protocol):
    """What is needed of telemetry.bundle.PartWriter."""

    def append(self, rows: dict[str, Any], /) -> None: ...
    def flush(self) -> bool: ...


class Tokenizer(Encoder, PlainEncoder, Protocol):
    """What is needed of models.tokenizer.Tokenizer."""

    @property
    def special_texts(self) -> frozenset[str]: ...


class RowMaker:
    """Makes the rows of one worker."""

    def __init__(
        self, sink: RowSink, worker: int, tokenizer: Tokenizer | None, *, model: str | None, keep_text: str
    ) -> None:
        """model: that the bodies ask for.  keep_text: as in the settings of a job."""
        self.zero_ns = 0  # of the run
        self._sink = sink
        self._worker = worker
        self._model = model
        self._tokenizer = tokenizer
        self._count_leaks = leak_counter(tokenizer.special_texts if tokenizer is not None else ())
        self._keep_text = keep_text != "none"  # which texts stay is decided when the verdicts are known
        self._buffered = 0

    @property
    def full(self) -> bool:
        """Enough rows for a batch wait to be flushed."""
        return self._buffered >= BATCH_ROWS

    def make(self, ended: Ended) -> None:
        """The row of a request that ended."""
        call, answer, zero_ns = ended.call, ended.answer, self.zero_ns
        facts = None
        if answer.pieces or answer.failure is None:
            facts = text_facts(answer.text, self._count_leaks, self._tokenizer, answer.pieces, call.input_scripts)
        row = request_row(call, answer, zero_ns, facts, self._tokenizer, self._keep_text)
        row["worker"] = self._worker
        row["model_asked"] = self._model
        row["target"] = ended.target
        row["replica"] = ended.replica
        row["attempts"] = ended.attempts
        if ended.start_ns:
            row["lag_s"] = (ended.first_start_ns - zero_ns - after_ns(call)) / 1e9
            row["sent_s"] = None if ended.sent_ns is None else (ended.sent_ns - zero_ns) / 1e9
            row["connect_s"] = None if ended.connect_ns is None else ended.connect_ns / 1e9
            row["connection_reused"] = ended.reused
        self._sink.append(row)
        self._buffered += 1

    def flush(self) -> None:
        """Hand on what is made.  Raises ValueError for a row that does not fit; the others are written."""
        self._buffered = 0
        self._sink.flush()
