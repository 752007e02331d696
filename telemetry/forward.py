"""Spans passed on: every payload that the receiver took goes to a collector as well, in a bounded queue of its own.

Owns one thread and the connection to the collector.  Must always hold: the receiver never waits for the collector; at
most QUEUE payloads and LIMIT bytes wait, what comes beyond is dropped and counted in spans; a collector that is away
costs one short try for each payload, and `close` returns within its limit.  Spans are sent at most once.
"""

from __future__ import annotations

import http.client
import queue
import threading
import time
from typing import Final
from urllib.parse import urlsplit

from models.addresses import http_url
from models.errors import UserError
from telemetry.spans import TRACES_PATH

QUEUE: Final = 1024  # payloads that may wait
LIMIT: Final = 64 * 1024 * 1024  # bytes that may wait
TIMEOUT_S: Final = 2.0  # of one try
IDLE_S: Final = 0.1  # how often an idle thread looks whether it should end
REST_S: Final = 1.0  # after a failure, so that a collector that is away is not asked all the time
_PORTS: Final = {"http": 80, "https": 443}
Payload = tuple[bytes, str, int]  # body, content encoding, spans in it


def checked_collector(url: str, where: str) -> str:
    """The URL to post to.  UserError where ``url`` is no base URL of an OTLP/HTTP collector."""
    what, remedy = "the address of a collector", "write its base URL, such as http://127.0.0.1:4318"
    parts = http_url(url, where, what, remedy)
    if parts.query or parts.fragment:
        raise UserError(f"{url!r} is not {what}", where=where, remedy=remedy)
    return url.rstrip("/") if url.rstrip("/").endswith(TRACES_PATH) else url.rstrip("/") + TRACES_PATH


class Forwarder:
    """``offer`` on any thread; ``sent`` and ``dropped`` count spans.  Starts with the first payload.

    Raises UserError for an address that is none.
    """

    def __init__(self, url: str, where: str = "--forward-spans") -> None:
        self._url = urlsplit(checked_collector(url, where))
        self._waiting: queue.SimpleQueue[Payload] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._payloads = self._bytes = 0
        self._thread: threading.Thread | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._closing = threading.Event()
        self.sent = 0
        self.dropped = 0

    def offer(self, payload: bytes, encoding: str, spans: int) -> None:
        """Queue one payload that was found good, as it came; dropped where too much waits already."""
        with self._lock:
            full = self._payloads >= QUEUE or self._bytes + len(payload) > LIMIT
            if full or self._closing.is_set():
                self.dropped += spans
                return
            self._payloads += 1
            self._bytes += len(payload)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="spans-forward", daemon=True)
                self._thread.start()
        self._waiting.put((payload, encoding, spans))

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what waits, for at most ``timeout_s``; what is left is dropped and counted.  Idempotent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        while True:
            try:
                left = self._waiting.get_nowait()
            except queue.Empty:
                return
            self._count(left, taken=False)

    def to_dict(self) -> dict[str, int]:
        """For a manifest."""
        return {"sent": self.sent, "dropped": self.dropped}

    def _work(self) -> None:
        while True:
            try:
                payload = self._waiting.get(timeout=IDLE_S)
            except queue.Empty:
                if self._closing.is_set():
                    break
                continue
            taken = self._post(payload)
            self._count(payload, taken=taken)
            if not taken:
                self._closing.wait(REST_S)
        if self._connection is not None:
            self._connection.close()

    def _count(self, payload: Payload, *, taken: bool) -> None:
        body, _, spans = payload
        with self._lock:
            self._payloads -= 1
            self._bytes -= len(body)
            if taken:
                self.sent += spans
            else:
                self.dropped += spans

    def _post(self, payload: Payload) -> bool:
        """One try; a connection that the collector had closed meanwhile gives a second one."""
        body, encoding, _ = payload
        headers = {"Content-Type": "application/x-protobuf", **({"Content-Encoding": encoding} if encoding else {})}
        fresh = self._connection is None
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if self._connection is None:
                    kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
                    port = self._url.port or _PORTS[self._url.scheme]
                    self._connection = kind(self._url.hostname or "", port, timeout=TIMEOUT_S)
                self._connection.request("POST", self._url.path, body, headers)
                answer = self._connection.getresponse()
                answer.read()
                return 200 <= answer.status < 300
            except (OSError, http.client.HTTPException):
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                if fresh or time.monotonic() > until:
                    return False
                fresh = True
