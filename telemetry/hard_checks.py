"""W0: the checks on an answer that cost nothing and need no reference answer, as facts of its row alone.

Owns the rule of each check and its bounds.  A failed check makes a complete answer wrong; which rows are complete is
decided in ``outcomes``.  Must always hold: a healthy server fails none of them, so each bound leaves the room that an
honest answer may need, and a fact that is unknown (null) never fails a check.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PROMPT_TOKENS: Final = "prompt_tokens"  # the server read another prompt: tokenizer, template, double BOS
FINISH_REASON: Final = "finish_reason"  # none of those the API knows
EMPTY: Final = "empty"  # no text, though some was asked for; whatever the server says it generated
REPLACEMENT_CHAR: Final = "replacement_char"  # U+FFFD: bytes lost or detokenised one by one
SPECIAL_TOKEN: Final = "special_token"  # a control token spelled out in the text
LOOP: Final = "loop"  # one n-gram repeated over nearly the whole text
WRONG_KINDS: Final = (PROMPT_TOKENS, FINISH_REASON, EMPTY, REPLACEMENT_CHAR, SPECIAL_TOKEN, LOOP)

TEXTLESS_FINISH: Final = ("tool_calls", "content_filter")
LEGAL_FINISH: Final = ("stop", "length", *TEXTLESS_FINISH)
#: A text counts as a loop when its ``repeat_share`` reaches this and it is long enough to mean something.  Lists and
#: refrains of healthy models repeat themselves too, but not over nine tenths of the tail of a text.
LOOP_SHARE: Final = 0.9
LOOP_MIN_CHARS: Final = 64

#: The columns that ``failures`` reads.
COLUMNS: Final = (
    "finish_reason", "output_chars", "replacement_chars", "special_leaks", "repeat_share", "expected_output_tokens",
    "prompt_tokens_expected", "prompt_tokens_reported", "completion_tokens_counted", "usage_estimated",
)  # fmt: skip

Bools = npt.NDArray[np.bool_]


def failures(requests: pa.Table) -> npt.NDArray[np.int8]:
    """The first failed check of each row as a position in WRONG_KINDS, -1 where all hold; for complete answers only."""
    finish = requests.column("finish_reason")
    chars = _numbers(requests, "output_chars", np.nan)
    counted = _numbers(requests, "completion_tokens_counted", 0)
    estimated = _bools(pc.fill_null(requests.column("usage_estimated"), False))
    expected = _numbers(requests, "prompt_tokens_expected", np.nan)
    prompt = _numbers(requests, "prompt_tokens_reported", np.nan)
    # An answer cut by its length limit may end inside a character: one U+FFFD there is nobody's fault.
    allowed = _bools(pc.fill_null(pc.equal(finish, "length"), False)).astype(np.float64)

    # A call of a tool or a filtered answer may carry no text.
    asked = (_numbers(requests, "expected_output_tokens", 1) > 0) & ~_bools(pc.is_in(finish, pa.array(TEXTLESS_FINISH)))

    rules: tuple[tuple[str, Bools], ...] = (
        (PROMPT_TOKENS, ~estimated & ~np.isnan(expected) & ~np.isnan(prompt) & (expected != prompt)),
        (FINISH_REASON, ~_bools(pc.fill_null(pc.is_in(finish, pa.array(LEGAL_FINISH)), False))),
        (EMPTY, asked & (chars == 0) & (counted == 0)),
        (REPLACEMENT_CHAR, _numbers(requests, "replacement_chars", 0) > allowed),
        (SPECIAL_TOKEN, _numbers(requests, "special_leaks", 0) > 0),
        (LOOP, (_numbers(requests, "repeat_share", 0) >= LOOP_SHARE) & (chars >= LOOP_MIN_CHARS)),
    )
    kinds = np.full(requests.num_rows, -1, dtype=np.int8)
    for kind, failed in reversed(rules):  # the first rule is written last and stays
        kinds[failed] = WRONG_KINDS.index(kind)
    return kinds


def _numbers(table: pa.Table, name: str, null: float) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = pc.fill_null(table.column(name).cast(pa.float64()), float(null)).to_numpy()
    return values


def _bools(values: pa.ChunkedArray) -> Bools:
    array: Bools = values.to_numpy()
    return array.astype(np.bool_)
