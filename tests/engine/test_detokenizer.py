"""What is released never changes, whatever way tokens cut characters and stop strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import TextStream


def feed(pieces: list[bytes], *stops: str) -> tuple[list[str], bool]:
    stream = TextStream(stops)
    released = []
    for piece in pieces:
        released.append(stream.push(piece))
        if stream.stopped:
            return released, True
    return [*released, stream.finish()], False


def test_an_emoji_over_three_tokens_is_released_whole() -> None:
    raw = "😀".encode()
    released, _ = feed([raw[:1], raw[1:3], raw[3:], b"!"])
    assert released == ["", "", "😀", "!", ""]


def test_cjk_tails_never_show_half_a_character() -> None:
    raw = "東京は日本".encode()
    released, _ = feed([raw[i : i + 2] for i in range(0, len(raw), 2)])
    assert "".join(released) == "東京は日本"
    assert all("\ufffd" not in text for text in released)


def test_a_stop_string_over_four_tokens_is_never_seen() -> None:
    released, stopped = feed([b"abc", b"DEF", b"G", b"HI", b"J", b"more"], "DEFGHIJ")
    assert stopped and "".join(released) == "abc"


def test_text_held_for_a_stop_that_does_not_come_is_released_in_order() -> None:
    released, stopped = feed([b"DEF", b"G", b"HI", b"X"], "DEFGHIJ")
    assert not stopped and released == ["", "", "", "DEFGHIX", ""]


def test_of_two_stops_the_one_that_ends_first_wins() -> None:
    for pieces in ([b"xABCDy"], [b"xA", b"BCDy"], [b"x", b"ABC", b"D"]):
        assert "".join(feed(pieces, "ABCD", "AB")[0]) == "x"
    assert "".join(feed([b"1xAB2"], "AB", "xAB")[0]) == "1"


def test_bytes_that_are_no_text_become_replacement_characters_and_a_cut_end_is_dropped() -> None:
    assert "".join(feed([b"a\xffb"])[0]) == "a\ufffdb"
    assert "".join(feed(["né".encode()[:-1]])[0]) == "n"


@given(
    st.text(alphabet="abAB😀é", max_size=30),
    st.lists(st.text(alphabet="abAB😀", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_any_cutting_gives_the_same_text(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    whole, whole_stopped = feed([raw[i : i + 1] for i in range(len(raw))], *stops)
    cut, cut_stopped = feed(pieces, *stops)
    assert "".join(cut) == "".join(whole)
    assert cut_stopped == whole_stopped
