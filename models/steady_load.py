"""A device under a steady load, by the iron law and Little's law: which rate could it carry at most?

    N requests hold KV, each for as many steps as its answer has tokens, so N / answer of them are prefilled in a step:

    step = fixed + (weights + N context KV) / bandwidth + FLOPs(N decodes, N / answer prompts) / (peak * utilisation)
    rate = N / (answer * step)                                                       by Little's law
    N <= budget / (1 + prompt / answer)                                              or prompts wait for the budget

What must hold: nothing queues and nothing varies here, so for the limits given it bounds the rate of any real run with
these lengths from above, as far as the utilisation does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.roofline import StepCost

BLOCK: int = 16  # tokens in a KV page; half of one is wasted in the mean

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine allows: requests that hold KV, tokens in a step, tokens in the KV pool (None: unknown)."""

    max_batch: int | None = None
    token_budget: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """rate: requests/s.  residents: how many hold KV there.  step_s: seconds of a step.  binds: what ends it.

    binds: "batch", "token budget" or "KV pool" (limits of the engine), "time per token" (of the SLO), or "device":
    more residents would not raise the rate any more.
    """

    rate: float
    residents: float
    step_s: float
    binds: str


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """inputs, outputs: tokens of the requests.  utilisation: share of the peak that matrix products reach."""

    cost: StepCost
    inputs: Ints
    outputs: Ints
    utilisation: float = 1.0

    @property
    def answer(self) -> float:
        """Mean tokens of an answer: steps that a request holds KV."""
        return float(self.outputs.mean())

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return float(self.inputs.mean())

    @property
    def context(self) -> float:
        """Tokens of KV that a resident request holds, half a page of rounding included: its mean over its stay."""
        held = self.outputs * (self.inputs + self.outputs / 2 + BLOCK / 2)
        return float(held.sum() / self.outputs.sum())

    def step_s(self, residents: float) -> float:
        """Seconds of the mean step with so many requests resident."""
        fresh = residents / self.answer  # prefilled in the step
        tokens = fresh * self.prompt + residents - fresh
        pairs = residents * self.context + fresh * float((self.inputs.astype(np.float64) ** 2).mean()) / 2
        moved = self.cost.step_bytes(tokens, residents * self.context, residents)
        flops = self.cost.linear_flops(tokens, residents) + self.cost.attention_flops(pairs)
        device = self.cost.device
        return moved / device.bandwidth + flops / (device.flops * self.utilisation) + device.fixed_ns / 1e9

    def residents(self, pool_tokens: float, used: float = 1.0) -> float:
        """Requests that fill a share of a pool."""
        return used * pool_tokens / self.context

    def rate_of(self, residents: float) -> float:
        """Requests/s with so many resident."""
        return residents / (self.answer * self.step_s(residents))

    def rate(self, pool_tokens: float, used: float = 1.0) -> float:
        """Requests/s that fill a share of a pool."""
        return self.rate_of(self.residents(pool_tokens, used))

    def most(self, budget: int) -> float:
        """Residents for which a budget is just enough: each step decodes them, and prefills what replaces them."""
        return budget / (1 + self.prompt / self.answer)

    def bound(self, limits: Limits, token_s: float | None = None) -> Bound:
        """The highest rate within the limits; token_s: the SLO's seconds per output token, which a step may take."""
        found: list[tuple[float, str]] = []
        if limits.max_batch is not None:
            found.append((float(limits.max_batch), "batch"))
        if limits.token_budget is not None:
            found.append((self.most(limits.token_budget), "token budget"))
        if limits.kv_tokens is not None:
            found.append((self.residents(limits.kv_tokens), "KV pool"))
        if token_s is not None:
            found.append((self._residents_within(token_s), "time per token"))
        # beyond this many the weights' share of a step is below 0.1 %, and more residents bring nothing
        found.append((self._saturation(), "device"))
        residents, binds = min(found, key=lambda one: one[0])
        residents = max(residents, 1e-9)
        return Bound(self.rate_of(residents), residents, self.step_s(residents), binds)

    def _residents_within(self, step_s: float) -> float:
        """The most residents whose step takes no longer; 0 where not even an empty one does."""
        low, high = 0.0, 1.0
        if self.step_s(1e-9) > step_s:
            return 0.0
        while self.step_s(high) <= step_s and high < 1e9:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.step_s(middle) <= step_s else (low, middle)
        return low

    def _saturation(self) -> float:
        """Residents from which on the rate is within 0.1 % of what no number of them exceeds."""
        fixed = self.step_s(1e-9)
        slope = self.step_s(1.0) - fixed  # a step is linear in the residents
        return fixed / slope * 999 if slope > 0 else math.inf
