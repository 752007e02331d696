"""Reads of many sockets in one call: `native/reads.c`, and what it hands to the connections.

A read through a loop's transport wakes the interpreter for each event of each stream.  Here the library reads all
sockets that have something to say, keeps the events that a connection has said it knows but for their text, each with
its own stamp, and hands over what is left.  Owns the bounds between both.  Must always hold: a connection gets all that
came in its order, the stored events before the bytes behind them; nothing reaches one that was dropped; sends that are
due come between two reads.  Plain sockets on Linux; where the library cannot be made, transports read as before.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path
from struct import Struct
from typing import Final, Protocol

from loadgen.due import Due
from models.compiled import compiled

SOURCE: Final = Path(__file__).parent / "native" / "reads.c"
FLAGS: Final = ("-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
_BUFFER: Final = 2 << 20
_ASIDE: Final = 512 << 10  # what `collect` needs at most
_MOST: Final = 256  # notices in one call
_NOTICE: Final = Struct("=iiqIIII")
_NOTHING: Final = -0x7FFFFFFF  # only stored events


class Known(Protocol):
    """What stands around the text of the usual event, from the beginning of its first line to the blank one."""

    @property
    def frame_head(self) -> bytes: ...
    @property
    def frame_tail(self) -> bytes: ...
    @property
    def most(self) -> int:
        """Bytes of the longest such chunk."""


class Reader(Protocol):
    """Who owns a socket that is read here; stamps are CLOCK_MONOTONIC ns."""

    @property
    def busy(self) -> bool:
        """It waits for an answer.  One that does not closes its socket whatever comes."""

    def on_stored(self, stamps: list[int], texts: list[str], body: int) -> None:
        """Whole chunks with usual events came; body: the bytes of body in them."""

    def on_read(self, data: bytes, now_ns: int) -> None: ...
    def on_closed(self, error: OSError | None, now_ns: int) -> None: ...
    def cut(self) -> None: ...


def library() -> ctypes.PyDLL:
    """The loaded library, compiled if need be.  Raises UserError.

    The interpreter stays locked in its calls: they are short and wait for nothing, and to get the lock back from
    another thread can take longer than they do.
    """
    found = ctypes.PyDLL(str(compiled(SOURCE, FLAGS, ".so")))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("new", pointer, []),
        ("free", None, [pointer]),
        ("fd", ctypes.c_int, [pointer]),
        ("add", ctypes.c_int, [pointer, ctypes.c_int]),
        ("drop", None, [pointer, ctypes.c_int]),
        ("arm", ctypes.c_int, [pointer, ctypes.c_int, ctypes.c_char_p, size, ctypes.c_char_p, size, size, size]),
        ("collect", None, [pointer, ctypes.c_int, pointer, pointer]),
        ("poll", ctypes.c_int, [pointer, ctypes.c_int64, pointer, size, pointer, ctypes.c_int, pointer]),
    ):
        function = getattr(found, f"reads_{name}")
        function.restype, function.argtypes = result, arguments
    return found


class Reads:
    """The sockets of one event loop.  Life: made on it, `close` when no socket is left."""

    def __init__(self, due: Due) -> None:
        """Raises UserError where the library cannot be made, OSError where there is no file left for it."""
        found = library()
        self._handle = found.reads_new()
        if not self._handle:
            raise OSError("no epoll instance")
        self._poll, self._arm, self._collect = found.reads_poll, found.reads_arm, found.reads_collect
        self._add, self._drop, self._free = found.reads_add, found.reads_drop, found.reads_free
        self._due = due
        self._readers: list[Reader | None] = []
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._aside = bytearray(_ASIDE)  # of `collect`: the other may hold notices that are not told yet
        self._notices = bytearray(_NOTICE.size * _MOST)
        self._notices_view = memoryview(self._notices)
        self._one = bytearray(_NOTICE.size)
        self._more = ctypes.c_int(0)
        self._at = _address(self._buffer), _address(self._notices), ctypes.addressof(self._more)
        self._aside_at = _address(self._aside), _address(self._one)
        self._fd = int(found.reads_fd(self._handle))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.turn)

    def add(self, fd: int, reader: Reader) -> int:
        """Read this socket from now on; its slot.  Raises OSError."""
        slot = int(self._add(self._handle, fd))
        if slot < 0:
            raise OSError(-slot, os.strerror(-slot))
        while len(self._readers) <= slot:
            self._readers.append(None)
        self._readers[slot] = reader
        return slot

    def drop(self, slot: int) -> None:
        """Read it no more; its owner closes it now, or has done so.  What is stored is lost: `collect` it before."""
        self._readers[slot] = None
        if self._handle:
            self._drop(self._handle, slot)

    def arm(self, slot: int, known: Known, room: int) -> None:
        """Store its usual events until anything else comes.  room: bytes of body that may be stored."""
        head, tail = known.frame_head, known.frame_tail
        self._arm(self._handle, slot, head, len(head), tail, len(tail), known.most, room)

    def collect(self, slot: int) -> None:
        """Give its owner what is stored now."""
        if not self._handle:
            return
        self._collect(self._handle, slot, *self._aside_at)
        _, _, _, at, count, text, body = _NOTICE.unpack(self._one)
        reader = self._readers[slot]
        if count and reader is not None:
            reader.on_stored(*_stored(memoryview(self._aside), at, count, text), body)

    def close(self) -> None:
        """Stop reading."""
        if self._handle:
            self._loop.remove_reader(self._fd)
            self._free(self._handle)
            self._handle = None

    def turn(self) -> None:
        """Read what is there."""
        buffer, notices, more = self._at
        while self._handle:
            count = self._poll(self._handle, self._due.at_ns, buffer, _BUFFER, notices, _MOST, more)
            self._tell(list(_NOTICE.iter_unpack(self._notices_view[: count * _NOTICE.size])))
            if time.monotonic_ns() >= self._due.at_ns:
                self._due.ring()
            if not self._more.value:
                return

    def _tell(self, notices: list[tuple[int, ...]]) -> None:
        """Hand these over, of one socket each; what is due meanwhile goes out in between."""
        readers, due = self._readers, self._due
        for notice in notices:
            # What nobody asked for comes first: a call that is due must not be given such a connection.
            if (reader := readers[notice[0]]) is not None and not reader.busy:
                self._hand(reader, *notice)
        for notice in notices:
            reader = readers[notice[0]]
            if reader is None:
                continue  # closed above, or let go by an earlier one of these
            if time.monotonic_ns() >= due.at_ns:
                due.ring()
            self._hand(reader, *notice)

    def _hand(self, reader: Reader, _: int, size: int, now: int, at: int, stored: int, text: int, body: int) -> None:
        try:
            if stored:
                reader.on_stored(*_stored(self._view, at, stored, text), body)
            if size > 0:
                begin = at + 8 * stored + text
                reader.on_read(self._view[begin : begin + size].tobytes(), now)
            elif size != _NOTHING:
                reader.on_closed(OSError(-size, os.strerror(-size)) if size else None, now)
        except Exception as error:
            self._loop.call_exception_handler({"message": "reading an answer failed", "exception": error})
            reader.cut()


def _stored(view: memoryview, at: int, count: int, text: int) -> tuple[list[int], list[str]]:
    """The stamps of so many events, and their texts behind them, of so many bytes with their ends."""
    texts = at + 8 * count
    return view[at:texts].cast("q").tolist(), str(view[texts : texts + text - 1], "utf-8").split("\0")


def _address(buffer: bytearray) -> int:
    """Where it lies; it must not be resized."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
