"""Reader of the Qwen Bailian traces: the keys of Mooncake with `chat_id,parent_chat_id,type,turn`, in other units.

timestamp is float **seconds** and a prefix block has 16 tokens, under the very key names of Mooncake.  A session is a
root request (parent -1) with all its descendants.
Source: alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0); Wang et al., KVCache in the Wild, ATC 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.traces.block_size import BlockSize
from loadgen.traces.lines import first_objects, json_rows
from loadgen.traces.mooncake import CHAT, KEYS, drop_row, looks_like, take_row
from loadgen.traces.trace import BadValueError, Batch, Choices, Rows
from loadgen.traces.values import UNITS_NS, number_ns

FORMAT: Final = "bailian"
BLOCK: Final = 16
PARENT: Final = "parent_chat_id"


def recognises(head: bytes) -> bool:
    """Does this look like a Bailian trace?  head: the first bytes of the file."""
    first = next(iter(first_objects(head)), None)
    return first is not None and looks_like(first) and {CHAT, PARENT} <= set(first)


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch."""
    unit_ns = UNITS_NS[choices.time_unit or "s"]
    blocks = BlockSize(BLOCK, choices.block_size)
    root: dict[int, int] = {}
    for number, row in json_rows(path, rows, FORMAT):
        try:
            stamp = number_ns(row.get(KEYS[0]), unit_ns)
            chat, parent = row.get(CHAT), row.get(PARENT)
            if type(chat) is not int or type(parent) is not int or not 0 <= chat < 1 << 62:
                raise BadValueError("bad_chat_id", CHAT)
            session = root[chat] = root.get(parent, chat)
            take_row(row, stamp, rows, blocks, session)
        except BadValueError as bad:
            drop_row(bad, row, number, rows)
        if rows.full:
            yield rows.take()
    rows.block_size = blocks.found(rows)
    yield rows.take()
