"""A Locust user that reads the stream line by line, as people write it: FastHttpUser, one request a second a user.

Users begin spread over a second, since Locust itself spawns those of a second at once.  Prints one JSON line at its
end, as bare_loop.py does.  Lag: how long after its due moment a request was begun; a user's k-th is due k seconds
after its first, which is what constant_throughput(1) stands for.
"""

from __future__ import annotations

import json
import time
from typing import Any

from locust import FastHttpUser, constant_throughput, events, task

BODY = {
    "model": "stub",
    "messages": [{"role": "user", "content": "The ferry leaves the harbor at six. " * 24}],
    "max_tokens": 16,
    "stream": True,
    "stream_options": {"include_usage": True},
}
LAG: list[float] = []
TTFT: list[float] = []


class Reader(FastHttpUser):
    wait_time = constant_throughput(1)  # type: ignore[no-untyped-call]
    spawned = 0  # of all users
    begun = 0
    first_due = 0.0

    def on_start(self) -> None:
        number, Reader.spawned = Reader.spawned, Reader.spawned + 1
        time.sleep(number / self.environment.parsed_options.num_users)
        self._cp_last_run = time.perf_counter()  # constant_throughput counts from the spawning else

    @task
    def chat(self) -> None:
        began = time.monotonic()
        if not self.begun:
            self.first_due = began
        LAG.append(began - self.first_due - self.begun)
        self.begun += 1
        first = 0.0
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as answer:
            # The response that the client wraps reads lines up to the separator it is told.
            while line := answer._response.readline(b"\n"):
                if not first and line.startswith(b"data: "):
                    first = time.monotonic() - began
                    TTFT.append(first)
            answer.success()


@events.quit.add_listener  # type: ignore[untyped-decorator]
def tell(**_: Any) -> None:
    """The last line that this process prints."""
    lag, ttft = sorted(LAG), sorted(TTFT)
    told = {
        "lag_p99_s": lag[int(0.99 * len(lag))] if lag else None,
        "ttft_p50_s": ttft[len(ttft) // 2] if ttft else None,
    }
    print(json.dumps(told), flush=True)
