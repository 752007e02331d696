"""Replay a load through the engine in virtual time: what ``telemetry.twin.Twin`` promises.

``TWIN`` is handed to the analyses by ``tailspan``; they see plain arrays, never the engine.  Prompts are made so that
they are equal exactly where the load says so: the k-th block of an id has the same tokens in every prompt, and what
follows is the request's own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from engine.blocks import ROOT
from engine.config import SIMULATED, EngineConfig
from engine.counting_pool import CountingPool
from engine.phase_clock import PhaseClock
from engine.request import LENGTH, SamplingParams
from engine.simulated import Simulation, open_reference
from engine.step_fit import Step, StepFit
from engine.step_fit import fit as fit_steps
from engine.step_fit import from_dict as fit_of
from engine.step_model import Noise
from engine.steplog import to_arrow
from engine.virtual import Arrival, Life, VirtualEngine
from models.devices import find_device
from models.errors import UserError
from models.store import Reference
from telemetry.names import PHASES
from telemetry.twin import TwinLoad, TwinRun, TwinSetting

WHERE: Final = "setting of the twin"
REPLICA: Final = "twin"
_BASE: Final = 1 << 14  # token ids that name a prompt are below it: every vocabulary has so many
_OWN, _SHARED, _FILL = 1, 2, 3  # first tokens of a block: whose it is
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class EngineTwin:
    """The engine as a function; it keeps nothing.  leaping: see ``engine.virtual.VirtualEngine``."""

    leaping: bool = True

    def replay(self, load: TwinLoad, setting: TwinSetting, *, steps: bool = False, tokens: bool = False) -> TwinRun:
        """See ``telemetry.twin.Twin.replay``."""
        what = _simulation(setting)
        config = _config(setting, len(load), what)
        rig = VirtualEngine(
            config,
            what,
            gap_ns=round(what.fit.gap_s * _NS) if what.fit is not None else 0,
            pauses=tuple((round(at * _NS), round(length * _NS)) for at, length in setting.pauses),
            token_steps=tokens,
            leaping=self.leaping,
        )
        if load.cached_tokens is not None:
            _tell_hits(rig, load.cached_tokens.tolist())
        rig.feed(_arrivals(load))
        collecting = gc.isenabled()
        gc.disable()  # nothing of a run is garbage before its end
        try:
            rig.run()
        finally:
            if collecting:
                gc.enable()
        if rig.engine.laws.violations:
            raise RuntimeError(f"laws broken: {rig.engine.laws.first}")
        return _result(load, setting, rig, steps=steps, tokens=tokens)

    def fit(self, steps: pa.Table, about: str) -> dict[str, Any]:
        """See ``telemetry.twin.Twin.fit``."""
        names = list(Step.__dataclass_fields__)
        missing = [name for name in names if name not in steps.column_names or steps.column(name).null_count]
        if missing:
            raise UserError(f"the step log lacks {missing[0]}", where="step log", remedy="run it again")
        columns = [steps.column(name).to_pylist() for name in names]
        return fit_steps([Step(*row) for row in zip(*columns, strict=True)], about).to_dict()


TWIN: Final = EngineTwin()


@lru_cache(maxsize=8)
def _reference(model: str) -> Reference:
    return open_reference(model)


def _simulation(setting: TwinSetting) -> Simulation:
    for name in ("speed", "prefill_speed"):
        value = getattr(setting, name)
        if not 0 < value < np.inf:
            raise UserError(f"{name} is {value}, but must be above 0", where=WHERE)
    if any(length < 0 for _at, length in setting.pauses) or list(setting.pauses) != sorted(setting.pauses):
        raise UserError("pauses must be ascending and of no negative length", where=WHERE)
    fit: StepFit | None = fit_of(dict(setting.fit), WHERE) if setting.fit is not None else None
    noise = None
    if setting.noise is not None:
        sigma, correlation, rate, length = setting.noise
        if min(setting.noise) < 0 or correlation >= 1 or (rate > 0 and length == 0):
            raise UserError(f"noise is {setting.noise}: none below 0, autocorrelation below 1", where=WHERE)
        noise = Noise(sigma, correlation, rate, length)
    dtype = "bf16" if setting.dtype == "auto" else setting.dtype
    return Simulation(
        _reference(setting.model),
        find_device(setting.device),
        dtype,
        fit,
        setting.seed,
        noise=noise,
        speed=setting.speed,
        prefill_speed=setting.prefill_speed,
    )


def _config(setting: TwinSetting, requests: int, what: Simulation) -> EngineConfig:
    return EngineConfig(
        model=what.model.name,
        backend=SIMULATED,
        device=what.device.name,
        dtype=what.dtype,
        max_batch=setting.max_batch,
        token_budget=setting.token_budget,
        kv_blocks=setting.kv_blocks,
        block_size=setting.block_size,
        max_context=setting.max_context,
        prefix_cache=setting.prefix_cache,
        queue_limit=setting.queue_limit,
        queue_tokens=setting.queue_tokens,
        max_predicted_ttft=setting.max_predicted_ttft,
        policy=setting.policy,
        watermark=setting.watermark,
        step_log=1 << 40,
        check_every=0,  # at the end, when it is idle
    )


def _arrivals(load: TwinLoad) -> Iterator[Arrival]:
    stamps = np.round(np.asarray(load.at_s) * _NS).astype(np.int64).tolist()
    inputs, outputs = np.asarray(load.input_tokens).tolist(), np.asarray(load.output_tokens).tolist()
    priorities = [0] * len(stamps) if load.priority is None else np.asarray(load.priority).tolist()
    deadlines, patience = _times(load.deadline_s, len(stamps)), _times(load.patience_s, len(stamps))
    for at, stamp in enumerate(stamps):
        prefix = () if load.prefixes is None else load.prefixes[at]
        due, leaves = deadlines[at], patience[at]
        yield Arrival(
            stamp,
            _prompt(at, inputs[at], prefix, load.prefix_tokens),
            SamplingParams(outputs[at], ignore_eos=True, seed=at),
            priority=priorities[at],
            deadline_ms=None if due != due else round(1e3 * due),  # NaN: none
            leaves_ns=None if leaves != leaves else stamp + round(_NS * leaves),
        )


def _times(column: Any, n: int) -> list[float]:
    return [float("nan")] * n if column is None else np.asarray(column, dtype=np.float64).tolist()


def _prompt(at: int, tokens: int, prefix: Any, block: int) -> list[int]:
    """Token ids: the blocks of the prefix, then the request's own."""
    made: list[int] = []
    for name in prefix:
        if len(made) >= tokens:
            break
        made += _block(_SHARED, int(name), block)
    made += _block(_OWN, at, tokens - len(made))
    del made[tokens:]
    return made


def _block(whose: int, name: int, tokens: int) -> list[int]:
    head = [name % _BASE, name // _BASE % _BASE, name // _BASE**2, whose]
    return [*head, *[_FILL] * (tokens - len(head))][: max(0, tokens)]


def _tell_hits(rig: VirtualEngine, cached: list[int]) -> None:
    """Put a pool into the engine that finds what the load says; nothing has been asked of the old one yet."""
    rig.use_pool(_ToldHits(rig.engine.pool.total, rig.engine.pool.size, cached))


class _ToldHits(CountingPool):
    """A pool whose prefix hits are told beforehand; the pages of a hit are the request's own."""

    def __init__(self, total: int, size: int, cached: list[int]) -> None:
        super().__init__(total, size)
        self._told = cached

    def match(self, tokens: Any) -> tuple[list[int], int]:
        """Pages for as many tokens as were told of the request, at least one token short; none where none are left."""
        at = tokens[0] + (tokens[1] * _BASE if len(tokens) > 1 else 0)
        pages = min(self._told[at], len(tokens) - 1) // self.size
        return self.take(pages) or [], ROOT


_COUNTS: Final = (
    "cached_tokens", "preemptions", "prefill_chunks", "batch_size_mean", "queue_depth_at_arrival",
    "queue_tokens_ahead", "step_first", "step_last",
)  # fmt: skip
_TIMES: Final = ("prefill_wait", "decode_max_gap", "floor_ttft", "floor_tpot")
_NEVER: Final = PhaseClock(0)  # of a request that was refused: no time in any phase


def _seconds(ns: list[int | None], since: Any = 0.0) -> Any:
    """NaN for None."""
    return (np.array(ns, dtype=np.float64) - since) / _NS


def _result(load: TwinLoad, setting: TwinSetting, rig: VirtualEngine, *, steps: bool, tokens: bool) -> TwinRun:
    lives: list[Life] = sorted(rig.lives, key=lambda life: int(life.id[1:]))  # v1, v2, ...: in order of arrival
    n = len(load)
    assert len(lives) == n
    clocks = [life.clock or _NEVER for life in lives]
    heads = np.array([clock.head_ns for clock in clocks], dtype=np.float64)
    first = _seconds([clock.first_token_ns for clock in clocks], heads)
    last = _seconds([clock.last_token_ns for clock in clocks], heads)
    made = np.array([life.output_tokens for life in lives], dtype=np.int64)
    outcome = np.array([life.reason for life in lives], dtype=np.str_)
    spans = [clock.durations() for clock in clocks]
    seen = [clock.facts for clock in clocks]
    facts: dict[str, Any] = {name: np.array([getattr(one, name) for one in seen]) for name in _COUNTS}
    for name in _TIMES:
        facts[f"{name}_s"] = _seconds([getattr(one, f"{name}_ns") for one in seen])
    records = rig.engine.steps.since(-1) if steps or tokens else []
    ends = np.array([record.end_ns for record in records], dtype=np.int64)
    return TwinRun(
        load=load,
        setting=setting,
        label=rig.what.label,
        outcome=outcome,
        output_tokens=made,
        ttft_s=first,
        e2e_s=last,
        tpot_s=np.where((outcome == LENGTH) & (made > 1), (last - first) / np.maximum(made - 1, 1), np.nan),
        phases={name: np.array([one[name] for one in spans]) / _NS for name in PHASES},
        facts=facts,
        length_s=rig.clock.now_ns / _NS,
        kv_blocks=rig.engine.pool.total,
        preemptions=rig.engine.counts.preemptions,
        request_ids=tuple(life.id for life in lives),
        steps=to_arrow(records, REPLICA, simulated=True) if steps else None,
        token_s=tuple(ends[life.token_steps or []] / _NS for life in lives) if tokens else None,
    )
