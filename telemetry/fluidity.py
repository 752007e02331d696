"""Fluidity: the share of per-token deadlines that an answer met, as a reader who reads at one pace would see it.

Owns the definition (after the fluidity-index of arXiv 2407.07000, used again in 2507.09019):

* The first token is due at the ttft deadline ``D``; where there is none it is due when it comes.
* Token i is due ``d`` seconds after token i - 1 was *read*, and a token is read when it is due or when it comes,
  whichever is later.  So slack that was earned early is carried forward, and after a stall the clock starts anew.
* A token that comes late misses ``floor((arrival - due) / d) + 1`` deadlines: every deadline that the stall covered.
* ``fluidity = tokens in time / (tokens in time + deadlines missed)``, in 0..1; 1 is never late.

Must always hold: the same stall costs no more late in an answer than early, since slack can only have grown; the order
of rows does not matter; an answer without token chunks has no fluidity (NaN), never 0 or 1.

A chunk of k tokens brings all of them at its moment; only its first can be late.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

#: Rows are laid out as a matrix in batches of so many cells, sorted by length, so that memory stays flat.
CELLS: Final = 1 << 21
SLICE: Final = 20_000  # rows whose moments are unpacked at a time
#: Moments are kept in single precision (8 us at 100 s); what is late by less is on time.
TOLERANCE_S: Final = 1e-4

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def of_rows(rows: pa.Table, first_due: Floats, per_token: Floats) -> Floats:
    """Fluidity of every row (columns chunk_s, chunk_tokens); NaN without chunks or without a pace.

    first_due: ttft deadline in seconds after the intended send, inf for none.  per_token: seconds per token, NaN: none.
    """
    if rows.num_rows > SLICE:
        parts = [slice(at, at + SLICE) for at in range(0, rows.num_rows, SLICE)]
        return np.concatenate([of_rows(rows.slice(p.start, SLICE), first_due[p], per_token[p]) for p in parts])
    times, starts, lengths = _flat(rows.column("chunk_s"))
    counts, token_starts, token_lengths = _flat(rows.column("chunk_tokens"))
    tokens = counts.astype(np.int64)
    usable = (lengths > 0) & (lengths == token_lengths) & (per_token > 0)
    found = np.full(rows.num_rows, np.nan)
    order = np.flatnonzero(usable)
    order = order[np.argsort(lengths[order], kind="stable")]
    at = 0
    while at < len(order):
        # Sorted by length: the widest row of a batch is its last, so grow until the matrix would be too large.
        step = max(1, CELLS // int(lengths[order[min(len(order), at + 4096) - 1]]))
        batch = order[at : at + min(4096, step)]
        found[batch] = _batch(
            times, tokens, starts[batch], token_starts[batch], lengths[batch], first_due[batch], per_token[batch]
        )
        at += len(batch)
    return found


def of_one(chunk_s: list[float], chunk_tokens: list[int], first_due: float, per_token: float) -> float:
    """Fluidity of one answer, token by token: the definition itself, kept as the reference of ``of_rows``."""
    met = missed = 0
    due = first_due
    for moment, count in zip(chunk_s, chunk_tokens, strict=True):
        for _ in range(count):
            if np.isinf(due):
                due = moment
            late = moment - due - TOLERANCE_S
            if late > 0:
                missed += int(late // per_token) + 1
                due = moment
            else:
                met += 1
            due += per_token
    return met / (met + missed) if met + missed else float("nan")


def _batch(
    times: Floats, tokens: Ints, starts: Ints, token_starts: Ints, lengths: Ints, first_due: Floats, pace: Floats
) -> Floats:
    width = int(lengths.max())
    column = np.arange(width)
    inside = column < lengths[:, None]
    moment = times[np.where(inside, starts[:, None] + column, 0)]
    count = np.where(inside, tokens[np.where(inside, token_starts[:, None] + column, 0)], 0)
    position = np.cumsum(count, axis=1) - count  # of the first token of each chunk
    # In the frame that moves with the reader, token i is due at the latest moment so far: a running maximum.
    moved = np.where(inside, moment - position * pace[:, None], -np.inf)
    start = np.where(np.isinf(first_due), moved[:, 0], first_due)
    due = np.maximum.accumulate(np.concatenate([start[:, None], moved], axis=1), axis=1)[:, :-1]
    behind = np.where(inside & (count > 0), moved - due, 0.0) - TOLERANCE_S
    late = behind > 0
    covered = np.where(late, np.floor(behind / pace[:, None]) + 1, 0.0)
    met = count.sum(axis=1) - late.sum(axis=1)
    total = met + covered.sum(axis=1)
    share: Floats = np.divide(met, total, out=np.full(len(met), np.nan), where=total > 0)
    return share


def _flat(column: pa.ChunkedArray) -> tuple[Floats, Ints, Ints]:
    """Values, and start and length of each row in them."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no chunk at all
        array = pa.array([], array.type)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    flat = array.flatten().cast(pa.float64())  # flatten leaves nulls and offsets out
    values: Floats = pc.fill_null(flat, 0.0).to_numpy(zero_copy_only=False)
    starts = np.cumsum(lengths) - lengths
    return (values if len(values) else np.zeros(1)), starts, lengths
