"""docs/kernels.json is what the kernels compile to now.

Compiling all takes minutes: every configuration is compared by name and by the hash of its kernel's file, and some are
compiled again, one of each kernel.  ``make kernels-table`` writes the table anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checked() -> str:
    """Compilation needs a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "engine.kernel_table", "--check", "docs/kernels.json", "--sample"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=950,
    )
    return f"{done.stdout}{done.stderr if done.returncode else ''}\nexit {done.returncode}"


@pytest.mark.timeout(1000)  # 15 s where the machine is free
def test_the_table_is_what_the_kernels_compile_to(checked: str) -> None:
    assert checked.endswith("exit 0"), checked + "\nlook at the differences, then run: make kernels-table"


def test_every_configuration_in_the_table_keeps_the_rules() -> None:
    table = json.loads((ROOT / "docs" / "kernels.json").read_text())
    rows = table["configurations"]
    kernels = {name.split(" ", 1)[0] for name in rows}
    assert kernels == {
        "rms_norm", "rope_and_cache", "paged_prefill", "paged_decode", "decode_reduce", "silu_mul", "gemm_small_m",
        "gemm_q8", "gemm_q4", "embed_q8", "sample", "feed",
    }  # fmt: skip
    assert {key for row in rows.values() for key in row} == {"source", "sm_80", "sm_90", "sm_100"}
    for name, row in rows.items():
        there = [key for key in row if key.startswith("sm_")]
        assert there, name
        for arch in there:
            one = row[arch]
            assert one["stack"] == 0, (name, arch)
            assert one["shared"] <= 227 * 1024, (name, arch)
            assert 0 < one["registers"] <= 255, (name, arch)
        if name.startswith("paged_prefill") and "sm_90" in row:
            assert row["sm_90"]["product"] == "wgmma", name
        if name.startswith("paged_decode"):
            assert all(row[arch]["product"] == "mma.sync" for arch in there), name
        if name.startswith(("paged", "gemm", "rms", "silu")):
            assert all(row[arch]["wide_loads"] for arch in there), name
