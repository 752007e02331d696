"""W0: the checks on an answer that cost nothing and need no reference answer, as facts of its row alone.

Owns the rule of each check and its bounds.  A failed check makes a complete answer wrong; which rows are complete is
decided in ``outcomes``.  Must always hold: a healthy server fails none of them, so each bound leaves the room that an
honest answer may need, and a fact that is unknown (null) never fails a check.  (``answer`` alone depends on what the
model knows: it is checked where a prompt comes with its answer.)
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PROMPT_TOKENS: Final = "prompt_tokens"  # the server read another prompt: tokenizer, template, double BOS
MODEL: Final = "model"  # another model answered than was asked
FINISH_REASON: Final = "finish_reason"  # none of those the API knows
EMPTY: Final = "empty"  # no text, though some was asked for; whatever the server says it generated
TRUNCATED: Final = "truncated"  # "length" before as many tokens as were asked for: the server has a limit of its own
OVER_LIMIT: Final = "over_limit"  # more tokens than were allowed
REPLACEMENT_CHAR: Final = "replacement_char"  # U+FFFD: bytes lost or detokenised one by one
SPECIAL_TOKEN: Final = "special_token"  # a control token spelled out in the text
LOOP: Final = "loop"  # one n-gram repeated over nearly the whole text
DOMINANCE: Final = "dominance"  # nearly all of it one token: what damaged logits give
FOREIGN_SCRIPT: Final = "foreign_script"  # a good part is in a script that the prompt does not have
COMPLETION_TOKENS: Final = "completion_tokens"  # the usage counts other tokens than came
ANSWER: Final = "answer"  # the right answer is known, and it is not in the text
WRONG_KINDS: Final = (
    PROMPT_TOKENS, MODEL, FINISH_REASON, EMPTY, TRUNCATED, OVER_LIMIT, REPLACEMENT_CHAR, SPECIAL_TOKEN, LOOP, DOMINANCE,
    FOREIGN_SCRIPT, COMPLETION_TOKENS, ANSWER,
)  # fmt: skip

TEXTLESS_FINISH: Final = ("tool_calls", "content_filter")
LEGAL_FINISH: Final = ("stop", "length", *TEXTLESS_FINISH)
#: A text counts as a loop when its ``repeat_share`` reaches this and it is long enough to mean something.  Lists and
#: refrains of healthy models repeat themselves too, but not over nine tenths of the tail of a text.
LOOP_SHARE: Final = 0.9
LOOP_MIN_CHARS: Final = 64
DOMINANCE_SHARE: Final = 0.8  # of 16 tokens and more; "1, 2, 3" has a half of commas
FOREIGN_LETTERS: Final = 16
FOREIGN_SHARE: Final = 0.3  # of the characters; a name or a quotation in its own script stays below
#: Our count of the tokens is that of the text, which a sampled text need not have been made of (" th" + "e").
COMPLETION_SLACK: Final = 3
COMPLETION_SHARE: Final = 0.25
OVER_SLACK: Final = 1  # an end token that is counted and never shown
ANSWER_ROOM: Final = 16  # tokens that an answer cut by its limit must have had to be blamed for what it does not say

#: The columns that ``failures`` reads.
COLUMNS: Final = (
    "finish_reason", "output_chars", "replacement_chars", "special_leaks", "repeat_share", "expected_output_tokens",
    "prompt_tokens_expected", "prompt_tokens_reported", "completion_tokens_counted", "completion_tokens_reported",
    "usage_estimated", "model", "model_asked", "dominance", "foreign_letters", "chunks", "answer_matches",
)  # fmt: skip

Bools = npt.NDArray[np.bool_]


def failures(requests: pa.Table) -> npt.NDArray[np.int8]:
    """The first failed check of each row as a position in WRONG_KINDS, -1 where all hold; for complete answers only."""
    finish = requests.column("finish_reason")
    chars = _numbers(requests, "output_chars", np.nan)
    counted = _numbers(requests, "completion_tokens_counted", np.nan)
    told = _numbers(requests, "completion_tokens_reported", np.nan)
    planned = _numbers(requests, "expected_output_tokens", np.nan)
    estimated = _bools(pc.fill_null(requests.column("usage_estimated"), False))
    expected = _numbers(requests, "prompt_tokens_expected", np.nan)
    prompt = _numbers(requests, "prompt_tokens_reported", np.nan)
    cut = _bools(pc.fill_null(pc.equal(finish, "length"), False))
    # An answer cut by its length limit may end inside a character: one U+FFFD there is nobody's fault.
    allowed = cut.astype(np.float64)

    # A call of a tool or a filtered answer may carry no text.
    texts = ~_bools(pc.is_in(finish, pa.array(TEXTLESS_FINISH)))
    asked = (np.nan_to_num(planned, nan=1.0) > 0) & texts
    matches = requests.column("answer_matches")
    unmatched = _bools(pc.fill_null(pc.invert(matches), False))
    foreign = _numbers(requests, "foreign_letters", 0)

    # Comparisons with NaN (not known) are false.
    rules: tuple[tuple[str, Bools], ...] = (
        (PROMPT_TOKENS, ~estimated & ~np.isnan(expected) & ~np.isnan(prompt) & (expected != prompt)),
        (MODEL, _other_models(requests)),
        (FINISH_REASON, ~_bools(pc.fill_null(pc.is_in(finish, pa.array(LEGAL_FINISH)), False))),
        (EMPTY, asked & (chars == 0) & (np.nan_to_num(counted) == 0)),
        (TRUNCATED, cut & ~estimated & (told < planned)),
        (OVER_LIMIT, ~estimated & (planned > 0) & (told > planned + OVER_SLACK)),
        (REPLACEMENT_CHAR, _numbers(requests, "replacement_chars", 0) > allowed),
        (SPECIAL_TOKEN, _numbers(requests, "special_leaks", 0) > 0),
        (LOOP, (_numbers(requests, "repeat_share", 0) >= LOOP_SHARE) & (chars >= LOOP_MIN_CHARS)),
        (DOMINANCE, _numbers(requests, "dominance", 0) >= DOMINANCE_SHARE),
        (FOREIGN_SCRIPT, (foreign >= FOREIGN_LETTERS) & (foreign >= FOREIGN_SHARE * chars)),
        (COMPLETION_TOKENS, ~estimated & texts & _miscounted(told, counted, _numbers(requests, "chunks", np.nan))),
        (ANSWER, unmatched & (~cut | (counted >= ANSWER_ROOM))),
    )
    kinds = np.full(requests.num_rows, -1, dtype=np.int8)
    for kind, failed in reversed(rules):  # the first rule is written last and stays
        kinds[failed] = WRONG_KINDS.index(kind)
    return kinds


def same_model(asked: str, said: str) -> bool:
    """Is this the model that was asked?  Also with a vendor before it, or the date of a snapshot behind it."""
    own, other = asked.rsplit("/", 1)[-1], said.rsplit("/", 1)[-1]
    return own == other or re.fullmatch(re.escape(own) + r"-\d{4}[\d-]*", other) is not None


def _other_models(requests: pa.Table) -> Bools:
    pairs = pa.table({"asked": requests.column("model_asked"), "said": requests.column("model")})
    other = _bools(pc.fill_null(pc.not_equal(pairs["asked"], pairs["said"]), False))
    if other.any():  # seldom: then each pair of names is looked at once
        places = np.flatnonzero(other)
        found = pairs.take(pa.array(places)).to_pylist()
        judged = {(one["asked"], one["said"]): None for one in found}
        same = {pair for pair in judged if same_model(*pair)}
        other[[place for place, one in zip(places, found, strict=True) if (one["asked"], one["said"]) in same]] = False
    return other


def _miscounted(
    told: npt.NDArray[np.float64], counted: npt.NDArray[np.float64], chunks: npt.NDArray[np.float64]
) -> Bools:
    """Off from our count and from the chunks that came (one a token, on most servers): then neither explains it."""
    slack = np.maximum(COMPLETION_SLACK, COMPLETION_SHARE * told)
    by_text: Bools = np.abs(told - counted) > slack
    by_chunks: Bools = np.abs(told - chunks) > slack
    return by_text & by_chunks


def _numbers(table: pa.Table, name: str, null: float) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = pc.fill_null(table.column(name).cast(pa.float64()), float(null)).to_numpy()
    return values


def _bools(values: pa.ChunkedArray) -> Bools:
    array: Bools = values.to_numpy()
    return array.astype(np.bool_)
