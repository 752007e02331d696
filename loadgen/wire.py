"""The bytes of a request: head fields that never change, joined once, and the few that do.

Owns the request's head.  Must always hold: nothing a caller gives can end a header line early, and a header's value
never shows in an error (it may be a key).
"""

from __future__ import annotations

import re
from typing import Final

from loadgen.http import Origin
from loadgen.job import Call
from models.errors import UserError
from telemetry.names import PHASES_HEADER

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OURS: Final = frozenset(
    {"content-length", "transfer-encoding", "connection", "traceparent", "expect", "upgrade", PHASES_HEADER}
)


class RequestHead:
    """Heads for the calls to one origin; `headers` are the user's own and win over the defaults."""

    def __init__(self, origin: Origin, headers: dict[str, str], proxy: Origin | None = None) -> None:
        """Raises UserError for a header that cannot be sent or is ours to set."""
        fields = {
            "host": origin.authority,
            "user-agent": "tailspan",
            "accept": "text/event-stream, application/json",
            "content-type": "application/json",
            PHASES_HEADER: "1",
        }
        for name, value in headers.items():
            if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
                raise UserError(
                    "not a sendable header", where=f"header {name!r}", remedy="use plain letters, no newline"
                )
            if name.lower() in _OURS:
                raise UserError("this header is set by the sender", where=f"header {name!r}", remedy="leave it out")
            fields[name.lower()] = value.strip()
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("latin-1")
        if origin.behind(proxy) and proxy is not None:
            self._fixed += "".join(f"{line}\r\n" for line in proxy.authorization).encode("latin-1")
        self._origin = origin
        self._ahead = origin.behind(proxy)
        self._starts: dict[str, bytes] = {}

    def request(self, call: Call) -> bytes:
        """All bytes of one request."""
        start = self._starts.get(call.path)
        if start is None:
            path = self._origin.path(call.path)
            if not re.fullmatch(r"/[\x21-\x7e]*", path):
                raise UserError("not a request path", where=f"path {path!r}", remedy="use printable ASCII, from /")
            start = self._starts[call.path] = f"POST {self._ahead}{path} HTTP/1.1\r\n".encode() + self._fixed
        trace = (
            f"traceparent: 00-{call.trace_id}-{call.span_id}-{'01' if call.sampled else '00'}\r\n"
            if call.trace_id
            else ""
        )
        return b"%bcontent-length: %d\r\n%b\r\n%b" % (start, len(call.body), trace.encode(), call.body)
