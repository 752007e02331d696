"""A lean HTTP/1.1 client for streams: one asyncio protocol on httptools; ``loadgen.pool`` opens and keeps connections.

What comes is read by ``loadgen.reads`` where that can be, else by the transport; both are heard alike.

Owns a connection: writing one request, cutting the answer's bytes out of HTTP, giving itself back for the next.  Must
always hold: one stamp (CLOCK_MONOTONIC, ns) per read, and it belongs to every byte of that read; a listener hears
exactly one end (`on_complete` or `on_failure`) unless it let go (`release`, `cut`); a connection goes back to the pool
only after its answer was read whole and both sides agreed to keep it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, cast
from urllib.parse import unquote, urlsplit

import httptools

from loadgen.due import Due
from loadgen.reads import Known, Reads
from models.errors import UserError

# What `Listener.on_failure` is told.
CLOSED: Final = "closed"  # the connection went away
PROTOCOL: Final = "protocol"  # not HTTP, or beyond a limit


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a target URL points: `base` is the path before the API's own, without a final slash."""

    url: str
    tls: bool
    host: str
    port: int
    base: str
    authorization: tuple[str, ...] = field(default=(), repr=False)  # header lines that a proxy wants

    @classmethod
    def of_proxy(cls, url: str) -> Origin:
        """Where a proxy URL points; user and password become its header.  Raises UserError, which shows neither."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UserError("this is no HTTP proxy", where="--proxy", remedy="write http://proxy:3128")
        lines: tuple[str, ...] = ()
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            lines = (f"Proxy-Authorization: Basic {base64.b64encode(secret).decode()}",)
        return cls("the proxy", False, parts.hostname, parts.port or 3128, "", lines)

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read an http(s) URL.  Raises UserError on anything else, and on a user name in it."""
        remedy = "give a base URL such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UserError(f"{error}", where=f"target {url!r}", remedy=remedy) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError("not an http or https URL", where=f"target {url!r}", remedy=remedy)
        if parts.username or parts.password:
            raise UserError("credentials in a target URL", where="target", remedy="pass them as a header")
        if parts.query or parts.fragment or any(ch <= " " or ch == "\x7f" for ch in url):
            raise UserError("a base URL has no query, fragment or blank", where=f"target {url!r}", remedy=remedy)
        tls = parts.scheme == "https"
        return cls(url, tls, parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def behind(self, proxy: Origin | None) -> str:
        """What a request line needs ahead of its path: the whole address where a proxy reads it."""
        return f"http://{self.authority}" if proxy is not None and not self.tls else ""

    def path(self, path: str) -> str:
        """The request path of an API path; a base that already ends in /v1 takes no second one."""
        base = self.base
        if base.endswith("/v1") and path.startswith("/v1/"):
            base = base[:-3]
        return base + path


class Usual(Known, Protocol):
    """What takes whole HTTP chunks with an event that is known but for its text."""

    def take(self, data: bytes, now_ns: int) -> int:
        """Shown a read that begins between two chunks: how many bytes of body it took, 0 for none of it."""

    def take_stored(self, stamps: list[int], texts: list[str]) -> None:
        """Such events that came, in their order."""


class Listener(Protocol):
    """Who hears an answer.  Header names are lower case; the body of one read comes at once."""

    def on_head(self, status: int, headers: dict[bytes, bytes], now_ns: int) -> None: ...
    def on_body(self, data: bytes, now_ns: int) -> None: ...

    def usual(self) -> Usual | None:
        """What may take the next read as it stands, where that is one whole HTTP chunk; asked after each read."""

    def on_complete(self, now_ns: int) -> None: ...
    def on_failure(self, kind: str, detail: str, now_ns: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes: of an answer's head as a whole, and of its body."""

    head: int = 1 << 20
    body: int = 64 << 20


class Connection(asyncio.Protocol):
    """One connection, at most one exchange on it at a time."""

    def __init__(self, limits: Limits, give_back: Callable[[Connection], None], due: Due | None = None) -> None:
        """due: what is sent before anything is read once its moment has come."""
        self.peer = ""
        self.exchanges = 0  # requests written on it
        self.open = False
        self._limits = limits
        self._give_back = give_back
        self._due = due or Due()
        self._fd = -1  # of a socket that takes our bytes as they are
        self._reads: Reads | None = None  # who reads it; None: the transport
        self._slot = -1
        self._lost: OSError | None = None  # how it ended, where the transport does not know
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._listener: Listener | None = None
        self._busy = False  # an answer is not read to its end yet (its listener may have gone)
        self._now = 0
        self._reset_answer()

    def _reset_answer(self) -> None:
        self.heard = False  # any byte of the answer
        self._headers: dict[bytes, bytes] = {}
        self._in_body = False
        self._until_eof = False
        self._read_whole = False
        self._keep = False
        self._head_size = 0
        self._room = self._limits.body  # bytes of body that may still come
        self._body: list[bytes] = []  # of the read that is being parsed
        self._between_chunks = False  # the parser's last callback was the end of a chunk
        self._usual: Usual | None = None

    # --- for the owner ---
    def request(self, data: bytes, listener: Listener) -> None:
        """Write one request.  The connection must be open and free."""
        assert self._transport is not None
        if self._busy:
            raise RuntimeError("a second request on a busy connection")
        self._busy = True
        self._listener = listener
        self.exchanges += 1
        self._reset_answer()
        if self._fd >= 0 and not self._transport.get_write_buffer_size():
            # A loop's transport may write only when it has read all that is there: some ms later under load.
            try:
                done = os.write(self._fd, data)
            except OSError:  # no room, or no connection any more: the transport waits, or tells
                done = 0
            if done == len(data):
                return
            data = data[done:]
        self._transport.write(data)

    @property
    def busy(self) -> bool:
        """The last answer is not read to its end."""
        return self._busy

    def read_by(self, reads: Reads) -> None:
        """Leave the reading to `reads`, where the socket is plain.  Before the first request."""
        if self._fd < 0 or not self.open or self._transport is None or self._transport.is_closing():
            return
        try:
            self._slot = reads.add(self._fd, self)
        except OSError:
            return
        self._reads = reads
        self._transport.pause_reading()

    def collect(self) -> None:
        """Give the listener the events that are stored for it."""
        if self._reads is not None and self._usual is not None:
            self._reads.collect(self._slot)

    def release(self) -> None:
        """The listener has all it wants: read the rest of the answer silently, then keep the connection."""
        self._listener = None
        self._usual = None

    def cut(self) -> None:
        """Drop the connection now, without a word to the listener; what is stored for it, it gets."""
        self.collect()
        self._listener = None
        self._usual = None
        self.open = False
        self._leave()
        self._give_back(self)
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        """The socket is about to be closed, or is."""
        self._fd = -1
        if self._reads is not None:
            self._reads.drop(self._slot)
            self._reads = None

    # --- reads ---
    def on_stored(self, stamps: list[int], texts: list[str], body: int) -> None:
        if self._usual is not None:
            self._usual.take_stored(stamps, texts)
            self._room -= body  # whole chunks do not change the state of the parser, so it need not see them

    def on_read(self, data: bytes, now_ns: int) -> None:
        self._now = now_ns
        self._usual = None
        self._read(data)
        if self._usual is not None and self._reads is not None:
            self._reads.arm(self._slot, self._usual, self._room)

    def on_closed(self, error: OSError | None, now_ns: int) -> None:
        self._lost = error
        self.open = False
        self._leave()
        self._give_back(self)
        assert self._transport is not None
        if error is None:
            self._transport.close()
        else:
            self._transport.abort()

    # --- asyncio ---
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class
        self.open = True
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple) and len(name) >= 2:
            self.peer = f"[{name[0]}]:{name[1]}" if ":" in str(name[0]) else f"{name[0]}:{name[1]}"

        raw = transport.get_extra_info("socket")
        if raw is not None and transport.get_extra_info("sslcontext") is None:
            self._fd = raw.fileno()

    def data_received(self, data: bytes) -> None:
        now = self._now = time.monotonic_ns()
        if now >= self._due.at_ns and self._busy:  # an idle connection could be given to one of those calls
            self._due.ring()
        usual = self._usual
        if usual is not None and len(data) <= self._room and (taken := usual.take(data, now)):
            self._room -= taken
            return
        self._read(data)

    def _read(self, data: bytes) -> None:
        if not self._busy:
            self.cut()  # bytes that nobody asked for: whatever follows could be taken for the next answer
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error  # noqa: B904 - a fault of ours, not of the peer: show it as it is
        except httptools.HttpParserError as error:
            self._hand_over()
            self._fail(PROTOCOL, f"not HTTP/1.1: {error}")
            return
        except httptools.HttpParserUpgrade:
            self._hand_over()
            self._fail(PROTOCOL, "the server switched protocols")
            return
        self._hand_over()
        if self._read_whole:
            self._finish()
        elif not self._in_body:
            self._head_size += len(data)
            if self._head_size > self._limits.head:
                self._fail(PROTOCOL, f"a head of more than {self._limits.head} bytes")
        else:
            # Behind the end of a chunk only the next one's size line has no callback yet, and that ends with CRLF too.
            between = self._between_chunks and self._listener is not None and data.endswith(b"\r\n")
            self._usual = self._listener.usual() if between and self._listener is not None else None

    def _hand_over(self) -> None:
        """Give the listener what this read held of the body."""
        body = self._body
        if body:
            data = body[0] if len(body) == 1 else b"".join(body)
            self._body = []
            if self._listener is not None:
                self._listener.on_body(data, self._now)

    def eof_received(self) -> bool:
        return False  # close our side as well; connection_lost tells the listener

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self.collect()
        self._leave()
        self._usual = None
        exc = exc or self._lost
        self._now = time.monotonic_ns()
        listener, self._listener = self._listener, None
        busy, self._busy = self._busy, False
        self._give_back(self)
        if busy and listener is not None:
            if self._until_eof and exc is None:
                listener.on_complete(self._now)
            else:
                listener.on_failure(CLOSED, f"connection closed by the server{f' ({exc})' if exc else ''}", self._now)
        # The parser holds this object and this object the parser; nothing but this breaks the circle.
        del self._parser
        self._transport = None

    # --- httptools ---
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers = self._headers
        if 100 <= status < 200 or self._read_whole:
            return
        self._in_body = True
        self._until_eof = (
            b"content-length" not in headers
            and b"chunked" not in headers.get(b"transfer-encoding", b"").lower()
            and status not in (204, 304)
        )
        if self._listener is not None:
            self._listener.on_head(status, headers, self._now)

    def on_body(self, data: bytes) -> None:
        if self._read_whole:
            return
        self._room -= len(data)
        if self._room < 0:
            self._hand_over()
            self._fail(PROTOCOL, f"an answer of more than {self._limits.body} bytes")
        elif self._listener is not None:
            self._body.append(data)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        self._between_chunks = False
        if not self._in_body:
            self._headers = {}  # an interim 1xx answer; the real one follows
            return
        if self._read_whole:
            return
        self._read_whole = True
        self._keep = self._parser.should_keep_alive() and not self._until_eof

    def on_message_begin(self) -> None:
        if self._read_whole:
            self._keep = False  # a second answer to one request: never trust this connection again

    def _finish(self) -> None:
        """The answer is read whole.  Only now, outside the parser, may the next request be written."""
        if not self.open:
            return
        listener, self._listener = self._listener, None
        self._usual = None  # what comes before the next request was asked for by nobody
        self._busy = False
        if self._keep:
            self._give_back(self)
        else:
            self.open = False
            self._leave()
            assert self._transport is not None
            self._transport.close()
        if listener is not None:
            listener.on_complete(self._now)

    def _fail(self, kind: str, detail: str) -> None:
        listener, self._listener = self._listener, None
        self.cut()
        if listener is not None:
            listener.on_failure(kind, detail, self._now)
