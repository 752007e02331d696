"""The usual event of a stream: what stands around its text is known, so that it is recognised by its bytes.

Parsing is most of the cost of an event.  An event with the same characters before and after a string that needs no
unescaping says the same as one that was parsed, with another text.  Owns what is known of them, and what may be
recognised.  Must always hold: a recognised event would have said this text and nothing else if it had been parsed; all
that deviates in any byte is left to the parsers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json.scanner import make_scanner
from typing import Any, Final

scan: Final[Callable[[str, int], tuple[Any, int]]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]


def _size_line(size: int) -> bytes:
    """The size line of a whole HTTP chunk of `size` bytes; a bare LF where none is so long."""
    for digits in range(1, 9):
        body = size - digits - 4
        if body > 0 and len(f"{body:x}") == digits:
            return b"%x\r\n" % body
    return b"\n"  # no chunk begins so


_SIZE_LINES: Final = tuple(map(_size_line, range(4096)))  # longer reads go the long way, which costs them less

_BEFORE_USAGE: Final = '[],"usage":{'
_MOST_ENDS: Final = 16  # that are remembered of a server


class Shape:
    """What the usual event of a server looks like from its "choices" on; shared by the answers of one server.

    The members before that differ from stream to stream (id, time) and are the same within one.  So a stream whose
    first event has no more than plain members there knows its usual event before it has seen one.
    """

    __slots__ = ("ends", "middle", "suffix")

    def __init__(self) -> None:
        self.middle = ""  # from '"choices":' to the text; empty: not known
        self.suffix = ""
        #: By what follows '"choices":' in an event that says why the answer ends and nothing else: that reason.
        self.ends: dict[str, str] = {}


class Usual:
    """The usual event of one stream; texts and their stamps go to the two lists of its answer."""

    __slots__ = (
        "_chunk_tail",
        "_pieces",
        "_prefix",
        "_shape",
        "_stamps",
        "_stem",
        "_suffix",
        "frame_head",
        "frame_tail",
        "most",
    )

    def __init__(self, stamps: list[int], pieces: list[str], line_limit: int, shape: Shape | None) -> None:
        self._stamps = stamps
        self._pieces = pieces
        self.most = line_limit
        self._shape = shape
        self._prefix = ""  # empty: nothing known
        self._suffix = ""
        self._stem = ""  # up to '"choices":'; empty: not known, or it says more than who sent it
        self.frame_head = b""  # the same in bytes, from the beginning to the end of an event
        self.frame_tail = b""
        self._chunk_tail = b""  # of the HTTP chunk that holds such an event and nothing else

    @property
    def known(self) -> bool:
        return self._prefix != ""

    def take(self, data: bytes, now_ns: int) -> int:
        """One read that is one HTTP chunk with one usual event: the bytes of body in it.

        0: it is something else, and nothing happened.  Most reads are this, so nothing of ours is called.  Only for a
        body in chunks, between two of them and between two events, when something is known.
        """
        size = len(data)
        if size >= len(_SIZE_LINES) or size > self.most:
            return 0
        line = _SIZE_LINES[size]
        start = len(line)
        if not (data.startswith(line) and data.startswith(self.frame_head, start) and data.endswith(self._chunk_tail)):
            return 0
        try:
            text = data[start + len(self.frame_head) : -len(self._chunk_tail)].decode()
        except UnicodeDecodeError:
            return 0
        if not text or not text.isprintable() or '"' in text or "\\" in text:
            return 0
        self._stamps.append(now_ns)
        self._pieces.append(text)
        return size - start - 2

    def take_stored(self, stamps: list[int], texts: list[str]) -> None:
        """Usual events that were recognised elsewhere, by `frame_head` and `frame_tail`."""
        self._stamps.extend(stamps)
        self._pieces.extend(texts)

    def take_event(self, data: bytes, now_ns: int) -> bool:
        """The same for a read of body bytes that is one whole event, however HTTP framed it."""
        if not (data.startswith(self.frame_head) and data.endswith(self.frame_tail)) or len(data) > self.most:
            return False
        text = data[len(self.frame_head) : -len(self.frame_tail)].decode("utf-8", "replace")
        if not text or not text.isprintable() or '"' in text or "\\" in text:
            return False
        self._stamps.append(now_ns)
        self._pieces.append(text)
        return True

    def text_of(self, data: str) -> str:
        """The text of an event's data; empty where it is no usual one."""
        if not self._prefix or not self.fits(data):
            return ""
        text = data[len(self._prefix) : -len(self._suffix)]
        return text if text.isprintable() and '"' not in text and "\\" not in text else ""

    def end_of(self, data: str) -> str | None:
        """The finish reason of an event that says nothing else and was seen before."""
        stem = self._stem
        shape = self._shape
        if not stem or shape is None or not data.startswith(stem):
            return None
        return shape.ends.get(data[len(stem) :])

    def usage_of(self, data: str) -> dict[str, Any] | None:
        """The usage of an event that says nothing else."""
        stem = self._stem
        if not stem or not data.startswith(_BEFORE_USAGE, len(stem)):
            return None
        try:
            found, end = scan(data, len(stem) + len(_BEFORE_USAGE) - 1)
        except (StopIteration, ValueError, RecursionError):
            return None
        return found if data[end:] == "}" else None

    def learn_end(self, data: str, found: dict[str, Any], reason: str) -> None:
        """Remember the event that gave this reason to end; found: it, parsed."""
        stem, shape = self._stem, self._shape
        if not stem or shape is None or not data.startswith(stem) or len(shape.ends) >= _MOST_ENDS:
            return
        choices = found["choices"]
        if len(choices) != 1 or not _is_plain(found) or choices[0].get("logprobs") or choices[0].get("text"):
            return
        delta = choices[0].get("delta")
        if delta is None or (isinstance(delta, dict) and not any(delta.values())):
            shape.ends[data[len(stem) :]] = reason

    def fits(self, data: str) -> bool:
        """Is this the usual event, whatever its text?"""
        return data.startswith(self._prefix) and data.endswith(self._suffix)

    def learn(self, data: str, found: dict[str, Any]) -> None:
        """Remember what stands around the text of a chunk that said one text and nothing else; found: it, parsed."""
        if self._prefix and self.fits(data):
            return
        self._prefix = ""
        choices = found["choices"]
        if len(choices) != 1 or choices[0].get("logprobs"):
            return
        delta = choices[0].get("delta")
        key = '"text":' if delta is None else '"content":'
        if (delta is not None and len(delta) != 1) or data.count(key) != 1:
            return  # a role beside the content, say: the next chunks will look different
        start = data.index(key) + len(key)
        start += data[start : start + 1] == " "
        if data[start : start + 1] != '"':
            return
        _, end = scan(data, start)
        stem = _stem(data)
        plain = stem and _is_plain(found)
        self._know(data[: start + 1], data[end - 1 :], stem if plain else "")
        if self._shape is not None and plain:
            self._shape.middle, self._shape.suffix = self._prefix[len(stem) :], self._suffix

    def foresee(self, data: str, found: dict[str, Any]) -> bool:
        """Know the usual event from the first of any kind, where the server's shape is known; found: it, parsed.

        The event so foreseen is valid JSON and says what it said in the stream that it was learned in: its beginning
        is a beginning of an event of this stream, its end that of the learned one, and both meet behind the same key
        of the outermost object.
        """
        shape = self._shape
        if shape is None or not shape.middle or not _is_plain(found) or not (stem := _stem(data)):
            return False
        self._know(stem + shape.middle, shape.suffix, stem)
        return True

    def _know(self, prefix: str, suffix: str, stem: str) -> None:
        self._prefix, self._suffix, self._stem = prefix, suffix, stem
        self.frame_head = b"data: " + prefix.encode()
        self.frame_tail = suffix.encode() + b"\n\n"
        self._chunk_tail = self.frame_tail + b"\r\n"


def _stem(data: str) -> str:
    """An event up to its choices; empty where there are other objects or lists before them."""
    at = data.find('"choices":')
    stem = data[: at + 10]
    return stem if at > 0 and stem.count("{") == 1 and "[" not in stem and stem[0] == "{" else ""


def _is_plain(found: dict[str, Any]) -> bool:
    """Does an event say nothing but its choices and who sent it?"""
    return not (found.get("usage") or "error" in found or "timings" in found or "type" in found)
