"""scripts/gpu_check.sh runs whole on this CPU, so that its first minute on a GPU is not lost to a typo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


#: What a bare GPU machine has; jinja2 and yaml come with torch and tokenizers.
BARE = {
    "torch", "triton", "numpy", "aiohttp", "tokenizers", "safetensors", "prometheus-client", "jinja2", "pyyaml",
}  # fmt: skip
#: Modules of distributions that are called otherwise.
MODULES = {"opentelemetry-sdk": "opentelemetry", "opentelemetry-exporter-otlp-proto-http": "opentelemetry"}
#: Read by python when it starts: modules that are here are not found.
CUSTOMIZE = """
import importlib.machinery as machinery
real = machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in GONE else real(name, path, target)
machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


def bare_machine(folder: Path) -> dict[str, str]:
    """An environment without what the project depends on and a bare GPU machine lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = project["optional-dependencies"]["dev"]
    names = {re.split(r"[^A-Za-z0-9-]", line, maxsplit=1)[0].lower() for line in (*project["dependencies"], *more)}
    gone = {MODULES.get(name, name.replace("-", "_")) for name in names - BARE}
    assert {"typer", "pyarrow", "opentelemetry", "llguidance", "uvloop", "transformers", "psutil"} <= gone
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"GONE = {sorted(gone)}\n{CUSTOMIZE}")
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHON": sys.executable, "GPU_CHECK_TIMEOUT": "900"}


@pytest.mark.timeout(1000)  # 20 s where the machine is free
def test_the_dry_run_goes_through_kernels_models_peer_and_server_on_a_bare_machine(tmp_path: Path) -> None:
    out, bare = tmp_path / "result.json", bare_machine(tmp_path / "bare")
    gone = subprocess.run([sys.executable, "-c", "import typer"], env=bare, capture_output=True, text=True)
    assert "No module named 'typer'" in gone.stderr
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--dry", "--out", out],
        env=bare,
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
    assert all(result["engine"][name]["tokens_s"] > 0 for name in ("overlap", "no_overlap")), result["engine"]
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
