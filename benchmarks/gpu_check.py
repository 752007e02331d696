"""The kernels and a whole model on a GPU, or (``--dry``) the same code on this CPU with tiny shapes.

    scripts/gpu_check.sh --kernels      every kernel against its reference, GB/s or TFLOP/s beside measured ceilings
    scripts/gpu_check.sh --model        Llama-3.1-8B and SmolLM2 shapes with random weights, plain torch, a server run
    scripts/gpu_check.sh --dry [...]    in Triton's interpreter: proves that nothing stops it, measures nothing

Results: JSON to --out (default gpu_check.json) and a table on stdout.  Exit code 1 when a kernel is wrong.
Needs torch, triton and numpy; the server run also aiohttp, tokenizers, safetensors and prometheus-client: what is
missing is named, not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import gpu_kernels, gpu_model
from benchmarks.gpu_clock import Ceilings, Clock, ceilings
from benchmarks.gpu_server import engine_run, server_run
from engine.kernels.launch import INTERPRETED, compile_seconds
from models.known_shapes import SHAPES
from models.shape import ModelShape


def main(arguments: list[str]) -> int:
    """The command line at the top."""
    parser = argparse.ArgumentParser(description="Kernels and model on a GPU")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    given = parser.parse_args(arguments)
    if given.dry != INTERPRETED:
        parser.error("start it through scripts/gpu_check.sh, which chooses the interpreter for --dry alone")
    if not given.dry and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --dry runs without one")
    both = not (given.kernels or given.model)
    device = torch.device("cpu" if given.dry else "cuda")
    clock = Clock(device, repeats=1 if given.dry else 5)
    ceiling = ceilings(clock, dry=given.dry)
    result: dict[str, Any] = {"dry": given.dry, "where": _where(device), "ceilings": dataclasses.asdict(ceiling)}
    _head(result, ceiling)
    wrong = 0
    if given.kernels or both:
        start = time.perf_counter()
        rows = gpu_kernels.check_kernels(clock, ceiling, gpu_kernels.DRY if given.dry else gpu_kernels.REAL)
        wrong = _kernels(rows)
        result["kernels"] = [dataclasses.asdict(row) for row in rows]
        result["kernels_s"] = time.perf_counter() - start
        _save(given.out, result)
    if given.model or both:
        start = time.perf_counter()
        result["models"] = {}
        plan = gpu_model.DRY if given.dry else gpu_model.REAL
        for name in ("tiny",) if given.dry else ("llama-3.1-8b", "smollm2"):
            shape = tiny_shape() if given.dry else SHAPES[name].shape
            figures = gpu_model.check_model(shape, ceiling, plan, device)
            _figures(name, figures)
            result["models"][name] = [_row(figure) for figure in figures]
            _save(given.out, result)
        shape = tiny_shape() if given.dry else SHAPES["smollm2"].shape
        for name, work in (
            ("engine", lambda: engine_run(shape, device, dry=given.dry)),
            ("server", lambda: server_run(dry=given.dry)),
        ):
            result[name] = work()
            _save(given.out, result)
            print(f"\n{name}, concurrent streams: {json.dumps(result[name])}")
        result["model_s"] = time.perf_counter() - start
    if given.dry:
        print("\ndry: the code runs and its results are right; its times and shares mean nothing")
    result["compile_s"] = dict(compile_seconds)
    _save(given.out, result)
    print(f"\nwritten to {given.out}; {wrong} kernels wrong")
    return 1 if wrong else 0


def _row(one: gpu_model.Figure) -> dict[str, Any]:
    """As JSON has it: null for what was not measured."""
    found = dataclasses.asdict(one)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}


def _save(path: Path, result: dict[str, Any]) -> None:
    """After every part: what runs out of time keeps what it has."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tiny_shape() -> ModelShape:
    """SmolLM2's, cut down: 3 queries a KV head."""
    return dataclasses.replace(
        SHAPES["smollm2"].shape, n_layers=1, hidden=96, ffn=64, n_heads=3, n_kv_heads=1, head_dim=32, vocab=300
    )


def _where(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, interpreter"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _head(result: dict[str, Any], ceiling: Ceilings) -> None:
    print(", ".join(f"{key} {value}" for key, value in result["where"].items()))
    print(f"ceilings: copy {ceiling.bandwidth / 1e9:.0f} GB/s, product {ceiling.flops / 1e12:.1f} TFLOP/s")


def _kernels(rows: list[gpu_kernels.Row]) -> int:
    """Print them; how many are wrong."""
    print(f"\n{'kernel':44} {'us':>9} {'range':>17} {'GB/s':>8} {'TFLOP/s':>8} {'of bw':>6} {'of peak':>7}  error")
    for row in rows:
        spread = f"{row.least * 1e6:.1f}..{row.most * 1e6:.1f}"
        print(
            f"{row.name:44} {row.seconds * 1e6:9.1f} {spread:>17} {row.bytes / row.seconds / 1e9:8.1f} "
            f"{row.flops / row.seconds / 1e12:8.2f} {row.of_bandwidth:6.1%} {row.of_flops:7.1%}  "
            f"{row.error:.1e} {'ok' if row.right else f'WRONG, allowed {row.bound:.1e}'}"
        )
    return sum(not row.right for row in rows)


def _figures(name: str, figures: list[gpu_model.Figure]) -> None:
    print(f"\n{name:24} {'engine':28} {'ms':>9} {'token/s':>10} {'of floor':>9}")
    for one in figures:
        if math.isnan(one.seconds):
            print(f"{one.what:24} {one.engine:28} {one.note}")
            continue
        figures_of_it = f"{one.seconds * 1e3:9.2f} {one.tokens_s:10.1f} {one.of_floor:9.1%}"
        print(f"{one.what:24} {one.engine:28} {figures_of_it}  {one.note}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
