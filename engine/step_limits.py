"""How large a step may be: as configured, or less while the device has shown that it has no memory for that.

From then on a step has half the tokens of the one that did not fit, and the batch no more requests than that; what is
above the new batch goes back into the queue.  After ``CALM`` steps that fit, both are doubled, up to what is
configured: a neighbour on the device may have gone.  So a lack of memory lengthens the queue, where admission sees it,
and fails nobody whose step can be had in parts.
"""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger("tailspan.engine")

CALM: Final = 250


class StepLimits:
    """budget: tokens of a step.  batch: requests that run; never above budget.  shortages: steps that did not fit."""

    def __init__(self, budget: int, batch: int) -> None:
        self.budget, self.batch = budget, batch
        self.shortages = 0
        self._most = budget, batch
        self._calm = 0  # steps since the last shortage

    def short(self, tokens: int) -> None:
        """A step of so many tokens did not fit."""
        self.shortages += 1
        self._calm = 0
        self.budget = min(self.budget, max(1, tokens // 2))
        self.batch = min(self.batch, self.budget)
        log.warning(
            "no device memory for a step of %d tokens: steps of at most %d tokens and %d requests from now on",
            tokens, self.budget, self.batch,
        )  # fmt: skip

    @property
    def reduced(self) -> bool:
        """Is it less than configured?"""
        return (self.budget, self.batch) != self._most

    def fitted(self) -> None:
        """A step fitted."""
        self._calm += 1
        if self._calm >= CALM:
            self._calm = 0
            self.budget = min(2 * self.budget, self._most[0])
            self.batch = min(2 * self.batch, self._most[1])
            log.info("steps of at most %d tokens and %d requests again", self.budget, self.batch)
