"""Server-sent events, read to the letter of the WHATWG HTML standard (section 9.2.6), from bytes cut anywhere.

Owns: turning the bytes of one stream into events.  Must always hold: the events do not depend on where the bytes were
cut; a line ends at CR, LF or CRLF; one leading BOM is dropped; an event that no blank line ended is not dispatched
(the standard discards it; `pending` shows it, so that the caller may decide after a clean end).  Work is done by
`bytes.split` and `bytes.replace`, never per character, and a line that arrives in many pieces is joined once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_BOM: Final = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One dispatched event.  `data` has its lines joined with LF; bytes that are not UTF-8 read as U+FFFD."""

    data: str
    type: str = "message"
    last_id: str = ""


class LineTooLongError(ValueError):
    """A line, or the data of one event, is longer than the limit allows; the stream cannot be read further."""


class SseReader:
    """Feed it the bytes of one stream as they come.

    `retry_ms` is the last reconnection time the server asked for (None: it did not); `last_id` the last event id.
    """

    __slots__ = (
        "_data",
        "_data_size",
        "_head",
        "_limit",
        "_parts",
        "_parts_size",
        "_skip_lf",
        "_type",
        "last_id",
        "retry_ms",
    )

    def __init__(self, line_limit: int = 1 << 20) -> None:
        self.last_id = ""
        self.retry_ms: int | None = None
        self._limit = line_limit
        self._head: bytes | None = b""  # the first bytes, until a BOM is ruled in or out; then None
        self._skip_lf = False  # the last read ended with CR: a LF that follows belongs to it
        self._parts: list[bytes] = []  # pieces of the line that is not complete yet
        self._parts_size = 0
        self._data: list[bytes] = []  # data lines of the event that is not dispatched yet
        self._data_size = 0
        self._type = b""

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes (any number) and return the events they complete.  Raises LineTooLongError."""
        fresh = not (self._head or self._parts or self._data or self._type or self._skip_lf)
        if fresh and len(data) <= self._limit and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            # Most reads are whole events of one data line each: then all line ends are the two behind every line.
            values = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(values) and b"\r" not in data:
                self._head = None
                return [Event(value.decode("utf-8", "replace"), "message", self.last_id) for value in values]
        if self._head is not None:
            data = self._head + data
            if len(data) < 3 and _BOM.startswith(data):
                self._head = data
                return []
            self._head = None
            if data.startswith(_BOM):
                data = data[3:]
        if not data:
            return []
        if self._skip_lf:
            self._skip_lf = False
            if data[0] == 10:
                data = data[1:]
        if b"\r" in data:
            self._skip_lf = data[-1] == 13
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts.clear()
            self._parts_size = 0
        if rest:
            self._parts.append(rest)
            self._parts_size += len(rest)
            if self._parts_size > self._limit:
                raise LineTooLongError(f"a line of more than {self._limit} bytes")
        return self._take(lines) if lines else []

    @property
    def between_events(self) -> bool:
        """Nothing of the next event has come, and no LF of the last one is missing."""
        return not (self._parts or self._data or self._type or self._skip_lf or self._head is not None)

    @property
    def pending(self) -> Event | None:
        """The event that the end of the stream would discard: its data lines so far, an unended line included."""
        values = list(self._data)
        kind = self._type
        if self._parts:
            name, _, value = b"".join(self._parts).partition(b":")
            value = value[1:] if value[:1] == b" " else value
            if name == b"data":
                values.append(value)
            elif name == b"event":
                kind = value
        return self._event(values, kind) if values else None

    def _event(self, values: list[bytes], kind: bytes) -> Event:
        data = (values[0] if len(values) == 1 else b"\n".join(values)).decode("utf-8", "replace")
        return Event(data, kind.decode("utf-8", "replace") if kind else "message", self.last_id)

    def _take(self, lines: list[bytes]) -> list[Event]:
        events: list[Event] = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    events.append(self._event(data, self._type))
                    data.clear()
                    self._data_size = 0
                self._type = b""
            elif len(line) > self._limit:
                raise LineTooLongError(f"a line of {len(line)} bytes; the limit is {self._limit}")
            elif line.startswith(b"data: "):
                if data:
                    self._add(line[6:])
                else:  # the first line of an event is shorter than a line may be
                    data.append(line[6:])
                    self._data_size = len(line) - 5
            else:
                name, _, value = line.partition(b":")
                self._field(name, value[1:] if value[:1] == b" " else value)
        return events

    def _add(self, value: bytes) -> None:
        self._data.append(value)
        self._data_size += len(value) + 1
        if self._data_size > self._limit + 1:
            raise LineTooLongError(f"an event with more than {self._limit} bytes of data")

    def _field(self, name: bytes, value: bytes) -> None:
        if name == b"data":
            self._add(value)
        elif name == b"event":
            self._type = value
        elif name == b"id":
            if b"\0" not in value:
                self.last_id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit() and len(value) < 16:
            self.retry_ms = int(value)
        # A comment has an empty name; any other field is ignored, as the standard asks.
