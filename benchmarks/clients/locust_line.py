"""A Locust user that reads the stream line by line, as people write it: FastHttpUser, one request a second a user."""

from __future__ import annotations

import time

from locust import FastHttpUser, constant_throughput, task

BODY = {
    "model": "stub",
    "messages": [{"role": "user", "content": "The ferry leaves the harbor at six. " * 24}],
    "max_tokens": 16,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class Reader(FastHttpUser):
    wait_time = constant_throughput(1)  # type: ignore[no-untyped-call]

    @task
    def chat(self) -> None:
        began = time.monotonic()
        first = 0.0
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as answer:
            # The response that the client wraps reads lines up to the separator it is told.
            while line := answer._response.readline(b"\n"):
                if not first and line.startswith(b"data: "):
                    first = time.monotonic() - began
            answer.success()
