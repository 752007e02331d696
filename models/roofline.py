"""The least time that a step of a Llama can take on a device, from what it must read and what it must compute.

    floor    = max(bytes / bandwidth, FLOPs / peak) + fixed cost     nothing runs faster: efficiency = floor / time <= 1
    iron law = bytes / bandwidth + FLOPs / (peak * utilisation) + fixed cost      nothing overlaps: printed beside it

The floor is the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009); the sum is the iron law of machine
learning systems, T = D / B + O / (P * eta) + L (Reddi, Machine Learning Systems).  What must hold: every count is a
lower bound of what any implementation needs (each byte moved once, activations never leave the chip), and no figure
falls when any argument grows.  One step costs microseconds to account for, so the engine does it for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from models.devices import Device
from models.shape import ModelShape

Floats = npt.NDArray[np.float64]

MEMORY: Final = "memory"
COMPUTE: Final = "compute"
OVERHEAD: Final = "overhead"
WALLS: Final = (MEMORY, COMPUTE, OVERHEAD)

#: Bytes per parameter as stored, scales included.  q8_0, q4_0, q4_1: GGUF blocks of 32 (34, 18 and 20 bytes).
#: int8, int4: the numbers alone, whatever scales a format adds.
DTYPE_BYTES: Final = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
}
KV_DTYPES: Final = ("fp32", "fp16", "bf16", "fp8", "int8")


class StepFloor(NamedTuple):
    """floor_ns: least duration.  bytes, flops: what that rests on.  wall: the largest part of the floor."""

    floor_ns: int
    bytes: int
    flops: int
    wall: str


class StepCost:
    """The account of one model in one precision on one device; a few microseconds a call, no state.

    weight_bytes_per_param: as read from memory (2 for bf16, 0.625 for Q4_1).  kv_bytes: bytes of one number in the KV
    cache.  head_bytes_per_param: of the embedding and the head where they are kept in another precision.
    """

    __slots__ = (
        "_flops_head",
        "_flops_pair",
        "_flops_token",
        "_head",
        "_kv_token",
        "_layers",
        "_ns_per_byte",
        "_ns_per_flop",
        "_row",
        "device",
        "kv_bytes",
        "shape",
        "weight_bytes_per_param",
    )

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        weight_bytes_per_param: float,
        kv_bytes: float,
        head_bytes_per_param: float | None = None,
    ) -> None:
        self.shape, self.device = shape, device
        self.weight_bytes_per_param, self.kv_bytes = weight_bytes_per_param, kv_bytes
        head = weight_bytes_per_param if head_bytes_per_param is None else head_bytes_per_param
        table = shape.vocab * shape.hidden
        layers = shape.parameters() - (1 if shape.tied_embeddings else 2) * table  # norms included: they are read too
        products = layers - (2 * shape.n_layers + 1) * shape.hidden
        self._layers = layers * weight_bytes_per_param
        self._head = table * head
        self._row = shape.hidden * head  # an embedding is looked up, not read whole
        self._kv_token = 2.0 * shape.n_layers * shape.n_kv_heads * shape.head_dim * kv_bytes
        self._flops_token = 2.0 * products  # a multiplication and an addition per weight
        self._flops_head = 2.0 * table
        # q . k and p . v: two products of head_dim numbers for each query head, layer and attended token
        self._flops_pair = 4.0 * shape.n_layers * shape.n_heads * shape.head_dim
        self._ns_per_byte = 1e9 / device.bandwidth
        self._ns_per_flop = 1e9 / device.flops

    # --- what a step must move and compute ---
    def step_bytes(self, tokens: float, context_tokens: float, sampled_rows: float) -> float:
        """Bytes: weights once, an embedding row a token, the head where a row is sampled, each KV entry once.

        context_tokens: tokens that hold KV after the step, summed over its sequences: those before are read, the new
        ones written.
        """
        if tokens <= 0:
            return 0.0
        return self._bytes_of_work(tokens, sampled_rows) + context_tokens * self._kv_token

    def _bytes_of_work(self, tokens: float, sampled_rows: float) -> float:
        """Those that do not depend on the context."""
        return self._layers + tokens * self._row + (self._head if sampled_rows > 0 else 0.0)

    def linear_flops(self, tokens: float, sampled_rows: float) -> float:
        """FLOPs of the matrix products with weights: 2 a parameter and token, the head for sampled rows only."""
        return tokens * self._flops_token + sampled_rows * self._flops_head

    def attention_flops(self, attended: float) -> float:
        """FLOPs of attention; attended: pairs of a query and a token that it sees."""
        return attended * self._flops_pair

    # --- times ---
    def floor_ns(
        self,
        prefill_tokens: float,
        decode_seqs: float,
        context_tokens: float,
        sampled_rows: float,
        attended: float | None = None,
    ) -> StepFloor:
        """The least time of one step.

        prefill_tokens: tokens of prompts in it.  decode_seqs: sequences with one token each.  context_tokens: as in
        step_bytes.  sampled_rows: rows whose logits are wanted.  attended: see ``pairs``; left out, the fewest there
        can be, which is the context.
        """
        tokens = prefill_tokens + decode_seqs
        moved = self.step_bytes(tokens, context_tokens, sampled_rows)
        pairs_seen = context_tokens if attended is None else attended
        flops = self.linear_flops(tokens, sampled_rows) + pairs_seen * self._flops_pair
        memory, compute, fixed = moved * self._ns_per_byte, flops * self._ns_per_flop, self.device.fixed_ns
        longer = memory if memory >= compute else compute
        wall = OVERHEAD if fixed > longer else MEMORY if memory >= compute else COMPUTE
        return StepFloor(int(longer + fixed), int(moved), int(flops), wall)

    def iron_law_ns(self, step: StepFloor, utilisation: float = 1.0) -> float:
        """bytes / bandwidth + FLOPs / (peak * utilisation) + fixed cost of the same step, ns; never below its floor."""
        return step.bytes * self._ns_per_byte + step.flops * self._ns_per_flop / utilisation + self.device.fixed_ns

    def decodes_ns(self, batch: int, contexts: Floats, utilisation: float = 1.0) -> Floats:
        """``iron_law_ns`` of steps that decode ``batch`` sequences each, at once; contexts: each step's tokens with KV.

        The same numbers to the last bit: every operation is that of ``floor_ns``, in its order.
        """
        moved = np.trunc(self._bytes_of_work(batch, batch) + contexts * self._kv_token)
        flops = np.trunc(self.linear_flops(batch, batch) + contexts * self._flops_pair)
        found: Floats = moved * self._ns_per_byte + flops * self._ns_per_flop / utilisation + self.device.fixed_ns
        return found

    def prefill(self, prompt_tokens: float, cached_tokens: float = 0) -> StepFloor:
        """A prompt alone on the device, in one step, without what the prefix cache holds (at least one token is new).

        Chunks would read the weights again each time, so this bounds any chunking.
        """
        new = max(1.0, prompt_tokens - cached_tokens)
        return self.floor_ns(new, 0, prompt_tokens, 1, pairs(prompt_tokens - new, new))

    def decode(self, context_tokens: float, batch: float = 1) -> StepFloor:
        """One token of each of ``batch`` sequences of ``context_tokens`` tokens, the new one included."""
        return self.floor_ns(0, batch, batch * context_tokens, batch)

    def ttft_ns(self, prompt_tokens: float, cached_tokens: float = 0) -> int:
        """Least time from the start of the first step to the first token of a request (ns)."""
        return self.prefill(prompt_tokens, cached_tokens).floor_ns

    def tpot_ns(self, prompt_tokens: float, output_tokens: float) -> int | None:
        """Least mean time per output token after the first (ns), alone on the device; None below two tokens."""
        if output_tokens < 2:
            return None
        return self.decode(mean_context(prompt_tokens, output_tokens)).floor_ns


def pairs(before: float, new: float) -> float:
    """(query, token) pairs of causal attention when ``new`` tokens follow ``before``: each sees all up to itself."""
    return new * before + new * (new + 1) / 2


def mean_context(prompt_tokens: float, output_tokens: float) -> float:
    """Mean tokens with KV over the decode steps: the k-th after the first sees prompt + k, k = 1 .. output - 1."""
    return prompt_tokens + output_tokens / 2


def efficiency(floor_ns: float, duration_ns: float) -> float:
    """floor / duration.  Above 1 only if the device is faster than its figures: then those are wrong, not the clock."""
    return floor_ns / duration_ns if duration_ns > 0 else 0.0


def wall_of(step: StepFloor, duration_ns: float) -> str:
    """What bound a step that took ``duration_ns``: overhead when most of its time is beyond its floor."""
    return OVERHEAD if duration_ns > 2 * step.floor_ns else step.wall


# --- Little's law: residents = arrivals * residence -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """tokens: KV entries that fit beside the weights.  Little's law turns them into a batch and a rate."""

    tokens: int

    @classmethod
    def beside_weights(
        cls, shape: ModelShape, device: Device, weight_bytes_per_param: float, kv_bytes: float, share: float = 1.0
    ) -> KvCapacity:
        """What ``share`` of the device's memory leaves for KV; 0 tokens when the weights alone do not fit."""
        left = device.memory * share - shape.parameters() * weight_bytes_per_param
        per_token = 2.0 * shape.n_layers * shape.n_kv_heads * shape.head_dim * kv_bytes
        return cls(max(0, math.floor(left / per_token)))

    def batch(self, tokens_per_request: float) -> int:
        """Requests of so many tokens (mean over their stay, for a long-run mean) that are resident at once."""
        return math.floor(self.tokens / tokens_per_request)

    def rate(self, tokens_per_request: float, residence_s: float, used: float = 1.0) -> float:
        """Requests/s that hold a share ``used`` of the capacity: used * tokens = rate * residence * tokens each."""
        return used * self.tokens / (tokens_per_request * residence_s)


def residents(rate: float, residence_s: float) -> float:
    """Requests in the system: arrivals a second times seconds of stay (Little, Operations Research 9(3), 1961)."""
    return rate * residence_s
