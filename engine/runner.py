"""What every runner is to the engine: something that takes the slices of a step and gives rows back.

``engine.backends`` chooses one.  A runner owns weights and KV memory; it knows nothing of queues or time.  One that
computes while the host goes on may have ``launch(slices)`` as well: it starts the step and returns what reads its
tokens (``engine.flight.Read``), or None where a row's token cannot be drawn without the host.  ``feeds`` then says
whether a step may be launched before the one before it was read, with decodes whose token the host does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.scheduler import Slice

if TYPE_CHECKING:
    import torch


class Runner(Protocol):
    """name: of the kernels, for logs and metrics.  kv_blocks: pages it has.  max_context: tokens of one request.

    has_logits: False for one that only takes the time of a step, and gives the tokens themselves.
    """

    name: str
    kv_blocks: int
    max_context: int
    has_logits: bool

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Logits [sum of the slices' ``rows``, vocabulary] float32; without logits the tokens [rows] int64."""
