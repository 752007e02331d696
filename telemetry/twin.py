"""The engine's virtual-time twin as the analyses see it: a load and a setting go in, what became of each request out.

Owns the plain types of that exchange; ``engine.replay`` is what answers, and ``tailspan`` hands it on.  Arrays have one
entry per request, in order of arrival.  What must hold: the same load, setting and seed give the same run, to the
nanosecond; a result is simulated, and says of what (``label``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from models.errors import UserError
from models.roofline import StepCost
from models.steady_load import Limits
from models.store import Reference

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LENGTH: Final = "length"  # the outcome of an answer that is complete
ABORT: Final = "abort"  # the client's patience ended first


@dataclass(frozen=True, slots=True)
class TwinLoad:
    """What arrives at the engine.

    at_s: seconds after zero, ascending.  input_tokens, output_tokens: of the prompt, and of the whole answer.
    prefixes: ids of the blocks that each prompt begins with, ``prefix_tokens`` tokens a block; equal ids at equal
    places are equal tokens, what lies beyond is the request's own (a trace's hash ids, or [7] for a system prompt).
    cached_tokens: so much of each prompt counts as found in the prefix cache, whatever was sent before (as a bundle
    has it); not together with prefixes.  priority: lower is sooner.  deadline_s: after the arrival; NaN: none.
    patience_s: seconds after the arrival at which the client hangs up; NaN: never.  klass: of the request's row.
    """

    at_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    prefixes: Sequence[Sequence[int]] | None = None
    prefix_tokens: int = 512
    cached_tokens: Ints | None = None
    priority: Ints | None = None
    deadline_s: Floats | None = None
    patience_s: Floats | None = None
    klass: Sequence[str] | None = None

    def __post_init__(self) -> None:
        n = len(self.at_s)
        for name in ("input_tokens", "output_tokens", "prefixes", "cached_tokens", "priority", "deadline_s",
                     "patience_s", "klass"):  # fmt: skip
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise UserError(f"{name} has {len(column)} entries for {n} arrivals", where="load of the twin")
        at = np.asarray(self.at_s)
        if n and (not np.isfinite(at).all() or at[0] < 0 or (np.diff(at) < 0).any()):
            raise UserError("arrivals must be ascending, from 0 on", where="load of the twin", remedy="sort them")
        for name in ("input_tokens", "output_tokens"):
            low = np.flatnonzero(np.asarray(getattr(self, name)) < 1)
            if len(low):
                value = getattr(self, name)[low[0]]
                raise UserError(f"request {low[0]} has {name} {value}, but needs at least 1", where="load of the twin")
        if self.prefixes is not None and self.cached_tokens is not None:
            raise UserError("prefixes and cached_tokens are two accounts of one thing", where="load of the twin")
        if self.prefix_tokens < 1:
            raise UserError(f"prefix_tokens is {self.prefix_tokens}, but must be at least 1", where="load of the twin")

    def __len__(self) -> int:
        return len(self.at_s)

    @classmethod
    def of_rows(cls, requests: pa.Table) -> TwinLoad:
        """What a run sent, from its rows (telemetry.schema.REQUESTS): those that were sent at all.

        Lengths as the server reported them, else as planned; the first row arrives at 0.
        """
        sent = requests.filter(pc.is_valid(requests.column("sent_s"))).sort_by("sent_s")

        def first_known(*names: str) -> Ints:
            columns = [sent.column(name) for name in names]
            values: Ints = pc.fill_null(pc.coalesce(*columns), 1).to_numpy().astype(np.int64)
            return np.maximum(values, 1)

        at: Floats = sent.column("sent_s").to_numpy().astype(np.float64)
        return cls(
            at_s=at - at[0] if len(at) else at,
            input_tokens=first_known("prompt_tokens_reported", "input_tokens"),
            output_tokens=first_known("completion_tokens_reported", "expected_output_tokens"),
            cached_tokens=pc.fill_null(sent.column("cached_tokens"), 0).to_numpy().astype(np.int64),
            klass=pc.fill_null(sent.column("class"), "default").to_pylist(),
        )


@dataclass(frozen=True, slots=True)
class TwinSetting:
    """One engine, and how fast its steps are; change it with ``dataclasses.replace``.

    model, device, dtype: as ``tailspan serve`` takes them.  kv_blocks: pages of block_size tokens (None: what the
    device's memory leaves).  fit: step times and noise of a real engine, as ``Twin.fit`` gives them or a file of
    ``python -m engine.step_fit`` holds (parsed); None: the iron law of the device, without noise.  noise: (sigma,
    autocorrelation, stalls per second, seconds of a stall) in place of the fit's; (0, 0, 0, 0) turns it off.
    seed: of the noise.  speed: steps are so many times as fast.  prefill_speed: the part of a step that its prompt
    tokens make is so many times as fast.  pauses: (at_s, length_s), ascending: the first step after at_s starts so
    much later, as when the host stalls.  compile_s: from cold_at_s on, the first step of each shape (powers of two of
    its decodes and of its prompt tokens) takes so much longer, as when kernels are compiled.
    Everything else: ``engine.config.EngineConfig``.
    """

    model: str = "llama-3.1-8b"
    device: str = "h100"
    dtype: str = "auto"
    max_batch: int = 256
    token_budget: int = 8192
    kv_blocks: int | None = None
    block_size: int = 16
    max_context: int | None = None
    prefix_cache: bool = True
    queue_limit: int = 1 << 30
    queue_tokens: int | None = None
    max_predicted_ttft: float | None = None
    policy: str = "fcfs"
    watermark: float = 0.01
    fit: Mapping[str, Any] | None = None
    noise: tuple[float, float, float, float] | None = None
    seed: int = 0
    speed: float = 1.0
    prefill_speed: float = 1.0
    pauses: tuple[tuple[float, float], ...] = ()
    compile_s: float = 0.0
    cold_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TwinRun:
    """What became of a load.  Arrays in its order; NaN, 0 and -1 where there is nothing.

    outcome: "length", "abort", or why it was refused (telemetry.names.REJECT_REASONS).  output_tokens: that it got.
    ttft_s, e2e_s: from the arrival at the engine to the first and to the last token; tpot_s: mean time per token after
    the first.  phases: seconds by name of telemetry.names.PHASES; they sum to e2e_s.  facts: one array each of
    cached_tokens, preemptions, prefill_chunks, prefill_wait_s, decode_max_gap_s, batch_size_mean,
    queue_depth_at_arrival, queue_tokens_ahead, step_first, step_last, floor_ttft_s, floor_tpot_s.
    length_s: when the engine was idle at the end.  kv_blocks: of the pool.  steps: the step log (schema STEPS), where
    it was asked for; token_s: moments of each request's tokens, seconds after zero, likewise.
    """

    load: TwinLoad
    setting: TwinSetting
    label: str
    outcome: npt.NDArray[np.str_]
    output_tokens: Ints
    ttft_s: Floats
    e2e_s: Floats
    tpot_s: Floats
    phases: dict[str, Floats]
    facts: dict[str, npt.NDArray[Any]]
    length_s: float
    kv_blocks: int
    preemptions: int
    request_ids: tuple[str, ...] = field(default=(), repr=False)
    steps: pa.Table | None = field(default=None, repr=False)
    token_s: tuple[Floats, ...] | None = field(default=None, repr=False)

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Which answers are complete."""
        found: npt.NDArray[np.bool_] = self.outcome == LENGTH
        return found


@dataclass(frozen=True, slots=True)
class TwinAccount:
    """What is known of an engine before anything comes.  reference: of its model.  cost: of its steps.

    utilisation: share of the peak that its matrix products reach.  limits: of the engine, KV pool included.
    """

    label: str
    reference: Reference
    max_context: int
    cost: StepCost
    utilisation: float
    limits: Limits


class Twin(Protocol):
    """The engine in virtual time.  Raises UserError for what no engine could be started with."""

    def __hash__(self) -> int:
        """The same for twins that replay alike, so that what they said can be kept."""

    def account(self, setting: TwinSetting) -> TwinAccount:
        """What the engine of a setting is, without playing anything."""

    def replay(self, load: TwinLoad, setting: TwinSetting, *, steps: bool = False, tokens: bool = False) -> TwinRun:
        """Play a load.  steps, tokens: keep the step log, and the moment of every token (see TwinRun)."""

    def fit(self, steps: pa.Table, about: str) -> dict[str, Any]:
        """Step times and noise from a step log (schema STEPS): a ``TwinSetting.fit``.

        Raises UserError: fewer than 100 steps, or columns that an older version did not write.
        """
