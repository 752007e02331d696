"""The connections to one origin: opened over every address, through a proxy or a tunnel, and kept for the next call."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from typing import Final

from loadgen.due import Due
from loadgen.http import Connection, Limits, Origin
from loadgen.reads import Reads
from models.errors import UserError
from telemetry.names import CLIENT_ERROR, REFUSED, TIMEOUT_CONNECT

#: errno of a socket call that failed for lack of something on our side: files, ports, memory.
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


class ConnectError(Exception):
    """No connection; `reason` is a reason code of telemetry.names."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


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
        self,
        origin: Origin,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        proxy: Origin | None = None,
        due: Due | None = None,
    ) -> None:
        """due: see Connection."""
        self._due = due
        self.reads: Reads | None = None  # who reads its plain sockets; None: the event loop
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
            lambda: Connection(self._limits, self._return, self._due),
            address,
            (self.proxy or self.origin).port,
            ssl=self._tls,
            server_hostname=self.origin.host if self._tls is not None else None,
        )
        if self.reads is not None:
            connection.read_by(self.reads)
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
            connection = Connection(self._limits, self._return, self._due)
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
