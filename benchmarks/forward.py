"""The CPU forward beside its floor and beside plain torch, alternating in one process.

Usage: python -m benchmarks.forward [--model smollm2] [--rounds 5]
Floor of a step: max(bytes of weights and KV / measured read bandwidth, FLOPs / measured peak of a large fp32 product).
Prints medians and ratios; absolute figures are this machine's at this hour.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.native.runner import NativeRunner
from engine.phase_clock import PhaseClock
from engine.request import Request, SamplingParams
from engine.runner_cpu import CpuRunner
from engine.scheduler import Slice
from models.store import LoadedModel, load

CONTEXT = 200
WORK = {"prefill 128": (1, 128), "decode 1": (1, 1), "decode 4": (4, 1), "decode 8": (8, 1), "decode 16": (16, 1)}


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Median of ``rounds`` calls, seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def slices(sequences: int, n: int) -> list[Slice]:
    """``sequences`` requests with n new tokens each; decodes have CONTEXT tokens behind them."""
    made = []
    for i in range(sequences):
        tokens = [100 + i] * (n if n > 1 else CONTEXT)
        request = Request(f"r{i}", tokens, SamplingParams(max_tokens=1), PhaseClock(0), lambda _output: None)
        request.tokens, request.blocks = tokens, list(range(16 * i, 16 * (i + 1)))
        made.append(Slice(request, len(tokens) - n, n, True))
    return made


def floor_seconds(
    model: LoadedModel, sequences: int, n: int, bandwidth: float, peak: float, weight_bytes: float
) -> float:
    """The least time a step can take here: bytes / bandwidth or FLOPs / peak, whichever is more."""
    shape = model.shape
    head = shape.vocab * shape.hidden
    body = shape.parameters() - head
    context = CONTEXT if n == 1 else n / 2
    kv = sequences * context * shape.kv_bytes_per_token(4)
    attention = 4 * sequences * n * context * shape.n_heads * shape.head_dim * shape.n_layers
    flops = 2 * sequences * n * body + 2 * sequences * head + attention
    return max((weight_bytes * (body + head) + kv) / bandwidth, flops / peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = load(options.model)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    big = torch.empty(64 * 1024 * 1024)
    big.fill_(1.0)
    bandwidth = big.numel() * 4 / median_seconds(lambda: big.sum(), 5)
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    peak = 2 * 1536**3 / median_seconds(lambda: a @ b, 5)
    print(
        f"{threads} threads, read {bandwidth / 1e9:.1f} GB/s, fp32 product {peak / 1e9:.0f} GFLOP/s, context {CONTEXT}"
    )
    runners: dict[str, NativeRunner | CpuRunner] = {
        f"C, {kind} weights": NativeRunner(model, EngineConfig(dtype=kind, kv_blocks=300))
        for kind in ("auto", "bf16", "fp32")
    }
    runners["torch, fp32"] = CpuRunner(model, EngineConfig(dtype="fp32", kv_blocks=300))
    print(f"{'work':<14}" + "".join(f"{name:>32}" for name in runners) + f"{'C auto / torch':>18}")
    for work, (sequences, n) in WORK.items():
        plan = slices(sequences, n)
        times: dict[str, list[float]] = {name: [] for name in runners}
        for runner in runners.values():
            runner.forward(plan)
        for _ in range(options.rounds):
            for name, runner in runners.items():
                start = time.perf_counter()
                runner.forward(plan)
                times[name].append(time.perf_counter() - start)
        line = f"{work:<14}"
        for name, runner in runners.items():
            took = statistics.median(times[name])
            floor = floor_seconds(model, sequences, n, bandwidth, peak, runner.weight_bytes)
            line += f"{f'{took * 1e3:.1f} ms {sequences * n / took:.0f} token/s {floor / took:.0%}':>32}"
        ratio = statistics.median(t / c for t, c in zip(times["torch, fp32"], times["C, auto weights"], strict=True))
        print(line + f"{ratio:>17.2f}x")


if __name__ == "__main__":
    main()
