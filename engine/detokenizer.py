"""From token bytes to text that is safe to send: whole characters only, and nothing of a stop string.

Bytes are decoded incrementally; text that may still become a stop string is held back.  What was released never
changes, so streamed deltas joined equal the answer that is not streamed, however tokens cut characters or stops.
"""

from __future__ import annotations

import codecs


class TextStream:
    """Text of one answer, fed token by token.

    The stop string whose end comes first wins; of two that end together, the longer.  Bytes that are not UTF-8
    become U+FFFD; an unfinished character at the very end of an answer is dropped, since it is no text yet.
    """

    __slots__ = ("_decoder", "_held", "_stops", "decoded", "stopped")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = stops
        self._held = ""
        self.stopped = False
        self.decoded = 0  # characters so far, sent or not

    def push(self, token: bytes) -> str:
        """Add the bytes of one token; returns the text that may be sent now.  Sets ``stopped`` at a stop string."""
        new = self._decoder.decode(token)
        self.decoded += len(new)
        text = self._held + new
        if not self._stops:
            return text
        best: tuple[int, int] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best):
                best = (at + len(stop), at)
        if best is not None:
            self.stopped, self._held = True, ""
            return text[: best[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The answer is over without a stop string: releases what was held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` (shorter than ``stop``)."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
