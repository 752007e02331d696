"""Reader of RAGPulse: JSONL, `timestamp` a **string** of seconds, `hash_ids` an object of component lists.

The file holds two weeks one after the other and its clock starts again at 0 in between.  Sorting would lay the weeks
over each other, so a restart is an error that names the line, or with restart "append" the weeks are put one behind the
other (a whole number of weeks is added).  A step back of less than an hour is an inversion and is sorted.
The ids name passages, prompts and questions, not blocks of tokens: they tell what was seen before, not how long it is.
Source: flashserve/RAGPulse (its data files carry no licence of their own); Wang et al., arXiv:2511.12979.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from loadgen.traces.lines import first_objects, json_rows
from loadgen.traces.trace import APPEND, NO_SESSION, BadValueError, Batch, Choices, Rows
from loadgen.traces.values import SECOND_NS, json_tokens, number_ns
from models.errors import UserError

FORMAT: Final = "ragpulse"
NOT_BUILT: Final = (
    "its ids name passages, whose lengths it does not tell: prompts share by session, not by passage, so a prefix "
    "cache will hit less than with the recorded traffic"
)
WEEK_NS: Final = 604_800 * SECOND_NS
RESTART_NS: Final = 3600 * SECOND_NS
#: In the order in which they stand in a prompt.
COMPONENTS: Final = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


def recognises(head: bytes) -> bool:
    """Does this look like RAGPulse?  head: the first bytes of the file."""
    first = next(iter(first_objects(head)), None)
    return first is not None and isinstance(first.get("timestamp"), str) and isinstance(first.get("hash_ids"), dict)


def read(path: Path, rows: Rows, choices: Choices) -> Iterator[Batch]:
    """All usable rows, batch by batch.  Raises UserError where the clock starts again and no policy was chosen."""
    sessions: dict[str, int] = {}
    known: dict[tuple[str, Any], int] = {}
    latest = shift = 0
    rows.notes.append(NOT_BUILT)
    for number, row in json_rows(path, rows, FORMAT):
        key = "timestamp"
        try:
            stamp = number_ns(row.get(key), SECOND_NS) + shift
            if stamp < latest - RESTART_NS:
                if choices.restart != APPEND:
                    raise UserError(
                        f"the clock goes back from {(latest - shift) / SECOND_NS:,.0f} to "
                        f"{(stamp - shift) / SECOND_NS:,.0f} s: two weeks stand one behind the other",
                        where=f"{path}:{number}",
                        remedy="put them in a row: --trace-restart append; or cut the file at this line",
                    )
                step = -(-(latest - stamp) // WEEK_NS) * WEEK_NS
                shift, stamp = shift + step, stamp + step
                rows.notes.append(f"the clock starts again at line {number}: {shift // SECOND_NS:,} s were added")
            latest = max(latest, stamp)
            key = "input_length"
            tokens_in = json_tokens(row.get(key))
            key = "output_length"
            tokens_out = json_tokens(row.get(key))
            key = "hash_ids"
            ids = [known.setdefault(one, len(known)) for one in _components(row.get(key))]
        except BadValueError as bad:
            rows.drop(str(bad), number, key, str(row.get(key, "(missing)")))
            continue
        name = row.get("session_id")
        session = sessions.setdefault(name, len(sessions)) if isinstance(name, str) and name else NO_SESSION
        rows.keep(stamp, tokens_in, tokens_out, session=session, ids=ids)
        if rows.full:
            yield rows.take()
    yield rows.take()


def _components(value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise BadValueError("bad_ids")
    for name in (*COMPONENTS, *(extra for extra in value if extra not in COMPONENTS)):
        found = value.get(name, [])
        if not isinstance(found, list) or not all(type(one) in (int, str) for one in found):
            raise BadValueError("bad_ids")
        for one in found:
            yield name, one
