"""A synthetic run of any size in the real schema, made from a seed: two replicas, a surge, drops, wrong answers.

Owns the model: arrivals with a surge, one queue per replica, an engine that takes equal steps.  What must hold: phases
sum, a request's first and last step stand in the step log at the very moments its phases say, so that pages which join
the two are right or wrong visibly.  Left out, since nothing here reads them at this size: the moments of single chunks
above CHUNKS_UP_TO requests, the lists of requests in each step, and spans.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry import names, slo
from telemetry.bundle import COMPLETE, Bundle
from telemetry.parts import DATA_FILE, VERSION_KEY
from telemetry.schema import SCHEMA_VERSION, TABLES

REPLICAS: Final = ("10.0.0.1:8000", "10.0.0.2:8000")
CHUNKS_UP_TO: Final = 5_000
_STEP_S: Final = (0.024, 0.030)  # the second replica is slower
_SLOTS: Final = 48  # sequences that a replica decodes together
_CHUNK: Final = 512  # prompt tokens that it reads in a step
_REJECTS_BEYOND_S: Final = 6.0  # predicted wait
_CLOCK_S: Final = (7_000.0, 91_000.0)  # where the engines' clocks stand at the generator's zero
_CLASSES: Final = ("chat", "code", "default")
_MEAN_OUTPUT: Final = 60
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def write_bundle(root: Path, n: int, seed: int, load: float = 0.9) -> Bundle:
    """A finished bundle of n requests.  load: share of what the replicas carry that arrives outside the surge."""
    rng = np.random.default_rng(seed)
    per_s = load * sum(_SLOTS / (step * _MEAN_OUTPUT * 1.12) for step in _STEP_S)
    length = n / per_s
    columns = _requests(rng, n, length)
    policy = slo.load("chat")
    bundle = Bundle.create(
        root,
        {"trace": "synthetic", "keep_text": "none", "seed": seed},
        command=f"python -m benchmarks.big_bundle --requests {n} --seed {seed}",
        slo=policy.manifest_entry(),
        seeds={"schedule": seed},
        versions={"tailspan": "0.1.0"},
        clock={"zero_monotonic_ns": 5_000_000_000, "zero_unix_ns": 1_700_000_000_000_000_000},
        trace={"name": "synthetic-surge", "format": "synthetic", "source": "benchmarks.big_bundle", "synthetic": True,
               "rows_read": n, "rows_kept": n, "rows_dropped": {}},
        transforms=[{"name": "surge", "factor": 1.5}],
        scheduled=n,
        length_s=length,
        sampling_ratio=0.0,
        targets=[f"http://{replica}" for replica in REPLICAS],
    )  # fmt: skip
    _write(bundle, "steps", _steps(columns, length))
    _write(bundle, "series", _series(columns, length))
    _write(bundle, "requests", {name: values for name, values in columns.items() if not name.startswith("_")})
    bundle.update(status=COMPLETE, generator={"cpu_ratio": 0.31, "loop_lag_p99_s": 0.0007})
    return bundle


def _requests(rng: np.random.Generator, n: int, length: float) -> dict[str, Any]:
    surge = rng.random(n) < 0.08  # on top, in a tenth of the time
    intended = np.sort(np.where(surge, rng.uniform(0.6, 0.7, n), rng.uniform(0, 1, n)) * length)
    inputs = np.minimum(rng.lognormal(6.0, 0.8, n).astype(np.int64) + 8, 6000)
    outputs = np.minimum(rng.lognormal(3.8, 0.7, n).astype(np.int64) + 2, 600)
    replica = rng.integers(0, 2, n)
    lag, network = rng.exponential(0.0003, n), 0.0004 + rng.exponential(0.0003, n)
    sent = intended + lag
    ingress, tokenize, send = np.full(n, 0.0004), 0.0002 + inputs * 2e-7, np.full(n, 0.0005)
    head = sent + network / 2
    queue, duration = np.zeros(n), np.zeros(n)
    prefill, decode, preempted = np.zeros(n), np.zeros(n), np.zeros(n)
    first_step, last_step = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    rejected = np.zeros(n, dtype=np.bool_)
    lost = np.where(rng.random(n) < 0.01, rng.integers(5, 60, n), 0)  # steps in which it had no KV memory
    for which, step in enumerate(_STEP_S):
        mine = np.flatnonzero(replica == which)
        steps = np.ceil(inputs[mine] / _CHUNK).astype(np.int64) + outputs[mine] - 1 + lost[mine]
        arrival = head[mine] + ingress[mine] + tokenize[mine]
        wait = _waits(arrival, steps * step / _SLOTS)
        rejected[mine] = wait > _REJECTS_BEYOND_S
        begins = np.ceil((arrival + np.minimum(wait, _REJECTS_BEYOND_S)) / step).astype(np.int64)
        reading = np.ceil(inputs[mine] / _CHUNK).astype(np.int64)
        queue[mine] = begins * step - arrival
        prefill[mine], preempted[mine] = reading * step, lost[mine] * step
        decode[mine] = (outputs[mine] - 1) * step
        first_step[mine], last_step[mine] = begins, begins + steps - 1
    for part in (ingress, tokenize, queue, prefill, decode, preempted, send):
        part[:] = np.round(part, 9)  # whole nanoseconds, as the server's clock has them
        duration += part
    first = head + ingress + tokenize + queue + prefill
    end = sent + network + duration
    cut = ~rejected & (rng.random(n) < 0.001)
    answered = ~(rejected | cut)
    end = np.where(rejected, sent + 0.002, np.where(cut, first + 0.5 * decode, end))
    misread = answered & (rng.random(n) < 0.0008)

    def where(mask: npt.NDArray[np.bool_], values: Any, kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind, mask=~mask)

    zero = np.zeros(n)
    phases = dict.fromkeys(names.PHASES, zero) | {
        names.INGRESS: ingress, names.TOKENIZE: tokenize, names.QUEUE: queue, names.PREFILL: prefill,
        names.DECODE: decode, names.PREEMPTED: preempted, names.SEND: send,
    }  # fmt: skip
    index = np.arange(n)
    classes = pa.DictionaryArray.from_arrays(
        pa.array(rng.choice(3, n, p=(0.7, 0.2, 0.1)).astype(np.int32)), pa.array(_CLASSES)
    )
    asked = pa.DictionaryArray.from_arrays(pa.array(replica.astype(np.int32)), pa.array(REPLICAS)).cast(pa.string())
    errors = np.where(rejected, 0, np.where(cut, 1, -1)).astype(np.int32)
    chunks = _chunks(answered, first - intended, decode, outputs) if n <= CHUNKS_UP_TO else {}
    return {
        "index": index, "trace_row": index, "class": classes.cast(pa.string()), "worker": np.zeros(n, np.int32),
        "target": pa.array(np.char.add("http://", np.array(REPLICAS)))
        .take(pa.array(replica)).cast(pa.string()),
        "replica": asked, "model": pa.array(["toy"] * 1).take(pa.array(np.zeros(n, np.int64))),
        "intended_s": intended, "sent_s": sent, "lag_s": lag, "connect_s": zero,
        "connection_reused": np.ones(n, np.bool_),
        "first_chunk_s": where(~rejected, first, pa.float64()), "first_token_s": where(~rejected, first, pa.float64()),
        "first_content_s": where(~rejected, first, pa.float64()),
        "last_token_s": where(answered, first + decode + preempted, pa.float64()), "end_s": end,
        "max_gap_s": where(answered & (outputs > 1), np.where(lost > 0, preempted, 0.03), pa.float64()),
        "tpot_s": where(answered & (outputs > 1), (decode + preempted) / np.maximum(outputs - 1, 1), pa.float64()),
        "status": np.where(rejected, 503, 200).astype(np.int32),
        "error": pa.DictionaryArray.from_arrays(
            pa.array(errors, mask=errors < 0), pa.array([names.REJECTED, names.STREAM_CUT])).cast(pa.string()),
        "finish_reason": where(answered, np.full(n, "stop"), pa.string()), "done_marker": answered,
        "attempts": np.where(rejected, 2, 1).astype(np.int32), "input_tokens": inputs.astype(np.int32),
        "expected_output_tokens": outputs.astype(np.int32), "prompt_tokens_expected": inputs.astype(np.int32),
        "prompt_tokens_reported": where(answered, (inputs + 3 * misread).astype(np.int32), pa.int32()),
        "completion_tokens_reported": where(answered, outputs.astype(np.int32), pa.int32()),
        "completion_tokens_counted": where(answered, outputs.astype(np.int32), pa.int32()),
        "cached_tokens": where(answered, np.where(index % 3 == 0, inputs // 2, 0).astype(np.int32), pa.int32()),
        "output_chars": where(answered, (4 * outputs).astype(np.int32), pa.int32()),
        "replacement_chars": where(answered, np.zeros(n, np.int32), pa.int32()),
        "special_leaks": where(answered, np.zeros(n, np.int32), pa.int32()),
        "repeat_share": where(answered, np.full(n, 0.05, np.float32), pa.float32()),
        "server_duration_s": where(answered, duration, pa.float64()),
        **{f"phase_{name}_s": where(answered, phases[name], pa.float64()) for name in names.PHASES},
        "prefill_chunks": where(answered, np.ceil(inputs / _CHUNK).astype(np.int32), pa.int32()),
        "preemptions": where(answered, (lost > 0).astype(np.int32), pa.int32()),
        "step_first": where(answered, first_step, pa.int64()), "step_last": where(answered, last_step, pa.int64()),
        "sampled": np.zeros(n, np.bool_), **chunks,
        "_replica": replica, "_answered": answered, "_first": first_step, "_last": last_step, "_inputs": inputs,
        "_arrival": head, "_rejected": rejected,
    }  # fmt: skip


def _waits(arrival: Floats, work: Floats) -> Floats:
    """Seconds of work before each arrival that are not done yet; what is rejected for that adds none."""
    found, free = [], 0.0
    for at, own in zip(arrival.tolist(), work.tolist(), strict=True):
        wait = max(0.0, free - at)
        found.append(wait)
        if wait <= _REJECTS_BEYOND_S:
            free = max(free, at) + own
    return np.array(found)


def _chunks(answered: npt.NDArray[np.bool_], first: Floats, decode: Floats, outputs: Ints) -> dict[str, Any]:
    times = [
        (first[k] + np.linspace(0, decode[k], outputs[k])).tolist() if answered[k] else None for k in range(len(first))
    ]
    tokens = [[1] * int(outputs[k]) if answered[k] else None for k in range(len(first))]
    return {"chunk_s": pa.array(times, pa.list_(pa.float32())), "chunk_tokens": pa.array(tokens, pa.list_(pa.int16()))}


def _steps(columns: dict[str, Any], length: float) -> dict[str, Any]:
    parts = []
    for which, step in enumerate(_STEP_S):
        mine = (columns["_replica"] == which) & columns["_answered"]
        first, last = columns["_first"][mine], columns["_last"][mine]
        inputs = columns["_inputs"][mine]
        count = int(last.max(initial=0)) + 2
        running = _in_between(first, last + 1, count)
        reading = np.ceil(inputs / _CHUNK).astype(np.int64)
        prefilling = _in_between(first, first + reading, count)
        tokens = _in_between(first, first + reading, count, weights=inputs / reading)
        context = _in_between(first, last + 1, count, weights=inputs.astype(np.float64))
        arrived = np.floor(columns["_arrival"][mine] / step).astype(np.int64)
        waiting = _in_between(np.minimum(arrived, first), first, count)
        busy = np.flatnonzero(running > 0)
        start = np.round((_CLOCK_S[which] + busy * step) * 1e9).astype(np.int64)
        decodes = (running - prefilling)[busy].astype(np.int32)
        took = np.round((0.35 + 0.6 * np.minimum(1, running[busy] / (2 * _SLOTS))) * step * 1e9).astype(np.int64)
        kind = np.where(prefilling[busy] == 0, "decode", np.where(decodes == 0, "prefill", "mixed"))
        used = np.ceil(context[busy] / 16).astype(np.int32)
        parts.append(
            pa.table({
                "replica": pa.array([REPLICAS[which]]).take(pa.array(np.zeros(len(busy), np.int64))),
                "step": busy, "start_ns": start, "end_ns": start + took, "gap_ns": np.zeros(len(busy), np.int64),
                "kind": kind, "running": running[busy].astype(np.int32), "waiting": waiting[busy].astype(np.int32),
                "decode_seqs": decodes, "decode_tokens": decodes, "prefill_seqs": prefilling[busy].astype(np.int32),
                "prefill_tokens": np.round(tokens[busy]).astype(np.int32),
                "recomputed_tokens": np.zeros(len(busy), np.int32), "cached_tokens": np.zeros(len(busy), np.int32),
                "context_tokens": np.round(context[busy]).astype(np.int64), "kv_used": used,
                "kv_free": np.maximum(0, 40_000 - used).astype(np.int32), "preempted": np.zeros(len(busy), np.int32),
                "bytes": np.full(len(busy), 300_000_000, np.int64), "flops": np.full(len(busy), 10**9, np.int64),
                "floor_ns": (took * 0.45).astype(np.int64), "efficiency": np.full(len(busy), 0.45),
                "wall": pa.array(["memory"]).take(pa.array(np.zeros(len(busy), np.int64))),
            })
        )  # fmt: skip
    joined = pa.concat_tables(parts)
    return {name: joined.column(name) for name in joined.column_names}


def _in_between(first: Ints, until: Ints, count: int, weights: Floats | None = None) -> Floats:
    """Per step, how many (or how much weight) of the half-open ranges [first, until) cover it."""
    change = np.bincount(np.minimum(first, count), weights, count + 1).astype(np.float64)
    change -= np.bincount(np.minimum(until, count), weights, count + 1)
    found: Floats = np.cumsum(change)[:count]
    return np.round(found, 6)


def _series(columns: dict[str, Any], length: float) -> dict[str, Any]:
    moments = np.arange(0, length, 5.0)
    rows: list[dict[str, Any]] = []
    for which, step in enumerate(_STEP_S):
        mine = (columns["_replica"] == which) & columns["_answered"]
        first, last = columns["_first"][mine] * step, columns["_last"][mine] * step
        arrival = columns["_arrival"][mine]
        begun, done = np.searchsorted(np.sort(first), moments), np.searchsorted(np.sort(last), moments)
        come = np.searchsorted(arrival, moments)
        for name, values in ((names.M_RUNNING, begun - done), (names.M_WAITING, come - begun)):
            rows += [
                {
                    "t_s": float(t),
                    "source": f"http://{REPLICAS[which]}",
                    "name": name,
                    "labels": "{}",
                    "value": float(v),
                }
                for t, v in zip(moments, values, strict=True)
            ]
    return {name: [row[name] for row in rows] for name in TABLES["series"].names}


def _write(bundle: Bundle, table: str, columns: dict[str, Any]) -> None:
    schema = TABLES[table]
    n = len(next(iter(columns.values())))
    made = [
        pa.chunked_array([pa.nulls(n, field.type)])
        if field.name not in columns
        else _cast(columns[field.name], field.type)
        for field in schema
    ]
    full = pa.Table.from_arrays(made, schema=pa.schema([pa.field(f.name, f.type) for f in schema]))
    folder = bundle.path / table
    folder.mkdir()
    pq.write_table(
        full.replace_schema_metadata({VERSION_KEY: str(SCHEMA_VERSION)}), folder / DATA_FILE, compression="zstd",
        row_group_size=65_536,
    )  # fmt: skip


def _cast(values: Any, kind: pa.DataType) -> Any:
    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return column.cast(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic run bundle of any size.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--root", type=Path, default=Path("build/accept-pages/runs"))
    given = parser.parse_args()
    print(write_bundle(given.root, given.requests, given.seed).path)


if __name__ == "__main__":
    main()
