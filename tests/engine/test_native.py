"""The forward in C: right (against the torch one), and bit-equal for a row whatever else is computed with it."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest
import torch

from engine.backends import build
from engine.config import EngineConfig
from engine.native import build as native_build
from engine.native.panels import pack
from engine.native.runner import NativeRunner, fits
from engine.phase_clock import PhaseClock
from engine.request import Request, SamplingParams
from engine.runner_cpu import CpuRunner
from engine.scheduler import Slice
from models.errors import UserError
from models.store import LoadedModel, load
from models.tiny import write_tiny

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc brings one")
DTYPES = ("fp32", "bf16", "int8", "int4", "int4-bf16")
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


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What a precision leaves of weights: of groups of 32 inputs, those of GGUF's Q8_0 and Q4_1."""
    if kind in ("fp32", "bf16"):
        return weight.to(torch.bfloat16 if kind == "bf16" else torch.float32).float()
    parts = []
    for w in weight.split(32, dim=1):
        if kind == "int8":
            d = (w.abs().amax(1, keepdim=True) / 127).half().float()
            parts.append((w / d).nan_to_num(0).round().clamp(-127, 127) * d)
        else:
            low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
            d, m = ((high - low) / 15).half().float(), low.half().float()
            q = ((w - m) / d).nan_to_num(0).round().clamp(0, 15)
            parts.append((q.double() * d.double() + m.double()).float())
    return torch.cat(parts, dim=1)


def at_precision(model: LoadedModel, dtype: str) -> LoadedModel:
    """The model with the weights that a precision leaves of it."""
    weights = {
        name: rounded(w, "int8" if dtype.startswith("int4") and ("embed" in name or "head" in name) else dtype[:4])
        if w.ndim == 2
        else w
        for name, w in model.weights.items()
    }
    return dataclasses.replace(model, weights=weights)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_torch(shape: str, dtype: str, tmp_path: Path) -> None:
    model = load(str(write_tiny(tmp_path / "m", **SHAPES[shape])))
    config = EngineConfig(dtype=dtype, kv_blocks=32, threads=2)
    if fits(model, config) == "3 heads of 16 are not a multiple of 32":
        pytest.skip("int4-bf16 rounds groups of 32")
    native = NativeRunner(model, config)
    tolerance = 2e-2 if dtype == "int4-bf16" else 2e-5  # the former rounds rows as well
    peer = CpuRunner(at_precision(model, dtype), EngineConfig(dtype="fp32", kv_blocks=32, threads=2))
    for cuts in ((0, 77), (0, 1, 2, 50, 77), (0, 16, 32, 76, 77)):
        one, other = request(prompt(77, 1), 0), request(prompt(40, 2), 10)
        for a, b in itertools.pairwise(cuts):
            slices = [Slice(one, a, b - a, True)]
            if a == 0:
                slices.append(Slice(other, 0, 40, True))
            want, got = peer.forward(slices), native.forward(slices)
            assert got.shape == want.shape
            assert (got - want).abs().max() < tolerance * max(1.0, float(want.abs().max()))


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


def test_packing_says_when_nothing_is_lost() -> None:
    library, weight = native_build.library(), torch.randn(24, 80, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    weight[4, :32] = 0.25
    for kind in ("bf16", "int8", "int4"):
        assert not pack(library, weight, kind).exact
        once = pack(library, rounded(weight, kind), kind)
        assert once.exact
        assert torch.equal(once.data, pack(library, weight, kind).data)


def test_auto_takes_4_bits_when_they_lose_nothing(tiny: LoadedModel) -> None:
    came_from_4_bits = at_precision(tiny, "int4")
    tokens = [Slice(request(prompt(40, 3), 0), 0, 40, True)]
    chosen = NativeRunner(came_from_4_bits, EngineConfig(kv_blocks=8))
    assert chosen.dtype in ("int4", "int4-bf16")
    assert NativeRunner(tiny, EngineConfig(kv_blocks=8)).dtype == "bf16"
    exact = [
        NativeRunner(came_from_4_bits, EngineConfig(dtype=dtype, kv_blocks=8)).forward(tokens)
        for dtype in ("fp32", "int4")
    ]
    assert torch.equal(*exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(tiny: LoadedModel, dtype: str) -> None:
    alone, three = (NativeRunner(tiny, EngineConfig(dtype=dtype, kv_blocks=200, threads=n)) for n in (1, 3))
    crowd = [request(prompt(9 + k, k), 8 * k) for k in range(20)]
    for start, n in ((0, 9), (9, 1)):
        slices = [
            Slice(mate, start, min(n, len(mate.tokens) - start), True) for mate in crowd if len(mate.tokens) > start
        ]
        assert torch.equal(alone.forward(slices), three.forward(slices))


def test_a_long_context_and_a_full_batch_agree_with_torch(tmp_path: Path) -> None:
    model = load(str(write_tiny(tmp_path / "m", hidden=96, n_heads=6, n_kv_heads=2, ffn=336, max_context=1024)))
    config = EngineConfig(dtype="fp32", kv_blocks=130, threads=2)
    native, peer = NativeRunner(model, config), CpuRunner(model, config)
    long = request(prompt(700, 1), 0, pages=44)
    crowd = [request(prompt(20, k), 44 + 2 * k, pages=2) for k in range(40)]
    for slices in (
        [Slice(long, 0, 300, True)],
        [Slice(long, 300, 399, False), *(Slice(mate, 0, 19, True) for mate in crowd)],
        [*(Slice(mate, 19, 1, True) for mate in crowd), Slice(long, 699, 1, True)],
    ):
        want, got = peer.forward(slices), native.forward(slices)
        assert (got - want).abs().max() < 2e-5 * max(1.0, float(want.abs().max()))


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
    odd = load(str(write_tiny(tmp_path / "odd", **SHAPES["gqa 3, odd width"])))
    assert fits(odd, EngineConfig(dtype="int4-bf16")) == "3 heads of 16 are not a multiple of 32"
    assert fits(odd, EngineConfig(block_size=8)) == "block size 8 is not a multiple of 16"
    model = load(str(write_tiny(tmp_path / "m", hidden=40, n_heads=4, n_kv_heads=2, ffn=64)))
    assert fits(model, EngineConfig()) == "hidden 40 is not a multiple of 16"


@pytest.mark.parametrize("dtype", ["auto", *DTYPES])
def test_nonfinite_weights_give_nonfinite_logits_for_every_row(tiny: LoadedModel, dtype: str) -> None:
    runner = NativeRunner(tiny, EngineConfig(dtype=dtype, kv_blocks=8))
    step = [Slice(request(prompt(9, 1), 0), 0, 9, True)]
    good = runner.forward(step)
    assert torch.isfinite(good).all()
    name = "model.layers.1.mlp.down_proj.weight"
    weights = dict(tiny.weights)
    weights[name] = weights[name].clone()
    weights[name][:, 5] = float("nan")
    runner.reweigh(weights)
    assert not torch.isfinite(runner.forward(step)).any()
    runner.reweigh(tiny.weights)
    assert torch.equal(runner.forward(step), good)
