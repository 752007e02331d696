"""Synthetic run bundles for the tests of every folder, written by the real part writers.

A small queueing model (Poisson arrivals, a few decode slots, seeded) stands in for the server, so that phases sum,
spans agree with rows, and an overload looks like one: the queue grows through the run.  A few requests are dropped,
one is wrong; everything else follows from the model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from telemetry import names, slo
from telemetry.bundle import COMPLETE, Bundle

TARGET = "http://127.0.0.1:8000"
SLOTS = 4
ZERO_UNIX_NS = 1_700_000_000_000_000_000


def make_bundle(
    root: Path, n: int = 200, seed: int = 0, overload: bool = False, *, duration_s: float = 60.0, status: str = COMPLETE
) -> Bundle:
    """A finished and compacted bundle of n requests over duration_s; overload: the same in a third of the time."""
    rng = np.random.default_rng(seed)
    rows = _rows(rng, n, duration_s, 3.0 if overload else 1.0)
    policy = slo.load("demo")
    bundle = Bundle.create(
        root,
        {"trace": "synthetic", "keep_text": "wrong", "targets": [TARGET]},
        command="tailspan run --trace synthetic",
        slo=policy.manifest_entry(),
        seeds={"schedule": seed},
        versions={"tailspan": "0.1.0"},
        hashes={"trace": "0" * 64, "model": "1" * 64, "tokenizer": "2" * 64, "template": "3" * 64},
        clock={"zero_monotonic_ns": 5_000_000_000, "zero_unix_ns": ZERO_UNIX_NS},
        transforms=["window 60 s"],
        trace={"name": "synthetic", "format": "synthetic", "source": "made", "rows_read": n, "rows_kept": n,
               "rows_dropped": {}},
        scheduled=n,
        sampling_ratio=1.0,
        targets=[TARGET],
        server={TARGET: {"url": TARGET, "models": ["toy"]}},
    )  # fmt: skip
    writers = [bundle.writer("requests", f"worker-{worker}") for worker in range(2)]
    for row in rows:
        writers[row["worker"]].append(row)
    for writer in writers:
        writer.close()
    with bundle.writer("spans", "receiver") as spans:
        for row in rows:
            spans.append(spans_of(row))
    with bundle.writer("steps", "replica-0") as steps:
        steps.append(_steps(rows))
    with bundle.writer("series", "scraper") as series:
        series.append(_series(rows, duration_s))
    bundle.update(
        status=status,
        generator={"cpu_ratio": 0.12, "loop_lag_p99_s": 0.0006},
        workers=[
            {"name": f"worker-{k}", "status": "ok", "cpu_ratio": 0.12, "loop_lag_p99_s": 0.0006} for k in range(2)
        ],
    )
    if status != "running":
        bundle.compact()
    return bundle


def answered_row(index: int = 0, intended_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    """One good row (0.2 s to the first token, 20 tokens, 0.05 s each), with the columns in changes set otherwise."""
    phases = dict.fromkeys(names.PHASES, 0.0) | {
        names.INGRESS: 0.001, names.TOKENIZE: 0.002, names.QUEUE: 0.020, names.PREFILL: 0.170, names.DECODE: 0.950,
        names.SEND: 0.003,
    }  # fmt: skip
    return _answered(index, intended_s, phases, inputs=100, outputs=20) | changes


def dropped_row(index: int = 0, intended_s: float = 1.0, error: str = names.REFUSED, **changes: Any) -> dict[str, Any]:
    """One request without an answer."""
    return _base(index, intended_s, 100, 20) | {
        "sent_s": None if error in (names.REFUSED, names.TIMEOUT_CONNECT) else intended_s + 0.001,
        "lag_s": 0.0004,
        "end_s": intended_s + 0.002,
        "error": error,
        "error_detail": f"made for a test: {error}",
    } | changes  # fmt: skip


def _rows(rng: np.random.Generator, n: int, duration_s: float, rate_scale: float) -> list[dict[str, Any]]:
    """At rate_scale 1 the slots are half full."""
    intended = np.sort(rng.uniform(0, duration_s, n)) / rate_scale
    inputs = np.minimum(rng.lognormal(4.2, 0.6, n).astype(int) + 10, 400)
    outputs = np.minimum(rng.lognormal(3.0, 0.5, n).astype(int) + 2, 80)
    work = 0.001 * inputs + 0.03 * outputs  # seconds of one slot, at speed 1
    speed = work.sum() / (SLOTS * duration_s * 0.5)
    free = np.zeros(SLOTS)
    rows = []
    for index in range(n):
        arrival = intended[index] + 0.003
        slot = int(free.argmin())
        start = max(arrival, free[slot])
        prefill, decode = 0.001 * inputs[index] / speed, 0.03 * (outputs[index] - 1) / speed
        free[slot] = start + prefill + decode
        if index % 140 == 13:
            rows.append(dropped_row(index, float(intended[index]), names.STREAM_CUT if index > 140 else names.REJECTED,
                                    worker=index % 2, status=200 if index > 140 else 503))  # fmt: skip
            continue
        stall = 0.1 * decode if rng.random() < 0.05 else 0.0
        phases = dict.fromkeys(names.PHASES, 0.0) | {
            names.INGRESS: 0.0005, names.TOKENIZE: 0.0011, names.QUEUE: start - arrival, names.PREFILL: prefill,
            names.DECODE: decode - stall, names.STALL: stall, names.SEND: 0.0009,
        }  # fmt: skip
        row = _answered(index, float(intended[index]), phases, int(inputs[index]), int(outputs[index]))
        row["worker"] = index % 2
        if index == 29:  # the server read another prompt than the one that was meant
            row["prompt_tokens_reported"] += 3
        rows.append(row)
    return rows


def _base(index: int, intended_s: float, inputs: int, outputs: int) -> dict[str, Any]:
    return {
        "index": index, "trace_row": index, "class": "default", "worker": 0, "target": TARGET, "intended_s": intended_s,
        "attempts": 1, "input_tokens": inputs, "expected_output_tokens": outputs, "prompt_tokens_expected": inputs,
        "trace_id": f"{index + 1:032x}", "span_id": f"{index + 1:016x}", "sampled": True,
    }  # fmt: skip


def _answered(index: int, intended_s: float, phases: dict[str, float], inputs: int, outputs: int) -> dict[str, Any]:
    lag, connect, network = 0.0004, 0.0, 0.0006
    sent = intended_s + lag + connect
    # Whole nanoseconds, as the server's clock has them, so that the sum is exact.
    account = {name: round(seconds * 1e9) for name, seconds in phases.items()}
    duration = sum(account.values()) / 1e9
    end = sent + network + duration
    before = sum(phases[name] for name in (names.INGRESS, names.TOKENIZE, names.QUEUE, names.PREFILL))
    first = sent + network / 2 + before
    last = max(first, end - phases[names.SEND] - network / 2)
    chunks = np.linspace(first, last, outputs) if outputs > 1 else np.array([first])
    text = f"answer {index}: " + " ".join(f"word{index * 7 + k}" for k in range(outputs))
    return _base(index, intended_s, inputs, outputs) | {
        "replica": "127.0.0.1:8000", "model": "toy", "sent_s": sent, "lag_s": lag, "connect_s": connect,
        "connection_reused": True, "headers_s": sent + network / 2 + 0.001, "first_chunk_s": sent + network / 2 + 0.001,
        "first_token_s": first, "first_content_s": first, "last_token_s": last, "end_s": end,
        "chunk_s": (chunks - intended_s).tolist(), "chunk_tokens": [1] * outputs,
        "max_gap_s": float(np.diff(chunks).max()) if outputs > 1 else None,
        "tpot_s": (last - first) / (outputs - 1) if outputs > 1 else None,
        "status": 200, "finish_reason": "length", "done_marker": True,
        "prompt_tokens_reported": inputs, "completion_tokens_reported": outputs, "completion_tokens_counted": outputs,
        "cached_tokens": 0, "usage_estimated": False, "output_sha": f"{index:064x}", "output_chars": len(text),
        "replacement_chars": 0, "special_leaks": 0, "repeat_share": 0.05, "text": text,
        "server_request_id": f"req-{index}", "server_duration_s": duration,
        **{f"phase_{name}_s": account[name] / 1e9 for name in names.PHASES},
        "prefill_wait_s": 0.0, "prefill_chunks": math.ceil(inputs / 256), "preemptions": 0, "queue_depth_at_arrival": 0,
        "queue_tokens_ahead": 0, "decode_max_gap_s": 0.03, "batch_size_mean": 2.0, "step_first": index * 3,
        "step_last": index * 3 + outputs,
    }  # fmt: skip


def spans_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The client span of a row and, when the server gave an account, its server span with the children."""
    start = ZERO_UNIX_NS + round(row["intended_s"] * 1e9)
    end = ZERO_UNIX_NS + round(row["end_s"] * 1e9)
    client = _span(row["trace_id"], row["span_id"], None, "chat toy", "CLIENT", "loadgen", start, end, {})
    if row.get("server_duration_s") is None:
        return [client]
    account = {name: round(row[f"phase_{name}_s"] * 1e9) for name in names.PHASES}
    head = ZERO_UNIX_NS + round((row["sent_s"] + 0.0003) * 1e9)
    root_id = f"{row['index'] + 1:08x}00000000"
    attributes = {names.ATTR_PHASE_PREFIX + name: value for name, value in account.items()}
    spans = [client]
    at = head
    for position, name in enumerate(names.PHASES):
        length = account[name] + (account[names.STALL] if name == names.DECODE else 0)
        if name == names.STALL or not length:
            continue
        span_id = f"{row['index'] + 1:08x}{position + 1:08x}"
        own = {names.ATTR_PHASE_DURATION: account[name], names.ATTR_PHASE_STALL: length - account[name]}
        spans.append(_span(row["trace_id"], span_id, root_id, name, "INTERNAL", "tailspan", at, at + length, own))
        at += length
    root = _span(
        row["trace_id"], root_id, row["span_id"], names.SERVER_SPAN, "SERVER", "tailspan", head, at, attributes
    )
    return [*spans, root]


def _span(
    trace: str, span: str, parent: str | None, name: str, kind: str, service: str, start: int, end: int, attributes: Any
) -> dict[str, Any]:
    return {
        "trace_id": trace, "span_id": span, "parent_span_id": parent, "name": name, "kind": kind, "service": service,
        "start_unix_ns": start, "end_unix_ns": end, "status": "UNSET",
        "attributes": json.dumps(attributes), "events": "[]",
    }  # fmt: skip


def _steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at, steps = 0, []
    for step in range(max((row.get("step_last") or 0) for row in rows) + 1):
        batch = [
            r["server_request_id"] for r in rows if (r.get("step_first") or 0) <= step <= (r.get("step_last") or -1)
        ]
        steps.append({
            "replica": "127.0.0.1:8000", "step": step, "start_ns": at, "end_ns": at + 30_000_000, "gap_ns": 0,
            "kind": "decode", "running": len(batch), "waiting": 0, "decode_seqs": len(batch),
            "decode_tokens": len(batch), "prefill_seqs": 0, "prefill_tokens": 0, "recomputed_tokens": 0,
            "cached_tokens": 0, "context_tokens": 100 * len(batch), "kv_used": 8 * len(batch),
            "kv_free": 1024 - 8 * len(batch), "preempted": 0, "requests": batch, "request_tokens": [1] * len(batch),
        })  # fmt: skip
        at += 30_100_000
    return steps


def _series(rows: list[dict[str, Any]], duration_s: float) -> list[dict[str, Any]]:
    samples = [{"t_s": 0.0, "source": TARGET, "name": names.M_BUILD_INFO, "labels": "{}", "value": 1.0}]
    for second in range(math.ceil(duration_s) + 1):
        running = sum(1 for r in rows if r.get("finish_reason") and r["sent_s"] <= second < r["end_s"])
        tokens = sum(r["completion_tokens_reported"] for r in rows if r.get("finish_reason") and r["end_s"] <= second)
        for name, value in ((names.M_RUNNING, min(running, SLOTS)), (names.M_WAITING, max(0, running - SLOTS)),
                            (names.M_GENERATION_TOKENS + "_total", tokens)):  # fmt: skip
            samples.append(
                {"t_s": float(second), "source": TARGET, "name": name, "labels": "{}", "value": float(value)}
            )
    return samples
