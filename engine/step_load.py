"""What a step has to do, in the five numbers that its time can depend on.

Counted once a step from the plan; the floor (``engine.floors``), the step log and the simulated time
(``engine.step_model``) all read the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.scheduler import Slice


class StepLoad(NamedTuple):
    """The arguments of ``models.roofline.StepCost.floor_ns``, in its order.

    prefill_tokens: of prompts (or recomputed).  decode_seqs: sequences with one new token.  context_tokens: tokens
    that hold KV after the step, summed over its sequences.  sampled_rows: rows whose logits are wanted.
    attended: pairs of a query and a token that it sees.
    """

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    sampled_rows: int
    attended: int

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return self.prefill_tokens + self.decode_seqs


def load_of(slices: Sequence[Slice]) -> StepLoad:
    """Count a plan."""
    tokens = decodes = context = sampled = more = 0
    for piece in slices:
        n = piece.n
        tokens += n
        context += piece.start + n
        sampled += piece.sample
        decodes += piece.decode
        if n > 1:  # n queries see start + 1 .. start + n tokens; one query sees the context
            more += (n - 1) * piece.start + n * (n + 1) // 2 - n
    return StepLoad(tokens - decodes, decodes, context, sampled, context + more)
