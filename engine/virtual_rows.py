"""A run in virtual time as the tables of a run bundle: what ``telemetry.virtual_load`` asks of a twin.

What must hold: rows come from the phase clocks and from nothing else, so that phases sum to the time in the server; a
run with the same load and setting gives the same rows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from engine.config import SIMULATED, EngineConfig
from engine.request import LENGTH, STOP, SamplingParams
from engine.simulated import Simulation, SimulatedRunner, open_reference, simulation
from engine.step_model import UTILISATION
from engine.steplog import to_arrow
from engine.virtual import NEVER, Arrival, Life, VirtualEngine
from models.steady_load import Limits
from telemetry import names
from telemetry.schema import REQUESTS
from telemetry.virtual_load import Offered, Shown, TwinSetting, Watch

WATCH_S = 5.0  # virtual seconds between two looks of a watch
STEPS_KEPT = 1 << 20
REFUSED_STATUS = 429


class VirtualTwin:
    """See ``telemetry.virtual_load.Twin``."""

    def __init__(self, setting: TwinSetting) -> None:
        """Raises UserError: no such model, device or precision, or no room for KV."""
        self.config = EngineConfig(
            model=setting.model,
            backend=SIMULATED,
            device=setting.device,
            dtype=setting.weights,
            max_batch=setting.max_batch,
            token_budget=setting.token_budget,
            kv_blocks=setting.kv_blocks,
            queue_limit=setting.queue_limit,
            prefix_cache=False,  # prompts have no page in common
            step_log=STEPS_KEPT,
            sim_fit=setting.sim_fit,
            sim_seed=setting.seed,
        )
        self.reference = open_reference(setting.model)
        self.what: Simulation = simulation(self.config, self.reference)
        runner = SimulatedRunner(self.config, self.what)
        self.label, self.max_context, self.cost = self.what.label, runner.max_context, self.what.cost
        self.utilisation = UTILISATION if self.what.fit is None else 1.0
        self._gap_ns = 0 if self.what.fit is None else round(self.what.fit.gap_s * 1e9)
        self.limits = Limits(
            setting.max_batch, setting.token_budget, runner.kv_blocks * self.config.block_size
        )

    def run(self, load: Offered, watch: Watch | None = None, before: Offered | None = None) -> Shown:
        """See the protocol."""
        engine = VirtualEngine(self.config, self.what, gap_ns=self._gap_ns)
        gc.collect()
        gc.disable()  # a million records of steps are walked again and again for nothing
        start = time.process_time()
        try:
            first, zero_ns = self._first(engine, before)
            stopped = self._measured(engine, load, zero_ns, watch)
            cpu_s = time.process_time() - start
            records = engine.engine.steps.since(first - 1)
            lives = [life for life in engine.lives if life.arrived_ns >= zero_ns]
            offset = 0 if before is None else len(before.intended_s)
            requests = table_of(lives, load, offset, zero_ns, self.config, self.reference.name)
        finally:
            gc.enable()
        steps = to_arrow(records, replica_of(self.config), simulated=True)
        return Shown(requests, steps, stopped, (engine.clock() - zero_ns) / 1e9, cpu_s)

    def _first(self, engine: VirtualEngine, before: Offered | None) -> tuple[int, int]:
        """Bring what comes before and take it away again; the first step and the moment of what is measured."""
        if before is None:
            return 0, 0
        engine.feed(arrivals(before, 0))
        last_ns = round(float(before.intended_s[-1]) * 1e9) + 1
        engine.run(last_ns)
        for request_id in list(engine.requests):
            engine.abort(request_id)
        engine.run()
        return engine.engine.counts.steps, engine.clock()

    def _measured(self, engine: VirtualEngine, load: Offered, zero_ns: int, watch: Watch | None) -> str | None:
        engine.feed(arrivals(load, zero_ns))
        if watch is None:
            engine.run()
            return None
        done_before, at_s = len(engine.lives), 0.0
        while True:
            at_s += WATCH_S
            engine.run(zero_ns + round(at_s * 1e9))
            if engine.clock.next_ns == NEVER and not engine.requests:
                return None
            due = int(np.searchsorted(load.intended_s, at_s, side="right"))
            if why := watch(at_s, due, len(engine.lives) - done_before):
                return why


def arrivals(load: Offered, zero_ns: int) -> Iterator[Arrival]:
    """The requests of a load after a moment of the clock; no two prompts share a page."""
    stamps = (np.round(load.intended_s * 1e9).astype(np.int64) + zero_ns).tolist()
    inputs, outputs = load.input_tokens.tolist(), load.output_tokens.tolist()
    for at, (stamp, tokens, answer) in enumerate(zip(stamps, inputs, outputs, strict=True)):
        prompt = [at % 32_768, at // 32_768, *[7] * max(0, tokens - 2)][: max(1, tokens)]
        yield Arrival(stamp, prompt, SamplingParams(answer, ignore_eos=True, seed=at))


def replica_of(config: EngineConfig) -> str:
    """The name under which a simulated engine stands in rows."""
    return f"virtual-{config.device}"


def table_of(
    lives: list[Life], load: Offered, offset: int, zero_ns: int, config: EngineConfig, model: str
) -> pa.Table:
    """The rows of requests that are over (``telemetry.schema.REQUESTS``); offset: requests that came before them."""
    rows = [_row(life, load, int(life.id[1:]) - 1 - offset, zero_ns) for life in lives]
    fixed = {"replica": replica_of(config), "target": f"virtual://{config.device}", "model": model, "worker": 0}
    return pa.Table.from_pylist([row | fixed for row in sorted(rows, key=lambda row: row["index"])], schema=REQUESTS)


def _row(life: Life, load: Offered, index: int, zero_ns: int) -> dict[str, Any]:
    intended = (life.arrived_ns - zero_ns) / 1e9
    row: dict[str, Any] = {
        "index": index,
        "trace_row": int(load.trace_row[index]),
        "class": load.class_names[load.klass[index]],
        "intended_s": intended,
        "sent_s": intended,
        "lag_s": 0.0,
        "connect_s": 0.0,
        "connection_reused": True,
        "attempts": 1,
        "input_tokens": life.prompt_tokens,
        "prompt_tokens_expected": life.prompt_tokens,
        "expected_output_tokens": int(load.output_tokens[index]),
        "server_request_id": life.id,
        "sampled": False,
    }
    clock = life.clock
    if clock is None:
        refused = {"status": REFUSED_STATUS, "error": names.REJECTED, "error_detail": life.reason, "end_s": intended}
        return row | refused
    if life.reason not in (STOP, LENGTH) or clock.first_token_ns is None or clock.last_token_ns is None:
        return row | {"status": 500, "error": names.SERVER_ERROR, "error_detail": life.reason, "end_s": intended}
    durations, facts = clock.durations(), clock.facts
    first, last = ((ns - zero_ns) / 1e9 for ns in (clock.first_token_ns, clock.last_token_ns))
    several = life.output_tokens > 1
    return row | {
        "headers_s": first,
        "first_chunk_s": first,
        "first_token_s": first,
        "first_content_s": first,
        "last_token_s": last,
        "end_s": last,
        "max_gap_s": facts.decode_max_gap_ns / 1e9 if several else None,
        "tpot_s": (last - first) / (life.output_tokens - 1) if several else None,
        "status": 200,
        "finish_reason": life.reason,
        "truncated_by_limit": life.reason == LENGTH,
        "done_marker": True,
        "prompt_tokens_reported": life.prompt_tokens,
        "completion_tokens_reported": life.output_tokens,
        "completion_tokens_counted": life.output_tokens,
        "cached_tokens": facts.cached_tokens,
        "usage_estimated": False,
        "server_duration_s": sum(durations.values()) / 1e9,
        **{f"phase_{name}_s": durations[name] / 1e9 for name in names.PHASES},
        "prefill_wait_s": facts.prefill_wait_ns / 1e9,
        "prefill_chunks": facts.prefill_chunks,
        "preemptions": facts.preemptions,
        "queue_depth_at_arrival": facts.queue_depth_at_arrival,
        "queue_tokens_ahead": facts.queue_tokens_ahead,
        "decode_max_gap_s": facts.decode_max_gap_ns / 1e9,
        "batch_size_mean": facts.batch_size_mean,
        "step_first": facts.step_first,
        "step_last": facts.step_last,
        "floor_ttft_s": None if facts.floor_ttft_ns is None else facts.floor_ttft_ns / 1e9,
        "floor_tpot_s": None if facts.floor_tpot_ns is None else facts.floor_tpot_ns / 1e9,
    }
