"""The HTTP client on real sockets: framing, keeping connections, limits, and every way to fail."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from loadgen.due import NEVER, Due
from loadgen.http import CLOSED, PROTOCOL, Connection, Limits, Origin
from loadgen.job import Call
from loadgen.pool import ConnectError, Pool
from loadgen.reads import Reads
from loadgen.wire import RequestHead
from models.errors import UserError
from telemetry import names
from tests.loadgen.stub import CLOSE, RESET, Step, Stub, chunk, plain, sse_head, unused_port

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop, as the sender does, and never longer than 20 s."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, 20))


class Ear:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.stamps: list[int] = []
        self.end: tuple[str, str] | None = None
        self.ended = asyncio.Event()

    def on_head(self, status: int, headers: dict[bytes, bytes], now_ns: int) -> None:
        self.status, self.headers = status, headers
        self.stamps.append(now_ns)

    def on_body(self, data: bytes, now_ns: int) -> None:
        self.body += data
        self.stamps.append(now_ns)

    def usual(self) -> None:
        return None

    def on_complete(self, now_ns: int) -> None:
        self.on_end("complete", "", now_ns)

    def on_failure(self, kind: str, detail: str, now_ns: int) -> None:
        self.on_end(kind, detail, now_ns)

    def on_end(self, kind: str, detail: str, now_ns: int) -> None:
        assert self.end is None, "a listener hears one end"
        self.end = (kind, detail)
        self.stamps.append(now_ns)
        self.ended.set()


def call(path: str = "/v1/chat/completions", **more: Any) -> Call:
    fields: dict[str, Any] = {"index": 0, "trace_row": 0, "klass": "c", "intended_s": 0.0, "body": b'{"a":1}'}
    counts = {"input_tokens": 1, "expected_output_tokens": 1, "prompt_tokens_expected": 1}
    ids = {"trace_id": "ab" * 16, "span_id": "cd" * 8, "sampled": True}
    return Call(path=path, **fields | counts | ids | more)


BY_LIBRARY = True


@pytest.fixture(autouse=True, params=["read by the library", "read by transports"])
def _reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BY_LIBRARY", request.param == "read by the library")


async def pool_to(
    url: str, limits: Limits | None = None, tls: ssl.SSLContext | None = None, due: Due | None = None
) -> Pool:
    due = due or Due()
    pool = Pool(Origin.parse(url), limits or Limits(), tls, due=due)
    pool.reads = Reads(due) if BY_LIBRARY else None
    await pool.resolve()
    return pool


async def ask(pool: Pool, **more: Any) -> tuple[Ear, Connection]:
    """One request on a kept connection or a new one, to its end."""
    connection = pool.take() or await pool.connect(5)
    ear = Ear()
    connection.request(RequestHead(pool.origin, {}).request(call(**more)), ear)
    await ear.ended.wait()
    return ear, connection


def one(*steps: Step, limits: Limits | None = None) -> Ear:
    """What is heard of one scripted answer."""

    async def work() -> Ear:
        async with Stub(lambda request: steps) as stub:
            pool = await pool_to(stub.url, limits)
            ear, _ = await ask(pool)
            pool.close()
            return ear

    return run(work())


def test_a_request_arrives_as_it_was_meant() -> None:
    async def work() -> None:
        async with Stub(lambda request: [plain("200 OK", {})]) as stub:
            pool = await pool_to(stub.url + "/base")
            await ask(pool)
            request = stub.requests[0]
            assert (request.method, request.path, request.body) == ("POST", "/base/v1/chat/completions", b'{"a":1}')
            expected = {
                "host": stub.url.removeprefix("http://"),
                "content-length": "7",
                "content-type": "application/json",
                "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01",
                names.PHASES_HEADER: "1",
            }
            assert expected.items() <= request.headers.items()
            await ask(pool, sampled=False)
            assert stub.requests[1].headers["traceparent"].endswith("-00")
            await ask(pool, trace_id="")
            assert "traceparent" not in stub.requests[2].headers
            pool.close()

    run(work())


def test_framing_by_length_by_chunks_and_by_the_end_of_the_connection() -> None:
    length = one(b"HTTP/1.1 200 OK\r\nContent-", b"Length: 5\r\nX-A: b\r\n\r\nhe", b"llo")
    assert (length.status, length.body, length.end) == (200, b"hello", ("complete", ""))
    assert length.headers == {b"content-length": b"5", b"x-a": b"b"}
    chunks = one(sse_head(chunked=True), b"5\r\nhel", b"lo\r\n", chunk(b" you") + chunk(b""))
    assert (chunks.body, chunks.end) == (b"hello you", ("complete", ""))
    until_eof = one(sse_head(), b"hel", b"lo", CLOSE)
    assert (until_eof.body, until_eof.end) == (b"hello", ("complete", ""))
    interim = one(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (interim.status, interim.body, interim.end) == (204, b"", ("complete", ""))


def test_a_stamp_belongs_to_its_read_and_is_taken_when_the_bytes_come() -> None:
    before = time.monotonic_ns()
    ear = one(sse_head(chunked=True), 0.05, chunk(b"a"), 0.05, chunk(b"b") + chunk(b"c") + chunk(b""))
    head, first, second, end = ear.stamps
    assert before < head
    assert first - head >= 40_000_000 and second - first >= 40_000_000
    assert second == end and ear.body == b"abc"


def test_connections_are_kept_and_the_last_used_is_used_next() -> None:
    async def work() -> None:
        async with Stub(lambda request: [0.02, plain("200 OK", {})]) as stub:
            pool = await pool_to(stub.url)
            pairs = await asyncio.gather(*(ask(pool) for _ in range(3)))
            assert stub.connections == len(pool) == 3
            assert {ear.end for ear, _ in pairs} == {("complete", "")}
            last = pool.take()
            assert last is not None
            pool.keep(last)
            for _ in range(3):
                _, connection = await ask(pool)
                assert connection is last
            assert stub.connections == 3
            pool.close()
            assert len(pool) == 0

    run(work())


def test_a_connection_is_not_kept_when_either_side_says_so_or_the_answer_had_no_end() -> None:
    ends: list[list[Step]] = [
        [plain("200 OK", {}, "connection: close")],
        [b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"],
        [sse_head(), b"x", CLOSE],
        [plain("200 OK", {}) + plain("200 OK", {})],  # two answers to one request
    ]

    async def work() -> None:
        async with Stub(lambda request: ends[request.number % len(ends)]) as stub:
            pool = await pool_to(stub.url)
            for _ in ends:
                ear, _ = await ask(pool)
                assert ear.end == ("complete", "")
                assert pool.take() is None
            assert stub.connections == len(ends)

    run(work())


def test_an_idle_connection_that_the_server_closes_or_talks_on_is_forgotten() -> None:
    async def work() -> None:
        tails: list[list[Step]] = [[CLOSE], [0.02, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 0.05, CLOSE]]
        async with Stub(lambda request: [plain("200 OK", {}), *tails[request.number]]) as stub:
            pool = await pool_to(stub.url)
            for _ in tails:
                await ask(pool)
                while len(pool):
                    await asyncio.sleep(0.005)
                assert pool.take() is None

    run(work())


def test_release_reads_the_rest_in_silence_and_keeps_the_connection() -> None:
    async def work() -> None:
        async with Stub(lambda request: [sse_head(chunked=True), chunk(b"a"), 0.03, chunk(b"b"), chunk(b"")]) as stub:
            pool = await pool_to(stub.url)
            connection = await pool.connect(5)
            ear = Ear()
            connection.request(RequestHead(pool.origin, {}).request(call()), ear)
            while not ear.body:
                await asyncio.sleep(0.002)
            connection.release()
            assert connection.busy
            while connection.busy:
                await asyncio.sleep(0.002)
            assert (ear.body, ear.end) == (b"a", None)
            assert pool.take() is connection
            pool.close()

    run(work())


@pytest.mark.parametrize(
    ("steps", "kind", "status"),
    [
        ([CLOSE], CLOSED, None),
        ([RESET], CLOSED, None),
        ([b"HTTP/1.1 200 OK\r\ncontent-le", CLOSE], CLOSED, None),
        ([sse_head(chunked=True), chunk(b"a"), CLOSE], CLOSED, 200),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", 0.02, RESET], CLOSED, 200),
        ([sse_head(), b"abc", 0.02, RESET], CLOSED, 200),
        ([b"SSH-2.0-OpenSSH\r\n"], PROTOCOL, None),
        ([sse_head(chunked=True), b"zz\r\n"], PROTOCOL, 200),
        ([b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"y" * 5000 + b"\r\n"], PROTOCOL, None),
        ([b"HTTP/1.1 200 OK\r\n", *[b"x-a: bcd\r\n"] * 500], PROTOCOL, None),
        ([sse_head(), b"x" * 30_001], PROTOCOL, 200),
        ([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"], PROTOCOL, None),
    ],
)
def test_every_failure_has_its_kind(steps: list[Step], kind: str, status: int | None) -> None:
    ear = one(*steps, limits=Limits(head=4000, body=30_000))
    assert ear.end is not None
    assert (ear.end[0], ear.status) == (kind, status)


def test_a_body_at_its_limit_passes() -> None:
    assert one(sse_head(), b"x" * 30_000, CLOSE, limits=Limits(body=30_000)).end == ("complete", "")


def test_nobody_listens() -> None:
    async def work() -> None:
        pool = await pool_to(f"http://127.0.0.1:{unused_port()}")
        with pytest.raises(ConnectError) as raised:
            await pool.connect(5)
        assert raised.value.reason == names.REFUSED
        assert len(pool) == 0

    run(work())


@pytest.mark.skipif(not Path("/proc/sys/net").exists(), reason="a full accept queue drops the SYN on Linux")
def test_connecting_takes_no_longer_than_its_limit() -> None:
    async def work() -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(0)
            filler = [socket.socket() for _ in range(3)]
            for one_socket in filler:
                one_socket.setblocking(False)
                one_socket.connect_ex(server.getsockname())
            pool = await pool_to(f"http://127.0.0.1:{server.getsockname()[1]}")
            began = time.monotonic()
            with pytest.raises(ConnectError) as raised:
                await pool.connect(0.2)
            assert raised.value.reason == names.TIMEOUT_CONNECT
            assert 0.19 < time.monotonic() - began < 5
            for one_socket in filler:
                one_socket.close()

    run(work())


def test_every_address_of_a_host_is_tried() -> None:
    async def work() -> None:
        async with Stub(lambda request: [plain("200 OK", {})]) as stub:
            pool = await pool_to(stub.url)
            pool._addresses.insert(0, "127.0.0.2")  # a loopback address on which the stub does not listen
            ear, connection = await ask(pool)
            assert ear.status == 200
            assert connection.peer == stub.url.removeprefix("http://")
            pool.close()

    run(work())


def test_a_host_that_does_not_resolve_is_the_users_error() -> None:
    with pytest.raises(UserError, match="cannot resolve"):
        run(pool_to("http://no-such-host.invalid:80"))


def ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.skipif(not ipv6(), reason="no IPv6 on this machine")
def test_ipv6() -> None:
    async def work() -> None:
        async with Stub(lambda request: [plain("200 OK", {})], host="::1") as stub:
            pool = await pool_to(stub.url)
            ear, connection = await ask(pool)
            assert ear.status == 200
            assert stub.requests[0].headers["host"] == connection.peer == stub.url.removeprefix("http://")
            pool.close()

    run(work())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_checks_the_certificate(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    subprocess.run([*make, *name, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)

    async def work() -> None:
        async with Stub(lambda request: [plain("200 OK", {"a": 1})], tls=server) as stub:
            pool = await pool_to(stub.url, tls=ssl.create_default_context(cafile=str(certificate)))
            ear, _ = await ask(pool)
            assert (ear.status, ear.body, ear.end) == (200, b'{"a": 1}', ("complete", ""))
            again, _ = await ask(pool)
            assert again.status == 200 and stub.connections == 1
            pool.close()
            strangers = await pool_to(stub.url)
            with pytest.raises(ConnectError) as raised:
                await strangers.connect(5)
            assert raised.value.reason == names.REFUSED
            assert "TLS" in raised.value.detail

    run(work())


@pytest.mark.parametrize("size", [10, 300_000, 8_000_000])
def test_a_body_of_any_size_arrives_whole_however_slowly_it_is_read(size: int) -> None:
    async def work() -> None:
        async with Stub(lambda request: [plain("200 OK", {})]) as stub:
            pool = await pool_to(stub.url)
            body = bytes(range(256)) * (size // 256 + 1)
            for n in range(3):  # on the same connection
                ear, _ = await ask(pool, body=body + b"%d" % n)
                assert ear.end == ("complete", "")
            assert [request.body for request in stub.requests] == [body + b"%d" % n for n in range(3)]
            assert len({request.connection for request in stub.requests}) == 1
            pool.close()

    run(work())


def test_a_request_is_written_before_the_loop_goes_on() -> None:
    """Its bytes are in the socket when `request` returns: the stamp of the send is that of the send."""

    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        pool = await pool_to(f"http://127.0.0.1:{listener.getsockname()[1]}")
        connection = await pool.connect(5)
        accepted, _ = listener.accept()
        connection.request(b"POST / HTTP/1.1\r\n\r\n", Ear())
        accepted.setblocking(False)
        assert accepted.recv(100) == b"POST / HTTP/1.1\r\n\r\n"
        pool.close()
        accepted.close()
        listener.close()

    run(work())


def test_a_request_on_a_connection_that_the_server_has_reset_is_told_to_its_listener() -> None:
    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        pool = await pool_to(f"http://127.0.0.1:{listener.getsockname()[1]}")
        connection = await pool.connect(5)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        ear = Ear()
        connection.request(b"POST / HTTP/1.1\r\n\r\n", ear)  # the loop has not heard of the reset
        await asyncio.wait_for(ear.ended.wait(), 5)
        assert ear.end is not None and ear.end[0] == CLOSED
        pool.close()
        listener.close()

    run(work())


def test_what_is_due_is_sent_before_what_was_read_and_never_on_a_connection_that_is_idle() -> None:
    rung: list[bool] = []

    async def work() -> None:
        async with Stub(lambda request: [plain("200 OK", {})]) as stub:

            def ring() -> None:
                rung.append(connection.busy)
                due.at_ns = NEVER

            due = Due(ring)
            pool = await pool_to(stub.url, due=due)
            _, connection = await ask(pool)
            assert rung == [], "nothing is due"
            due.at_ns = 1
            await ask(pool)
            assert rung == [True]
            due.at_ns = 1
            connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")  # asked for by nobody
            assert rung == [True] and not connection.open
            pool.close()

    run(work())
