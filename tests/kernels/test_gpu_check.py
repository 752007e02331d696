"""scripts/gpu_check.sh runs whole on this CPU, so that its first minute on a GPU is not lost to a typo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1000)  # 20 s where the machine is free
def test_the_dry_run_goes_through_kernels_models_peer_and_server(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--dry", "--out", out],
        env={**os.environ, "PYTHON": sys.executable, "GPU_CHECK_TIMEOUT": "900"},
        capture_output=True,
        text=True,
        timeout=950,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["dry"] is True
    names = [row["name"].split(" ")[0] for row in result["kernels"]]
    assert set(names) == {
        "rms_norm", "add_rms_norm", "silu_mul", "rope_and_cache", "gemm_small_m", "gemm_q8", "gemm_q4", "embed_q8",
        "paged_decode", "paged_prefill", "SDPA", "sample",
    }  # fmt: skip
    assert all(row["error"] <= row["bound"] for row in result["kernels"])
    figures = result["models"]["tiny"]
    assert {figure["what"] for figure in figures} == {"prefill 20", "decode batch 1", "decode batch 3"}
    assert {figure["engine"].split(" ")[0] for figure in figures} == {"tailspan", "torch"}
    assert all(figure["seconds"] > 0 for figure in figures)
    assert result["engine"]["tokens_s"] > 0, result["engine"]
    assert result["server"]["tokens_s"] > 0, result["server"]
    assert "WRONG" not in done.stdout


def test_without_a_gpu_and_without_dry_it_says_so() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--kernels"],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "no CUDA device is visible" in done.stderr
