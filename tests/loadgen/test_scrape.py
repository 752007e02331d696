"""The scraper: what of a target's step log belongs to a run."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from loadgen.scrape import Scraper, newest_steps
from telemetry.bundle import Bundle
from telemetry.schema import STEPS
from tests.loadgen.stub import Request, StubThread, plain, unused_port


def log_of(first: int, last: int) -> bytes:
    """Steps first .. last as the engine sends them."""
    rows = [{"step": number, "replica": "r"} for number in range(first, last + 1)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, STEPS) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=STEPS))
    return sink.getvalue().to_pybytes()


class Server:
    """An engine whose log grows by a step with each question."""

    def __init__(self) -> None:
        self.last = 40
        self.first = log_of(40, 40)  # made before anybody waits for it

    def __call__(self, request: Request) -> list[bytes]:
        url = urlsplit(request.path)
        if url.path == "/metrics":
            return [plain("200 OK", b"up 1\n")]
        query = parse_qs(url.query)
        if "newest" in query:
            return [plain("200 OK", self.first if self.last == 40 else log_of(self.last, self.last))]
        self.last += 1
        return [plain("200 OK", log_of(int(query["after"][0]) + 1, self.last))]


def steps_of(tmp_path: Path, stub: StubThread, after: dict[str, int] | None) -> list[int]:
    bundle = Bundle.create(tmp_path, {})
    scraper = Scraper(bundle, [stub.url], {}, time.monotonic_ns(), after=after)
    scraper.start()
    scraper.stop()
    found: list[int] = bundle.table("steps").column("step").to_pylist()
    assert scraper.last_steps == {stub.url: found[-1]}
    return found


def test_what_a_server_did_before_is_none_of_the_run(tmp_path: Path) -> None:
    with StubThread(Server()) as stub:
        before = newest_steps([stub.url], {})
        assert before == {stub.url: 40}
        found = steps_of(tmp_path, stub, before)
        assert found[0] == 41 and found == list(range(41, found[-1] + 1))
        # a second run begins where the first one ended
        again = steps_of(tmp_path, stub, newest_steps([stub.url], {}))
        assert again[0] == found[-1] + 1


def test_without_a_word_all_that_is_kept_is_read(tmp_path: Path) -> None:
    with StubThread(Server()) as stub:
        assert steps_of(tmp_path, stub, None)[0] == 0


def test_a_server_without_a_log_or_without_life_has_no_newest_step() -> None:
    with StubThread(lambda request: [plain("404 Not Found", {})]) as stub:
        gone = f"http://127.0.0.1:{unused_port()}"
        assert newest_steps([stub.url, gone], {}) == {stub.url: -1, gone: -1}
