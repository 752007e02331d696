"""Reader of the Mooncake traces: JSONL `timestamp,input_length,output_length,hash_ids`.

timestamp is whole milliseconds from the start; a file whose stamps have a fraction is in another unit and is refused
until the user names it, so that 59 minutes never become 41 days.  hash_ids are prefix blocks of 512 tokens, checked on
every row.  The arrivals of the conversation file sit on a grid of about 3 s, an artefact of its recorder.
Source: kvcache-ai/Mooncake (Apache-2.0); Qin et al., Mooncake, FAST 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from loadgen.traces.block_size import BlockSize
from loadgen.traces.lines import first_objects, json_rows
from loadgen.traces.trace import BadValueError, Batch, Choices, Rows
from loadgen.traces.values import UNITS_NS, json_tokens, number_ns
from models.errors import UserError

FORMAT: Final = "mooncake"
BLOCK: Final = 512
KEYS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
CHAT: Final = "chat_id"  # of the Bailian traces, which have the same keys in another unit


def recognises(head: bytes) -> bool:
    """Does this look like a Mooncake trace?  head: the first bytes of the file."""
    first = next(iter(first_objects(head)), None)
    return first is not None and looks_like(first) and CHAT not in first


def looks_like(row: dict[str, Any]) -> bool:
    """The keys that Mooncake and Bailian share."""
    return set(KEYS) <= set(row) and not isinstance(row["timestamp"], str) and isinstance(row["hash_ids"], list)


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError for a stamp that is not in milliseconds."""
    unit_ns = UNITS_NS[choices.time_unit or "ms"]
    blocks = BlockSize(BLOCK, choices.block_size)
    for number, row in json_rows(path, rows, FORMAT):
        key = KEYS[0]
        try:
            stamp = row.get(key)
            if choices.time_unit is None and isinstance(stamp, float) and stamp % 1:
                raise UserError(
                    f"timestamp {stamp!r} is no whole number of milliseconds, which {FORMAT} counts in",
                    where=f"{path}:{number}",
                    remedy="say the unit: --time-unit s (or ms, us, ns)",
                )
            take_row(row, number_ns(stamp, unit_ns), rows, blocks)
        except BadValueError as bad:
            drop_row(bad, row, number, rows)
        if rows.full:
            yield rows.take()
    rows.block_size = blocks.found(rows)
    yield rows.take()


def take_row(row: dict[str, Any], stamp_ns: int, rows: Rows, blocks: BlockSize, session: int = -1) -> None:
    """Lengths and prefix ids of one row.  Raises BadValueError with the reason and the key."""
    tokens_in = _named(KEYS[1], row, json_tokens)
    tokens_out = _named(KEYS[2], row, json_tokens)
    ids = row.get(KEYS[3])
    if not isinstance(ids, list) or not all(type(one) is int and abs(one) < 1 << 62 for one in ids):
        raise BadValueError("bad_ids", KEYS[3])
    try:
        blocks.take(tokens_in, len(ids))
    except BadValueError as bad:
        raise BadValueError(str(bad), KEYS[3]) from None
    rows.keep(stamp_ns, tokens_in, tokens_out, session=session, ids=ids)


def drop_row(bad: BadValueError, row: dict[str, Any], number: int, rows: Rows) -> None:
    """Drop with the key that is at fault (the stamp, where none is named) and its value."""
    key = bad.args[1] if len(bad.args) > 1 else KEYS[0]
    rows.drop(bad.args[0], number, key, str(row.get(key, "(missing)")))


def _named(key: str, row: dict[str, Any], convert: Any) -> int:
    try:
        found: int = convert(row.get(key))
    except BadValueError as bad:
        raise BadValueError(str(bad), key) from None
    return found
