"""A runner that computes nothing: a step takes the time that a model of the device gives it, and the tokens are drawn.

What must hold: everything else is the real engine; times come from ``engine.step_model`` alone; tokens are a function
of (key, position), so that a seed gives the same answer in any batch; they are readable text and answers end.  Whoever
serves it says so everywhere (``label``).
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

from engine.config import SIMULATED, EngineConfig
from engine.request import GREEDY_BELOW, Request, derived_seed
from engine.sampling import mix64
from engine.scheduler import Slice
from engine.step_fit import StepFit
from engine.step_fit import load as load_fit
from engine.step_load import StepLoad, load_of
from engine.step_model import QUIET, BaseTime, Noise, RooflineTime, ScaledTime, StepTimes
from models.devices import Device, find_device
from models.errors import UserError
from models.known import KNOWN
from models.known_shapes import SHAPES
from models.roofline import DTYPE_BYTES, KvCapacity, StepCost
from models.store import Reference, load_reference
from models.tokenizer import Tokenizer

#: Mean length of an answer that nothing else ends: the mean of the Azure 2023 conversation trace.
ANSWER_TOKENS: Final = 211
#: Share of the device's memory that weights and KV may take; vLLM's default for the same purpose.
MEMORY_SHARE: Final = 0.9
STAND_IN: Final = "smollm2"  # whose tokenizer and template serve a shape that comes without its own
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_END_BELOW: Final = np.uint64(2**24 // ANSWER_TOKENS)
_LATE_MAX_NS: Final = 20_000_000


class Clock(Protocol):
    """What a simulated step waits on."""

    def __call__(self) -> int:
        """Now (ns)."""

    def wait_until(self, ns: int) -> None:
        """Come back when it is ``ns``."""


class RealClock:
    """The monotonic clock.  A sleep that ends late shortens the next one, so that steps are right in the mean."""

    def __init__(self) -> None:
        self._late_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns()

    def wait_until(self, ns: int) -> None:
        """Sleep."""
        due = ns - self._late_ns
        left = due - time.monotonic_ns()
        if left > 0:
            time.sleep(left / 1e9)
        self._late_ns = min(max(0, time.monotonic_ns() - due), _LATE_MAX_NS)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What is simulated: a model of a shape, in a precision, on a device, with times from the account or a fit.

    share: of the device's memory for weights and KV.  noise: in place of the fit's.  speed, prefill_speed: of the
    steps (``ScaledTime``).
    """

    model: Reference
    device: Device
    dtype: str
    fit: StepFit | None = None
    seed: int = 0
    share: float = MEMORY_SHARE
    noise: Noise | None = None
    speed: float = 1.0
    prefill_speed: float = 1.0

    @property
    def cost(self) -> StepCost:
        """The account of the model on the device."""
        return StepCost(self.model.shape, self.device, DTYPE_BYTES[self.dtype], self.kv_bytes)

    @property
    def kv_bytes(self) -> float:
        """Bytes of a number in the KV cache: that of the activations."""
        return 4.0 if self.dtype == "fp32" else 2.0

    @property
    def kv_tokens(self) -> int:
        """KV entries that fit beside the weights; 0: not even they fit."""
        shape, bytes_ = self.model.shape, DTYPE_BYTES[self.dtype]
        return KvCapacity.beside_weights(shape, self.device, bytes_, self.kv_bytes, self.share).tokens

    @property
    def label(self) -> str:
        """For people and bundles: what the times are."""
        times = "iron law" if self.fit is None else f"fitted to {self.fit.about}"
        tokenizer = f", tokenizer of {STAND_IN}" if stands_in(self.model) else ""
        return f"{self.model.name} {self.dtype} on {self.device.name}, step times: {times}{tokenizer}"

    def times(self) -> StepTimes:
        """Step times from their beginning."""
        base: BaseTime = self.fit if self.fit is not None else RooflineTime(self.cost)
        if (self.speed, self.prefill_speed) != (1.0, 1.0):
            base = ScaledTime(base, self.speed, self.prefill_speed)
        noise = self.fit.noise if self.fit is not None else QUIET
        return StepTimes(base, noise if self.noise is None else self.noise, self.seed)


def simulation(config: EngineConfig, model: Reference) -> Simulation:
    """From a configuration.  Raises UserError: unknown device, unreadable fit."""
    if config.device is None:
        raise UserError("no device is named", where="--device", remedy="name one, for example --device H100")
    fit = load_fit(Path(config.sim_fit)) if config.sim_fit is not None else None
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    return Simulation(model, find_device(config.device), dtype, fit, config.sim_seed)


def open_reference(ref: str) -> Reference:
    """A model without weights: one that is here, or a known shape with the tokenizer of ``STAND_IN``.

    Raises UserError: neither is known under this name.
    """
    known = SHAPES.get(ref.lower())
    if known is None or known.shape.name == STAND_IN:
        return load_reference(ref)
    stand_in = load_reference(STAND_IN)
    # texts and their ends are the stand-in's, everything that costs time is the shape's
    ends = stand_in.shape.eos_token_ids
    own = replace(known.shape, bos_token_id=stand_in.shape.bos_token_id, eos_token_ids=ends)
    if own.vocab < stand_in.shape.vocab:
        raise UserError(
            f"{own.name} has {own.vocab} tokens, fewer than the tokenizer of {STAND_IN}, which would stand in",
            where="--model",
            remedy="give the folder of the model, which has its tokenizer",
        )
    shas = {part: sha for part, sha in stand_in.shas.items() if part != "model"}  # those weights are not here
    return replace(stand_in, name=own.name, shape=own, shas=shas)


def stands_in(model: Reference) -> bool:
    """Do tokenizer and template of ``STAND_IN`` serve another model's shape?"""
    return model.name != STAND_IN and model.folder == KNOWN[STAND_IN].folder


class SimulatedRunner:
    """``forward(slices)`` -> tokens of the rows that sample, [rows] int64, after the time that the step takes."""

    name = SIMULATED
    has_logits = False
    threads = 0

    def __init__(self, config: EngineConfig, what: Simulation, clock: Clock | None = None) -> None:
        """Raises UserError where weights and KV do not fit the device."""
        shape = what.model.shape
        self.simulation, self.dtype = what, what.dtype
        self.label = what.label
        self.max_context = min(config.max_context or shape.max_context, shape.max_context)
        self.kv_blocks = config.kv_blocks or what.kv_tokens // config.block_size
        if self.kv_blocks < 1:
            raise UserError(
                f"{what.model.name} in {what.dtype} leaves no room for KV in the memory of {what.device.name}",
                where="--device",
                remedy="name a larger device or a smaller precision, or give --kv-blocks",
            )
        self._clock: Clock = clock or RealClock()
        self.times = what.times()
        self._seed = what.seed
        ends = what.model.shape.eos_token_ids
        self._end = ends[0] if ends else None
        self._tokenizer, self._vocab = what.model.tokenizer, shape.vocab

    @cached_property
    def _words(self) -> np.ndarray:
        return np.array(words(self._tokenizer, self._vocab), dtype=np.int64)

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Draw the tokens and let the time pass."""
        tokens = self.draw([piece.request for piece in slices if piece.sample])
        self.take_time(load_of(slices))
        return torch.from_numpy(tokens)

    def take_time(self, load: StepLoad) -> None:
        """Let the time of a step pass."""
        self._clock.wait_until(self._clock() + self.times.next_ns(load))

    def draw(self, requests: list[Request]) -> np.ndarray:
        """The next token of every request; an end in one of ``ANSWER_TOKENS`` draws."""
        keys = np.array([request.key or self._key(request) for request in requests], dtype=np.uint64)
        positions = np.array([len(request.tokens) - len(request.prompt_ids) for request in requests], dtype=np.uint64)
        tokens, ends = self._words_at(keys, positions)
        if self._end is not None:
            for row in np.flatnonzero(ends).tolist():
                params = requests[row].params
                if not params.ignore_eos and requests[row].generated >= params.min_tokens:
                    tokens[row] = self._end
        for row, request in enumerate(requests):
            if request.params.min_tokens and request.params.stop_token_ids:
                tokens[row] = self._not_yet(request, int(tokens[row]))
        return tokens

    def draw_ahead(self, request: Request, n: int) -> np.ndarray:
        """The next ``n`` tokens of a request, [n] int64: what ``draw`` would give one by one, if nothing ended it."""
        first, params = request.generated, request.params
        positions = np.arange(first, first + n, dtype=np.uint64)
        tokens, ends = self._words_at(np.full(n, request.key or self._key(request), dtype=np.uint64), positions)
        if self._end is not None and not params.ignore_eos:
            ends[: max(0, params.min_tokens - first)] = False
            tokens[ends] = self._end
        return tokens

    def _words_at(self, keys: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Words by key and position, and at which of them an answer may end."""
        bits = mix64(keys + _GOLDEN * (positions + np.uint64(1)))
        words = self._words
        return words[(bits % np.uint64(len(words))).astype(np.int64)], (bits >> np.uint64(40)) < _END_BELOW

    def _not_yet(self, request: Request, token: int) -> int:
        """Below min_tokens, a token that would end the answer is replaced by another word."""
        stops = request.params.stop_token_ids
        if request.generated >= request.params.min_tokens or token not in stops:
            return token
        return next((int(word) for word in self._words if word not in stops), token)

    def _key(self, request: Request) -> int:
        """What a request's tokens depend on: its seed, or its prompt where it is greedy.  Never 0."""
        if request.params.temperature < GREEDY_BELOW:
            start = zlib.crc32(array("q", request.prompt_ids))
        else:
            start = request.seed
        request.key = derived_seed(start ^ (self._seed << 32), 1) or 1
        return request.key


@lru_cache(maxsize=8)
def words(tokenizer: Tokenizer, vocab: int) -> list[int]:
    """Tokens of plain printable text; all that there are, where none is."""
    found = []
    for token in range(min(tokenizer.vocab_size, vocab)):
        raw = tokenizer.token_bytes(token)
        if raw and token not in tokenizer.special_ids and raw.isascii() and raw.decode("ascii").isprintable():
            found.append(token)
    return found or list(range(vocab))
