"""The floor of any client in this language: uvloop, httptools, a constant rate, and nothing kept but a few numbers.

Usage: python bare_loop.py URL RATE SECONDS      prints one JSON line.  It parses HTTP and cuts SSE at blank lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

import httptools
import uvloop

BODY = json.dumps(
    {
        "model": "stub",
        "messages": [{"role": "user", "content": "The ferry leaves the harbor at six. " * 24}],
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
).encode()


class Stream(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.sent = 0
        self.first = 0
        self.now = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self) -> None:
        self.first = 0
        self.sent = time.monotonic_ns()
        assert self.transport is not None
        self.transport.write(self.bench.request)

    def data_received(self, data: bytes) -> None:
        self.now = time.monotonic_ns()
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self.first:
            self.first = self.now
        self.bench.events += data.count(b"\n\n")

    def on_message_complete(self) -> None:
        self.bench.ttft.append(self.first - self.sent)
        self.bench.idle.append(self)
        self.bench.done += 1
        self.parser = httptools.HttpResponseParser(self)


class Bench:
    """The schedule and the counts."""

    def __init__(self, url: str, rate: float, seconds: float) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        self.request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        self.rate, self.count = rate, int(rate * seconds)
        self.idle: list[Stream] = []
        self.lag: list[int] = []
        self.ttft: list[int] = []
        self.events = self.done = 0

    async def run(self) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        zero = time.monotonic_ns() + 200_000_000
        cpu = time.process_time()
        for n in range(self.count):
            due = zero + round(n / self.rate * 1e9)
            while (left := due - time.monotonic_ns()) > 0:
                await asyncio.sleep(left / 1e9 if left > 1_500_000 else 0)
            self.lag.append(time.monotonic_ns() - due)
            if self.idle:
                self.idle.pop().send()
            else:
                loop.create_task(self.connect())  # noqa: RUF006 - it ends before the run does
            if n % 16 == 0:
                await asyncio.sleep(0)
        while (
            self.done < self.count and time.monotonic_ns() < zero + round(self.count / self.rate * 1e9) + 5_000_000_000
        ):
            await asyncio.sleep(0.02)
        cpu = time.process_time() - cpu
        lag, ttft = sorted(self.lag), sorted(self.ttft)
        return {
            "done": self.done,
            "events": self.events,
            "lag_p99_s": lag[int(0.99 * len(lag))] / 1e9,
            "ttft_p50_s": ttft[len(ttft) // 2] / 1e9 if ttft else 0.0,
            "cpu_s": cpu,
        }

    async def connect(self) -> None:
        _, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(self), self.host, self.port)
        stream.send()


if __name__ == "__main__":
    bench = Bench(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(bench.run())))
