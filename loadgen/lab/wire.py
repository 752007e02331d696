"""What a bad way between client and server does to an answer, in virtual time: on the row that the client would write.

The same kinds as the fault proxy has (loadgen.lab.proxy).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from loadgen.lab.world import Wire
from telemetry import names

_MOMENTS = ("headers_s", "first_chunk_s", "first_token_s", "first_content_s", "last_token_s", "end_s")


def hits(seed: int, kind: str, index: int, share: float) -> bool:
    """Does it meet this request?  The same answer every time."""
    if share >= 1:
        return True
    digest = hashlib.blake2b(f"{seed} {kind} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


def apply(wires: Sequence[Wire], row: dict[str, Any], index: int, limit_s: float) -> None:
    """Change the row of one attempt in place.  limit_s: after which its client gives up."""
    for wire in wires:
        if row["error"] is not None or not hits(wire.seed, wire.kind, index, wire.share):
            continue
        if wire.kind == "delay":
            for name in _MOMENTS:
                if row[name] is not None:
                    row[name] += wire.size
            if row["end_s"] - row["sent_s"] > limit_s:
                _fail(row, names.TIMEOUT_TOTAL, row["sent_s"] + limit_s, "the client gave up")
        elif wire.kind in ("cut", "reset"):
            first, last = row["first_token_s"], row["last_token_s"]
            at = first + wire.size * (last - first)
            cut = wire.kind == "cut"
            detail = "no finish reason: the stream ended in order" if cut else "reset by the server"
            _fail(row, names.STREAM_CUT if cut else names.RESET, at, detail)
        else:
            raise ValueError(f"no wire of the kind {wire.kind!r}")


def out_of_patience(row: dict[str, Any], limit_s: float) -> None:
    """A client that gave up saw nothing after that, whenever the engine came to hear of it."""
    if row["error"] in (names.TIMEOUT_FIRST_TOKEN, names.TIMEOUT_TOTAL):
        at = row["sent_s"] + limit_s
        seen = row["first_token_s"] is not None and row["first_token_s"] <= at
        if not seen:
            row |= dict.fromkeys(_MOMENTS[:-1])
        _fail(row, names.TIMEOUT_TOTAL if seen else names.TIMEOUT_FIRST_TOKEN, at, f"after {limit_s:.4g} s")


def _fail(row: dict[str, Any], reason: str, at_s: float, detail: str) -> None:
    for name in _MOMENTS:
        if row[name] is not None and row[name] > at_s:
            row[name] = at_s
    # the server's account comes with the end of the answer, which did not come
    lost = [name for name in row if name.startswith("phase_")] + ["server_duration_s", "tpot_s"]
    lost += ["prompt_tokens_reported", "completion_tokens_reported", "completion_tokens_counted", "cached_tokens"]
    row |= dict.fromkeys(lost)
    row |= {"error": reason, "error_detail": detail, "finish_reason": None, "truncated_by_limit": None}
    row |= {"done_marker": False, "end_s": at_s}
