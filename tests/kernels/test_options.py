"""Options of the kernels: heeded, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import runner_triton
from engine.backends import build, resolved
from engine.config import EngineConfig
from engine.device_weights import Shard, load_weights
from engine.kernels.quantised import Quantised, unpack
from engine.runner_triton import TritonRunner
from models.errors import UserError
from models.store import LoadedModel, load
from models.tiny import write_tiny
from tests.kernels.engines import SETTINGS

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"invariant": False}, "--varying"),
    ({"kv_dtype": "fp8"}, "--kv-dtype"),
    ({"speculate": 2}, "--speculate"),
    ({"tensor_parallel": 2}, "--tensor-parallel"),
    ({"cuda_graphs": False}, "--no-cuda-graphs"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(write_tiny(tmp_path_factory.mktemp("tiny"), n_layers=1, vocab=300)))


@pytest.mark.parametrize(("option", "named"), OPTIONS)
def test_the_cpu_backend_refuses_what_it_would_not_heed(option: dict[str, Any], named: str, tiny: LoadedModel) -> None:
    with pytest.raises(UserError) as caught:
        EngineConfig(backend="cpu", **option)
    assert caught.value.where == named
    with pytest.raises(UserError) as caught:  # auto means cpu here
        build(EngineConfig(threads=1, kv_blocks=16, **option), tiny)
    assert caught.value.where == named
    assert EngineConfig(backend="triton", **option).backend == "triton"


@pytest.mark.parametrize(
    ("option", "named"),
    [({"kv_dtype": "fp4"}, "--kv-dtype"), ({"speculate": 16}, "--speculate"), ({"tensor_parallel": 0}, "--tensor-par")],
)
def test_values_that_make_no_sense_are_refused(option: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        EngineConfig(backend="triton", **option)
    assert str(caught.value.where).startswith(named)


def test_auto_is_triton_only_where_a_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolved("auto") == "triton"
    assert resolved("cpu") == "cpu"


def test_without_a_gpu_the_triton_backend_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tiny: LoadedModel) -> None:
    monkeypatch.setattr(runner_triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device") as caught:
        TritonRunner(tiny, EngineConfig(backend="triton", **SETTINGS))
    assert "--backend cpu" in str(caught.value.remedy)


def test_weights_for_the_cpu_alone_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(UserError, match="int4-bf16"):
        TritonRunner(tiny, EngineConfig(**{**SETTINGS, "backend": "triton", "dtype": "int4-bf16"}))


class OnAGrid(dict[str, torch.Tensor]):
    """Weights as a 4-bit file has them."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        for name, weight in model.weights.items():
            self[name] = weight
            if "_proj.weight" in name:
                q = torch.randint(0, 16, weight.shape, generator=torch.Generator().manual_seed(1)).float()
                q[:, ::32], q[:, 31::32] = 0, 15
                self[name] = q * 0.015625 - 0.125


def test_auto_takes_four_bits_only_where_they_lose_nothing(tiny: LoadedModel) -> None:
    cpu = torch.device("cpu")
    assert load_weights(tiny.weights, tiny.shape, "auto", cpu, Shard()).kind == "bf16"
    grid = OnAGrid(tiny)
    made = load_weights(grid, tiny.shape, "auto", cpu, Shard())
    assert made.kind == "int4"
    down = made.layers[0].down
    assert isinstance(down, Quantised)
    assert torch.equal(unpack(down), grid["model.layers.0.mlp.down_proj.weight"])
