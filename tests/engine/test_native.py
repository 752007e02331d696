"""The forward in C: right (against the torch one), and bit-equal for a row whatever else is computed with it."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import build
from engine.native import build as native_build
from engine.native.panels import rounded
from engine.native.runner import NativeRunner, fits
from engine.phase_clock import PhaseClock
from engine.request import Request, SamplingParams
from engine.runner_cpu import CpuRunner
from engine.scheduler import Slice
from models.errors import UserError
from models.store import LoadedModel, load
from models.tiny import write_tiny

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc brings one")
DTYPES = ("fp32", "bf16", "int8", "int4")
SHAPES = {
    "gqa 2": {},
    "gqa 3, odd width": {"hidden": 96, "n_heads": 6, "n_kv_heads": 2, "ffn": 80},
    "mha": {"hidden": 64, "n_heads": 2, "n_kv_heads": 2},
    "vocabulary not of whole panels": {"vocab": 389},
    "untied head": {"tied": False},
}


def request(tokens: list[int], first_page: int, pages: int = 8) -> Request:
    made = Request(f"r{first_page}", tokens, SamplingParams(max_tokens=1), PhaseClock(0), lambda output: None)
    made.tokens, made.blocks = tokens, list(range(first_page + pages - 1, first_page - 1, -1))
    return made


def prompt(n: int, seed: int) -> list[int]:
    return torch.randint(3, 380, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def at_precision(model: LoadedModel, dtype: str) -> LoadedModel:
    """The model with the weights that a precision leaves of it."""
    weights = {
        name: rounded(w, "int8" if dtype == "int4" and ("embed" in name or "head" in name) else dtype)
        if w.ndim == 2
        else w
        for name, w in model.weights.items()
    }
    return dataclasses.replace(model, weights=weights)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_torch(shape: str, dtype: str, tmp_path: Path) -> None:
    model = load(str(write_tiny(tmp_path / "m", **SHAPES[shape])))
    native = NativeRunner(model, EngineConfig(dtype=dtype, kv_blocks=32, threads=2))
    peer = CpuRunner(at_precision(model, dtype), EngineConfig(dtype="fp32", kv_blocks=32, threads=2))
    for cuts in ((0, 77), (0, 1, 2, 50, 77), (0, 16, 32, 76, 77)):
        one, other = request(prompt(77, 1), 0), request(prompt(40, 2), 10)
        for a, b in itertools.pairwise(cuts):
            slices = [Slice(one, a, b - a, True)]
            if a == 0:
                slices.append(Slice(other, 0, 40, True))
            want, got = peer.forward(slices), native.forward(slices)
            assert got.shape == want.shape
            assert (got - want).abs().max() < 2e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_bit_equal_alone_in_any_batch_and_in_any_chunks(tiny: LoadedModel, dtype: str) -> None:
    runner = NativeRunner(tiny, EngineConfig(dtype=dtype, kv_blocks=200, threads=2))
    tokens = prompt(60, 5)
    alone = request(tokens, 0)
    want = runner.forward([Slice(alone, 0, 60, True)])[0]
    for cuts in ((0, 59, 60), (0, 7, 8, 60), tuple(range(61))):
        again = request(tokens, 10)
        for a, b in itertools.pairwise(cuts):
            got = runner.forward([Slice(again, a, b - a, True)])[-1]
        assert torch.equal(got, want)
    for mates in (1, 2, 5, 6, 7, 13):
        crowd = [request(prompt(3 + 5 * k, 20 + k), 20 + 8 * k) for k in range(mates)]
        slices = [Slice(mate, 0, len(mate.tokens), True) for mate in crowd]
        again = request(tokens, 180)
        got = runner.forward([*slices[: mates // 2], Slice(again, 0, 60, True), *slices[mates // 2 :]])[mates // 2]
        assert torch.equal(got, want)


def test_without_a_compiler_the_forward_runs_in_torch(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with pytest.raises(native_build.NoCompiler, match="no-such-compiler"):
        native_build.library()
    engine = build(EngineConfig(kv_blocks=8, max_batch=2, token_budget=16), tiny)
    assert isinstance(engine.runner, CpuRunner)
    assert "runs in torch" in caplog.text
    with pytest.raises(UserError, match="int4 weights need the forward in C"):
        build(EngineConfig(kv_blocks=8, max_batch=2, token_budget=16, dtype="int4"), tiny)


def test_a_shape_it_cannot_run_is_named(tmp_path: Path) -> None:
    model = load(str(write_tiny(tmp_path / "m", hidden=40, n_heads=4, n_kv_heads=2, ffn=64)))
    assert fits(model, EngineConfig()) == "hidden 40 is not a multiple of 16"


def test_nonfinite_weights_give_nonfinite_logits_for_every_row(tiny: LoadedModel, tmp_path: Path) -> None:
    model = load(str(tiny.folder))
    weights = dict(model.weights)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    broken = dataclasses.replace(model, weights=weights)
    runner = NativeRunner(broken, EngineConfig(dtype="fp32", kv_blocks=8))
    assert not torch.isfinite(runner.forward([Slice(request(prompt(9, 1), 0), 0, 9, True)])).any()
