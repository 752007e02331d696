"""The SSE reader against the standard, with the bytes cut anywhere."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.sse import Event, LineTooLongError, SseReader


def read(*pieces: bytes) -> list[Event]:
    reader = SseReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def by_the_letter(stream: bytes) -> list[Event]:
    """The standard's own algorithm, slow and plain: the whole stream, decoded at once, line by line."""
    text = stream.decode("utf-8", "replace")
    text = text[1:] if text.startswith("\ufeff") else text
    events, data, kind, last_id = [], "", "", ""
    lines = re.split("\r\n|\n|\r", text)
    for line in lines[:-1]:  # the last has no end
        if line == "":
            if data:
                events.append(Event(data.removesuffix("\n"), kind or "message", last_id))
            data, kind = "", ""
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data += value + "\n"
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last_id = value
    return events


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [Event("a")]),
        (b"data:a\n\n", [Event("a")]),
        (b"data:  a\n\n", [Event(" a")]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [Event("a"), Event("b"), Event("c")]),
        (b"data: a\ndata: b\ndata\n\n", [Event("a\nb\n")]),
        (b"data\n\n", [Event("")]),
        (b"data:\n\n", [Event("")]),
        (b"\xef\xbb\xbfdata: a\n\n", [Event("a")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b": ping\n\n:\n\ndata: a\n\n", [Event("a")]),
        (b"event: x\nid: 7\nretry: 10\ndata: a\n\ndata: b\n\n", [Event("a", "x", "7"), Event("b", "message", "7")]),
        (b"event: x\n\ndata: a\n\n", [Event("a")]),
        (b"id: 1\0\ndata: a\n\n", [Event("a")]),
        (b" data: a\n\ndatas: b\n\nData: c\n\n", []),
        (b"data: \xe2\x82\xac \xff\n\n", [Event("€ \ufffd")]),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"", []),
    ],
)
def test_the_cases_of_the_standard(stream: bytes, expected: list[Event]) -> None:
    assert read(stream) == expected
    assert by_the_letter(stream) == expected


CASE_9 = (
    '\ufeff: hello\r\nevent: greeting\r\nid: 1\r\ndata:{"a":"né"}\r\n\r\n'
    'data: one\ndata:two\rdata:  三\r\revent\ndata: 🎉 [DONE]\n\n:c\n\ndata:{"last":true}'
).encode()


def test_case_9_every_split_position_gives_the_same_events_and_the_same_pending() -> None:
    whole = SseReader()
    expected = whole.feed(CASE_9)
    assert [event.data for event in expected] == ['{"a":"né"}', "one\ntwo\n 三", "🎉 [DONE]"]
    assert whole.pending == Event('{"last":true}', "message", "1")
    for cut in range(len(CASE_9) + 1):
        reader = SseReader()
        assert reader.feed(CASE_9[:cut]) + reader.feed(CASE_9[cut:]) == expected, cut
        assert reader.pending == whole.pending, cut
    reader = SseReader()
    assert [event for byte in CASE_9 for event in reader.feed(bytes([byte]))] == expected


pieces_of_streams = st.lists(
    st.sampled_from(
        [
            *(b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b":", b" ", b"x", b"\0", b"{}", b"\xef\xbb\xbf"),
            *(b"data:", b"data: ", b"data", b"event: e", b"id: 1", b"retry: 5"),
            *(b"\xe2\x82\xac", b"\xe2", b"\x82", b"\xf0\x9f\x8e\x89"),
        ]
    ),
    max_size=30,
).map(b"".join)


@given(pieces_of_streams, st.data())
def test_any_bytes_cut_anywhere_read_as_the_standard_says(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(*parts) == by_the_letter(stream)


def test_retry_is_kept_only_if_it_is_a_number() -> None:
    reader = SseReader()
    reader.feed(b"retry: 1500\nretry: 2x\nretry: -1\nretry:\nretry: " + b"9" * 5000 + b"\n")
    assert reader.retry_ms == 1500


def test_pending_shows_what_the_end_discards() -> None:
    reader = SseReader()
    assert reader.pending is None
    reader.feed(b"event: e\ndata: a\nda")
    assert reader.pending == Event("a", "e")
    reader.feed(b"ta: b")
    assert reader.pending == Event("a\nb", "e")
    reader.feed(b"\n\n: c")
    assert reader.pending is None


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_line_or_an_event_beyond_the_limit_is_refused_however_it_comes(size: int) -> None:
    def feed(stream: bytes) -> list[Event]:
        reader = SseReader(line_limit=100)
        return [event for at in range(0, len(stream), size) for event in reader.feed(stream[at : at + size])]

    fits = b"data: " + b"x" * 94
    assert feed(fits + b"\n\n") == [Event("x" * 94)]
    with pytest.raises(LineTooLongError):
        feed(fits + b"x\n\n")
    with pytest.raises(LineTooLongError):
        feed(fits + b"x")
    with pytest.raises(LineTooLongError):
        feed((b"data: " + b"x" * 50 + b"\n") * 3)


def test_a_long_line_in_small_pieces_costs_time_in_proportion() -> None:
    reader = SseReader(line_limit=1 << 22)
    piece = b"x" * 16
    reader.feed(b"data: ")
    for _ in range(200_000):  # joined anew at every piece, these 3 MB would be 300 GB of copying
        reader.feed(piece)
    assert len(reader.feed(b"\n\n")[0].data) == 3_200_000
