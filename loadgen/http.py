"""A lean HTTP/1.1 client for streams: one asyncio protocol on httptools, and a pool of kept connections.

Owns sockets: connecting, writing one request, cutting the answer's bytes out of HTTP, keeping the connection for the
next request.  Must always hold: one stamp (CLOCK_MONOTONIC, ns) per read, and it belongs to every byte of that read;
a listener hears exactly one end (`on_complete` or `on_failure`) unless it let go (`release`, `cut`); a connection goes
back to the pool only after its answer was read whole and both sides agreed to keep it.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, cast
from urllib.parse import unquote, urlsplit

import httptools

from models.errors import UserError
from telemetry.names import CLIENT_ERROR, REFUSED, TIMEOUT_CONNECT

#: errno of a socket call that failed for lack of something on our side: files, ports, memory.
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})

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


class ConnectError(Exception):
    """No connection; `reason` is a reason code of telemetry.names."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


#: Shown a read that begins between two HTTP chunks, with its stamp: how many bytes of body it took, 0 for none of it.
Take = Callable[[bytes, int], int]


class Listener(Protocol):
    """Who hears an answer.  Header names are lower case; the body of one read comes at once."""

    def on_head(self, status: int, headers: dict[bytes, bytes], now_ns: int) -> None: ...
    def on_body(self, data: bytes, now_ns: int) -> None: ...

    def taker(self) -> Take | None:
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

    def __init__(self, limits: Limits, give_back: Callable[[Connection], None]) -> None:
        self.peer = ""
        self.exchanges = 0  # requests written on it
        self.open = False
        self._limits = limits
        self._give_back = give_back
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
        self._take: Take | None = None

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
        self._transport.write(data)

    @property
    def busy(self) -> bool:
        """The last answer is not read to its end."""
        return self._busy

    def release(self) -> None:
        """The listener has all it wants: read the rest of the answer silently, then keep the connection."""
        self._listener = None
        self._take = None

    def cut(self) -> None:
        """Drop the connection now, without a word to the listener."""
        self._listener = None
        self._take = None
        self.open = False
        self._give_back(self)
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ---
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class
        self.open = True
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple) and len(name) >= 2:
            self.peer = f"[{name[0]}]:{name[1]}" if ":" in str(name[0]) else f"{name[0]}:{name[1]}"

    def data_received(self, data: bytes) -> None:
        now = self._now = time.monotonic_ns()
        take = self._take
        if take is not None and len(data) <= self._room and (taken := take(data, now)):
            self._room -= taken  # whole chunks do not change the state of the parser, so it need not see them
            return
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
            self._take = self._listener.taker() if between and self._listener is not None else None

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
        self._take = None  # what comes before the next request was asked for by nobody
        self._busy = False
        if self._keep:
            self._give_back(self)
        else:
            self.open = False
            assert self._transport is not None
            self._transport.close()
        if listener is not None:
            listener.on_complete(self._now)

    def _fail(self, kind: str, detail: str) -> None:
        listener, self._listener = self._listener, None
        self.cut()
        if listener is not None:
            listener.on_failure(kind, detail, self._now)


class Tunnel(asyncio.Protocol):
    """The beginning of a connection through a proxy: CONNECT, and the proxy's answer."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if (b"\r\n\r\n" in self._head or len(self._head) > 1 << 16) and not self.answered.done():
            self.answered.set_result(self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(ConnectionResetError("the proxy closed the connection"))


class Pool:
    """The connections to one origin; the one used last is used next, so that idle ones die off at the server.

    Through a proxy, http goes to the proxy itself and https through a tunnel that it opens.
    """

    def __init__(
        self, origin: Origin, limits: Limits, tls: ssl.SSLContext | None = None, proxy: Origin | None = None
    ) -> None:
        self.origin = origin
        self.proxy = proxy
        self._limits = limits
        self._tls = (tls or ssl.create_default_context()) if origin.tls else None
        self._addresses: list[str] = []
        self._idle: dict[Connection, None] = {}  # in the order of their return
        self._all: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._all)

    async def resolve(self) -> None:
        """Look the host up, once; every address is tried in the resolver's order.  Raises UserError."""
        origin = self.proxy or self.origin
        try:
            found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"cannot resolve {origin.host!r}: {error}", where=f"target {origin.url}", remedy="check the host name"
            ) from error
        self._addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))

    @property
    def idle(self) -> int:
        """Connections that `take` would give."""
        return len(self._idle)

    def take(self) -> Connection | None:
        """An idle connection, or None: then `connect`."""
        return self._idle.popitem()[0] if self._idle else None

    def keep(self, connection: Connection) -> None:
        """Take in a connection that was opened and then not needed."""
        self._return(connection)

    async def connect(self, timeout_s: float) -> Connection:
        """A new connection, TLS included, within `timeout_s` over all addresses.  Raises ConnectError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._try_addresses()
        except TimeoutError:
            raise ConnectError(TIMEOUT_CONNECT, f"no connection within {timeout_s:g} s") from None

    async def _try_addresses(self) -> Connection:
        failed = ConnectError(REFUSED, "no address")
        for address in self._addresses:
            try:
                if self.proxy is not None and self._tls is not None:
                    connection = await self._through_tunnel(address, self.proxy, self._tls)
                else:
                    connection = await self._straight(address)
            except ssl.SSLError as error:
                failed = ConnectError(REFUSED, f"TLS: {error}")
            except TimeoutError as error:  # the kernel's own ETIMEDOUT
                failed = ConnectError(TIMEOUT_CONNECT, str(error))
            except OSError as error:
                failed = ConnectError(CLIENT_ERROR if error.errno in _OURS else REFUSED, str(error))
            else:
                if connection.open:
                    self._all.add(connection)
                return connection
        raise failed

    async def _straight(self, address: str) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._limits, self._return),
            address,
            (self.proxy or self.origin).port,
            ssl=self._tls,
            server_hostname=self.origin.host if self._tls is not None else None,
        )
        return connection

    async def _through_tunnel(self, address: str, proxy: Origin, tls: ssl.SSLContext) -> Connection:
        """TLS with the target inside a connection that the proxy opens.  Raises OSError."""
        loop = asyncio.get_running_loop()
        transport, tunnel = await loop.create_connection(Tunnel, address, proxy.port)
        try:
            host = f"[{self.origin.host}]" if ":" in self.origin.host else self.origin.host
            to = f"{host}:{self.origin.port}"
            lines = [f"CONNECT {to} HTTP/1.1", f"Host: {to}", *proxy.authorization]
            transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
            head = await tunnel.answered
            status = head.split(b" ", 2)[1:2]
            if status != [b"200"]:
                raise ConnectionRefusedError(
                    f"the proxy answers {head[:80].decode('latin-1', 'replace').splitlines()[0]}"
                )
            connection = Connection(self._limits, self._return)
            inside = await loop.start_tls(transport, connection, tls, server_hostname=self.origin.host)
            if inside is None:
                raise ConnectionResetError("the proxy closed the connection")
            connection.connection_made(inside)
            return connection
        except BaseException:
            transport.abort()
            raise

    def _return(self, connection: Connection) -> None:
        if connection.open:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)
            self._all.discard(connection)

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._all):
            connection.cut()
        self._all.clear()
        self._idle.clear()
