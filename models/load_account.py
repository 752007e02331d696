"""The account of a planned load: a model on a device, prompts of one length, outputs of one length, a steady batch.

Two columns of the same figures.  ``Thumb`` counts as people do in their heads: 2 FLOPs per parameter and token, all
parameters read in every step, the round number by which the model is called, no attention, no embedding.  ``Exact``
counts from the shape (models.roofline).  What must hold: both rest on the same bandwidth and peak, and the difference
between them is only what is named here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from models.devices import Device
from models.errors import UserError
from models.known_shapes import KnownShape
from models.roofline import (
    DTYPE_BYTES,
    KV_DTYPES,
    KvCapacity,
    StepCost,
    StepFloor,
    mean_context,
    pairs,
)

GIB: Final = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Load:
    """prompt, output: tokens of each request (cached: of its prompt, in the prefix cache).  batch: decoding at once."""

    prompt: int
    output: int
    batch: int
    cached: int = 0
    dtype: str = "fp16"
    kv_dtype: str = "fp16"
    utilisation: float = 1.0

    def check(self) -> None:
        """Raise UserError for an impossible load."""
        for option, value in (("--prompt", self.prompt), ("--output", self.output), ("--batch", self.batch)):
            if value < 1:
                raise UserError(f"{value} is below 1", where=option, remedy="give a whole number from 1 on")
        if not 0 <= self.cached < self.prompt:
            raise UserError(
                f"{self.cached} cached tokens of a prompt of {self.prompt}",
                where="--cached",
                remedy="at least one token of a prompt is always computed",
            )
        if not 0 < self.utilisation <= 1:
            raise UserError(
                f"{self.utilisation:g} is not a share of the peak",
                where="--utilisation",
                remedy="give a number above 0 and up to 1",
            )
        for option, name, known in (("--dtype", self.dtype, DTYPE_BYTES), ("--kv-dtype", self.kv_dtype, KV_DTYPES)):
            if name not in known:
                raise UserError(f"{name!r} is no precision", where=option, remedy=f"one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Thumb:
    """Rule of thumb.  Bytes, FLOPs, seconds, tokens/s; misread_*: the decode step with GiB read as GB."""

    weight_bytes: float
    decode_alone_s: float
    prefill_flops: float
    prefill_s: float
    kv_bytes_per_request: float
    step_bytes: float
    step_s: float
    tokens_per_s: float
    misread_step_s: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A step by the shape.  floor_s: max(bytes / bandwidth, FLOPs / peak) + fixed.  iron_law_s: their sum."""

    bytes: int
    flops: int
    linear_flops: float
    attention_flops: float
    floor_s: float
    iron_law_s: float
    wall: str


@dataclass(frozen=True, slots=True)
class Account:
    """Everything that ``tailspan floor --model`` prints."""

    model: str
    parameters: int
    nominal: float
    max_context: int
    device: Device
    load: Load
    thumb: Thumb
    weight_bytes: float
    kv_bytes_per_token: float
    kv_bytes_per_request: float
    prefill: Phase
    decode_alone: Phase
    decode: Phase
    kv_capacity_tokens: int
    batch_that_fits: int
    compute_bound_batch: float | None
    rate: float
    residence_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of the decode steps at the batch, while no prompt is computed."""
        return self.load.batch / self.decode.floor_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = asdict(self)
        found["device"]["balance"] = self.device.balance
        found["tokens_per_s"] = self.tokens_per_s
        return found


def account_of(known: KnownShape, device: Device, load: Load) -> Account:
    """The account of one load.  Raises UserError for an impossible one."""
    load.check()
    shape, weight, kv = known.shape, DTYPE_BYTES[load.dtype], DTYPE_BYTES[load.kv_dtype]
    cost = StepCost(shape, device, weight, kv)
    kv_token = 2.0 * shape.n_layers * shape.n_kv_heads * shape.head_dim * kv
    context = mean_context(load.prompt, load.output)
    prefill = cost.prefill(load.prompt, load.cached)
    step = cost.decode(context, load.batch)
    # A device computes each prompt once and a share of a step for each further token: so many requests a second.
    busy_s = (prefill.floor_ns + (load.output - 1) * step.floor_ns / load.batch) / 1e9
    rate = 1 / busy_s
    new = load.prompt - load.cached
    capacity = KvCapacity.beside_weights(shape, device, weight, kv)
    return Account(
        model=shape.name,
        parameters=shape.parameters(),
        nominal=known.nominal,
        max_context=shape.max_context,
        device=device,
        load=load,
        thumb=_thumb(known.nominal * weight, known.nominal, kv_token * load.prompt, device, load),
        weight_bytes=cost.step_bytes(1, 0, 1),
        kv_bytes_per_token=kv_token,
        kv_bytes_per_request=kv_token * load.prompt,
        prefill=_phase(cost, prefill, new, 1, pairs(load.cached, new), load.utilisation),
        decode_alone=_phase(cost, cost.decode(context), 1, 1, context, load.utilisation),
        decode=_phase(cost, step, load.batch, load.batch, load.batch * context, load.utilisation),
        kv_capacity_tokens=capacity.tokens,
        batch_that_fits=capacity.batch(load.prompt + load.output),
        compute_bound_batch=_compute_bound_batch(cost, context),
        rate=rate,
        residence_s=load.batch / rate,
    )


def _thumb(weights: float, parameters: float, kv: float, device: Device, load: Load) -> Thumb:
    prefill = 2.0 * parameters * (load.prompt - load.cached)
    moved = weights + load.batch * kv
    step_s = max(moved / device.bandwidth, 2.0 * parameters * load.batch / device.flops)
    return Thumb(
        weight_bytes=weights,
        decode_alone_s=weights / device.bandwidth,
        prefill_flops=prefill,
        prefill_s=prefill / device.flops,
        kv_bytes_per_request=kv,
        step_bytes=moved,
        step_s=step_s,
        tokens_per_s=load.batch / step_s,
        misread_step_s=moved / GIB * 1e9 / device.bandwidth,
    )


def _phase(
    cost: StepCost, step: StepFloor, tokens: float, sampled: float, attended: float, utilisation: float
) -> Phase:
    return Phase(
        bytes=step.bytes,
        flops=step.flops,
        linear_flops=cost.linear_flops(tokens, sampled),
        attention_flops=cost.attention_flops(attended),
        floor_s=step.floor_ns / 1e9,
        iron_law_s=cost.iron_law_ns(step, utilisation) / 1e9,
        wall=step.wall,
    )


def _compute_bound_batch(cost: StepCost, context: float) -> float | None:
    """Batch from which a decode step is bound by compute; None: its KV alone takes longer to read than to compute."""
    weights = cost.step_bytes(1, 0, 1)
    bytes_each = cost.step_bytes(1, context, 1) - weights
    flops_each = cost.linear_flops(1, 1) + cost.attention_flops(context)
    device = cost.device
    left = flops_each / device.flops - bytes_each / device.bandwidth
    return weights / device.bandwidth / left if left > 0 else None
