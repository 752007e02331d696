"""Reads that are one HTTP chunk with one usual event go past the parsers; nothing else does, and nobody can tell."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.due import Due
from loadgen.flight import Flight
from loadgen.http import Connection, Limits, Origin
from loadgen.pool import Pool
from loadgen.reads import Reads
from loadgen.stream import Answer
from loadgen.usual import Shape
from loadgen.wire import RequestHead
from tests.loadgen.sending import Run, at_once
from tests.loadgen.sending import settings as settings_of
from tests.loadgen.stub import DONE, Stub, content, event, finish, role, usage
from tests.loadgen.stub import answer as whole
from tests.loadgen.test_stream import STREAM, call

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that goes nowhere: the test is the server."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class Ground:
    """Hears of a flight."""

    connect_timeout_s = 1.0

    def __init__(self) -> None:
        self.ended = 0
        self.first_tokens = 0

    def on_sent(self, flight: Flight) -> None: ...

    def on_first_token(self, flight: Flight) -> None:
        self.first_tokens += 1

    def on_end(self, flight: Flight) -> None:
        self.ended += 1


def chunk(body: bytes, size: str = "x") -> bytes:
    return format(len(body), size).encode() + b"\r\n" + body + b"\r\n"


class Socket(Wire):
    """A transport of one end of a pair of sockets, which it never reads: the test has the other end."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...


def read(reads: list[bytes], limits: Limits, line_limit: int, shape: Shape | None = None) -> tuple[Any, ...]:
    """Everything that is told of an answer which comes in these reads; shape: of the answers before it."""
    return heard(Connection(limits, lambda one: None), Wire(), reads, limits, line_limit, shape)


def read_by_library(reads: list[bytes], limits: Limits, line_limit: int, shape: Shape | None = None) -> tuple[Any, ...]:
    """The same, of reads that the library does."""

    async def work() -> tuple[Any, ...]:
        by = Reads(Due())
        ours, server = socket.socketpair()
        with ours, server:
            ours.setblocking(False)
            connection = Connection(limits, lambda one: None)

            def hear(data: bytes) -> None:
                if data:
                    server.sendall(data)
                by.turn()

            try:
                return heard(connection, Socket(ours), reads, limits, line_limit, shape, by, hear)
            finally:
                by.close()

    return asyncio.run(work())


def heard(
    connection: Connection,
    wire: Wire,
    reads: list[bytes],
    limits: Limits,
    line_limit: int,
    shape: Shape | None,
    by: Reads | None = None,
    hear: Callable[[bytes], None] | None = None,
) -> tuple[Any, ...]:
    ground = Ground()
    origin = Origin.parse("http://127.0.0.1:1")
    connection.connection_made(wire)
    if by is not None:
        connection.read_by(by)
    pool = Pool(origin, limits)
    flight = Flight(ground, call(), pool, RequestHead(origin, {}).request, 1, line_limit, shape=shape)
    pool.keep(connection)
    flight.go()
    for data in reads:
        if connection.busy and connection.open:
            (hear or connection.data_received)(data)
    kept = connection.open and not connection.busy
    if not ground.ended:
        connection.connection_lost(None)
    answer = flight.answer
    usage_told = answer.prompt_tokens, answer.completion_tokens, answer.usage_marks
    about = answer.model, answer.response_id, answer.account
    said = answer.pieces, usage_told, answer.finish_reason, answer.done_marker, answer.failure, about
    return said, len(answer.stamps), answer.first_content_ns is None, kept, ground.ended, ground.first_tokens


texts = st.text(st.sampled_from('ab "\\\n\t\u00a0\u2028é世🎉{}:,\x7f'), max_size=4)
others = st.sampled_from(
    [role(), usage(5, 4), usage(7, 9, completion_tokens_details={"reasoning_tokens": 3}), finish(), finish("length"),
     {"error": {"message": "no"}}, DONE,
     b": hello\n\n", b"data: {}\r\n\r\n", b"data: \xff\n\n", b"event: ping\n", b"\n",
     {**usage(5, 4), "choices": [{"index": 0, "delta": {"content": "z"}}]}, {**finish(), "usage": {"prompt_tokens": 8}}]
)  # fmt: skip


@settings(deadline=None)  # a loaded machine is slow at times
@given(
    st.lists(st.one_of(texts, others), min_size=1, max_size=9),
    st.lists(st.sampled_from(["x", "x", "x", "X", "03x"]), min_size=9, max_size=9),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1 << 20, 1 << 20, 500]),
    st.lists(st.integers(0, 2000), max_size=6),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b""]),
)
def test_how_the_bytes_are_read_changes_nothing(
    parts: list[str | bytes | dict[str, Any]],
    sizes: list[str],
    ascii_only: bool,
    compact: bool,
    limit: int,
    cuts: list[int],
    last: bytes,
) -> None:
    def told(value: Any) -> bytes:
        return event(json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":") if compact else None))

    bodies = []
    for part in ["x", *parts]:  # from the first on, what is usual is known
        bodies.append(part if isinstance(part, bytes) else told(content(part) if isinstance(part, str) else part))
    chunks = [chunk(body, size) for body, size in zip(bodies, ["x", *sizes], strict=False)]
    ends = [chunk(told(finish())), chunk(told(usage(3, 2))), chunk(DONE) + last]
    whole = b"".join([HEAD, *chunks, *ends])
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    limits = Limits(body=limit)
    by_chunk = read([HEAD + chunks[0], *chunks[1:], *ends], limits, limit)
    by_byte = read([whole[n : n + 1] for n in range(len(whole))], limits, limit)
    by_cut = read([whole[start:stop] for start, stop in pairwise(edges) if start < stop], limits, limit)
    shape = Shape()
    read([HEAD + chunk(told(content("z"))), chunk(told(finish())), chunk(DONE)], limits, limit, shape)
    foreseen = [read([HEAD + chunks[0], *chunks[1:], *ends], limits, limit, shape) for _ in range(2)]
    assert by_chunk == by_byte == by_cut == foreseen[0] == foreseen[1]
    assert by_chunk == read_by_library([HEAD + chunks[0], *chunks[1:], *ends], limits, limit)
    assert by_chunk == read_by_library([whole[start:stop] for start, stop in pairwise(edges)], limits, limit)


def test_the_library_stores_usual_events_in_their_order_and_hands_over_the_rest() -> None:
    """Text in any script, several chunks in a read and one of a long stream that is more than it stores at a time."""

    async def work() -> None:
        heard_: list[tuple[str, Any]] = []

        class Spy(Connection):
            def on_stored(self, stamps: list[int], texts: list[str], body: int) -> None:
                heard_.append(("stored", texts))
                assert stamps == sorted(stamps) and len(stamps) == len(texts)
                super().on_stored(stamps, texts, body)

            def on_read(self, data: bytes, now_ns: int) -> None:
                heard_.append(("read", data))
                super().on_read(data, now_ns)

        by = Reads(Due())
        ours, server = socket.socketpair()
        with ours, server:
            ours.setblocking(False)

            def hear(data: bytes) -> None:
                server.sendall(data)
                by.turn()

            def say(text: str) -> bytes:
                return chunk(event(json.dumps(content(text), ensure_ascii=False)))

            odd = [say("a") + say("世界") * 2, say("é") + chunk(event(finish()))[:9], chunk(event(finish()))[9:]]
            texts = ["word " * 40] * 1500
            reads = [HEAD + say("x"), *odd[:1], *[say(text) for text in texts], *odd[1:], chunk(DONE) + b"0\r\n\r\n"]
            connection = Spy(Limits(), lambda one: None)
            said = heard(connection, Socket(ours), reads, Limits(), 1 << 20, None, by, hear)
            assert said[0][0] == ["x", "a", "世界", "世界", *texts, "é"] and said[0][2] == "stop" and said[3]
        by.close()
        kinds = [kind for kind, _ in heard_]
        assert kinds == ["read", "stored", "stored", "read", "read", "read"], (
            "the first stored are those that were full"
        )
        assert sum(len(texts) for kind, texts in heard_ if kind == "stored") == 1504
        assert heard_[3][1] == chunk(event(finish()))[:9], "what was stored is not handed over again"

    asyncio.run(work())


class Plain:
    """A reader that writes down what it hears, and then does something."""

    busy = True

    def __init__(self) -> None:
        self.data, self.texts = b"", list[str]()
        self.then: Callable[[], None] = lambda: None

    def on_stored(self, stamps: list[int], texts: list[str], body: int) -> None:
        self.texts += texts

    def on_read(self, data: bytes, now_ns: int) -> None:
        self.data += data
        self.then()

    def on_closed(self, error: OSError | None, now_ns: int) -> None: ...
    def cut(self) -> None: ...


def test_collecting_between_two_notices_spoils_neither() -> None:
    async def work() -> None:
        usual = learned().usual()
        assert usual is not None
        by, pairs, readers = Reads(Due()), [socket.socketpair() for _ in range(3)], [Plain() for _ in range(3)]
        slots = [by.add(ours.fileno(), reader) for (ours, _), reader in zip(pairs, readers, strict=True)]
        by.arm(slots[1], usual, 1 << 20)
        pairs[1][1].sendall(chunk(event(content("long " * 9))))
        by.turn()
        readers[0].then = lambda: by.collect(slots[1])
        pairs[0][1].sendall(b"first")
        pairs[2][1].sendall(b"third " * 20)
        by.turn()
        assert [one.data for one in readers] == [b"first", b"", b"third " * 20]
        assert [one.texts for one in readers] == [[], ["long " * 9], []]
        by.close()
        for both in pairs:
            for one in both:
                one.close()

    asyncio.run(work())


def test_what_is_stored_is_there_when_a_stream_is_given_up() -> None:
    async def work() -> None:
        by = Reads(Due())
        ours, server = socket.socketpair()
        with ours, server:
            ours.setblocking(False)
            connection = Connection(Limits(), lambda one: None)
            connection.connection_made(Socket(ours))
            connection.read_by(by)
            origin = Origin.parse("http://127.0.0.1:1")
            pool = Pool(origin, Limits())
            flight = Flight(Ground(), call(), pool, RequestHead(origin, {}).request, 1, 1 << 20)
            pool.keep(connection)
            flight.go()
            for data in (HEAD + chunk(event(content("a"))), USUAL, USUAL):
                server.sendall(data)
                by.turn()
            assert flight.state == "3 token chunks read"
            server.sendall(USUAL)
            by.turn()
            flight.give_up("timeout_total", "too late", 1)
            assert flight.answer.pieces == ["a", "b", "b", "b"] and len(flight.answer.stamps) == 4
            server.sendall(USUAL)
            by.turn()  # nobody reads it any more
            assert flight.answer.pieces == ["a", "b", "b", "b"]
        by.close()

    asyncio.run(work())


def test_without_a_compiler_transports_read_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "false")

    async def work() -> None:
        async with Stub(lambda request: whole("Aaaa", "Bbbb")) as stub:
            run_ = Run(tmp_path, at_once(3), settings_of(stub.url))
            await run_.start()
            await run_.drained.wait()
            assert len(run_.dispatcher.warnings) == 1 and "false failed" in run_.dispatcher.warnings[0]
            rows = await run_.stop()
            assert [row["finish_reason"] for row in rows] == ["stop"] * 3

    asyncio.run(work())


def learned() -> Answer:
    """An answer that has read one usual event."""
    answer = Answer(line_limit=300)
    answer.head(200, STREAM, 1)
    answer.feed(event(content("a")), 2)
    return answer


def test_a_usual_chunk_is_taken_and_counted_to_the_byte() -> None:
    answer = learned()
    usual = answer.usual()
    assert usual is not None
    for n, text in enumerate(("b", " long" * 9, "世界", "🎉"), 3):
        body = event(json.dumps(content(text), ensure_ascii=False))
        assert usual.take(chunk(body), n) == len(body)
    assert (answer.pieces, answer.stamps) == (["a", "b", " long" * 9, "世界", "🎉"], [2, 3, 4, 5, 6])
    assert answer.usage_marks == []


USUAL = chunk(event(content("b")))


@pytest.mark.parametrize(
    "data",
    [
        USUAL * 2,
        USUAL[:-1],
        USUAL[1:],
        b"0" + USUAL,
        b"1" + USUAL[1:],
        USUAL.replace(b"\n\n\r\n", b"\n\r\n"),
        chunk(event(finish())),
        chunk(DONE),
        chunk(event(content(""))),
        chunk(event(content('"'))),
        chunk(event(content("\n"))),
        chunk(event(content("\\"))),
        chunk(event(content("b" * 400))),  # longer than a line may be
        USUAL.replace(b'"b"', b'"\xff"'),
        USUAL.replace(b'"b"', b'"\n"'),
        b"",
        b"\r\n",
    ],
)
def test_anything_else_is_left_as_it_was(data: bytes) -> None:
    answer = learned()
    usual = answer.usual()
    assert usual is not None and usual.take(data, 9) == 0
    assert (answer.pieces, answer.stamps, answer.failure) == (["a"], [2], None)


def test_nothing_is_taken_inside_an_event_or_after_the_last() -> None:
    answer = learned()
    answer.feed(b": half a comm", 3)
    assert answer.usual() is None
    answer.feed(b"ent\n\n", 4)
    assert answer.usual() is not None
    answer.feed(DONE, 5)
    assert answer.usual() is None


#: First events of a stream, after another stream of the server was read: what may come before the choices, and may not.
FIRST: dict[str, dict[str, Any]] = {
    "another id": {"id": "c2", "created": 2, "model": "m2"},
    "usage": {"id": "c2", "usage": {"prompt_tokens": 5, "completion_tokens": 1}},
    "an object": {"id": "c2", "x": {"choices": []}},
    "a list": {"id": "c2", "x": [1]},
    "an error": {"id": "c2", "error": {"message": "no"}},
    "a name like it": {"id": '"choices":', "model": '{"choices":['},
    "timings": {"id": "c2", "timings": {"prompt_ms": 5.0, "predicted_ms": 7.0}},
}


@pytest.mark.parametrize("before", FIRST)
@pytest.mark.parametrize("opening", [{"role": "assistant", "content": ""}, {"content": "a"}, {"reasoning": "hm"}])
def test_what_an_earlier_stream_taught_changes_no_answer(before: str, opening: dict[str, str]) -> None:
    def one(delta: dict[str, str], head: dict[str, Any] = FIRST[before], **after: Any) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **after})

    shape = Shape()
    read([HEAD + chunk(one({"content": "a"}, {"id": "c1"})), chunk(DONE)], Limits(), 1 << 20, shape)
    assert shape.middle
    texts = [one({"content": text}) for text in ("b", "c")]
    bodies = [one(opening), *texts, one({"content": "d"}, usage={"completion_tokens": 9}), event(finish()), DONE]
    reads = [HEAD + chunk(bodies[0]), *map(chunk, bodies[1:])]
    assert read(reads, Limits(), 1 << 20, shape) == read(reads, Limits(), 1 << 20)


def test_a_stream_knows_its_usual_event_from_an_earlier_one() -> None:
    shape = Shape()
    for number in range(2):
        answer = Answer(shape=shape)
        answer.head(200, STREAM, 1)
        answer.feed(event({**role(), "id": f"c{number}"}), 2)
        answer.feed(event({**content("a"), "id": f"c{number}"}), 3)
        usual = answer.usual()
        assert usual is not None
        body = event({**content("b"), "id": f"c{number}"})
        assert (usual.take(chunk(body), 4), answer.pieces, answer.first_content_ns) == (len(body), ["a", "b"], 3)
        assert usual.take(chunk(event({**content("b"), "id": "another"})), 5) == 0


def test_a_usual_event_behind_the_end_of_its_answer_closes_the_connection() -> None:
    ground = Ground()
    origin = Origin.parse("http://127.0.0.1:1")
    connection = Connection(Limits(), lambda one: None)
    connection.connection_made(Wire())
    pool = Pool(origin, Limits())
    flight = Flight(ground, call(), pool, RequestHead(origin, {}).request, 1, 1 << 20)
    pool.keep(connection)
    flight.go()
    usual = chunk(event(content(" tok")))
    for data in (HEAD + chunk(event(role())), usual, usual):
        connection.data_received(data)
    assert flight.answer.usual() is not None, "the second was learned from the first"
    connection.data_received(chunk(event(finish())) + b"0\r\n\r\n")
    assert connection.open and not connection.busy and ground.ended == 1
    connection.data_received(usual)
    assert not connection.open and flight.answer.pieces == [" tok", " tok"]
