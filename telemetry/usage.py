"""Do the tokens that a server reports agree with those that were counted, and how many came from its cache?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

USAGE_TOLERANCE: Final = 0.10
EXAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's count of completion tokens beside ours, over answered requests.

    estimated: no usage came, so ours stands.  disagreeing: off by more than USAGE_TOLERANCE; examples: their indexes.
    """

    compared: int
    estimated: int
    disagreeing: int
    examples: tuple[int, ...]


def usage_of(requests: pa.Table) -> Usage:
    """Of the answered requests of a run."""
    columns = ("index", "completion_tokens_reported", "completion_tokens_counted", "usage_estimated")
    answered = requests.select(columns).filter(pc.is_null(requests.column("error")))
    estimated = int(pc.sum(pc.fill_null(answered.column("usage_estimated"), False)).as_py() or 0)
    told = answered.filter(
        pc.and_(
            pc.is_valid(answered.column("completion_tokens_reported")),
            pc.is_valid(answered.column("completion_tokens_counted")),
        )
    )
    ours = told.column("completion_tokens_counted").cast(pa.float64())
    off = pc.abs(pc.subtract(told.column("completion_tokens_reported").cast(pa.float64()), ours))
    # One token may be an end token that is counted and never shown.
    bad = told.filter(pc.and_(pc.greater(off, pc.multiply(ours, USAGE_TOLERANCE)), pc.greater(off, 1.0)))
    examples = tuple(bad.column("index").slice(0, EXAMPLES).to_pylist())
    return Usage(told.num_rows, estimated, bad.num_rows, examples)


def cached_share(requests: pa.Table) -> float | None:
    """Prompt tokens found in the server's prefix cache, of those whose requests tell."""
    told = requests.select(("cached_tokens", "prompt_tokens_reported")).drop_null()
    prompt = pc.sum(told.column("prompt_tokens_reported")).as_py() or 0
    return float(pc.sum(told.column("cached_tokens")).as_py() or 0) / prompt if prompt else None
