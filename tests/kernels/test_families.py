"""Tiny random models of each family: both runners against transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.runner_cpu import CpuRunner
from engine.runner_triton import TritonRunner
from engine.scheduler import Slice
from models.store import load
from models.tiny import write_tiny
from tests.kernels.engines import SETTINGS, request_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"rope_scaling": LLAMA3}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"tied": False}),
    ],
    ids=["llama", "llama3-rope", "mistral", "qwen2", "qwen3"],
)
def test_a_tiny_model_of_each_family_agrees_with_transformers(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tiny(tmp_path, family=family, hidden=128, n_heads=4, n_kv_heads=2, max_context=256, **more)
    model = load(str(folder))
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(3, 500, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        want = peer(torch.tensor([tokens])).logits[0]
    config = EngineConfig(**{**SETTINGS, "token_budget": 128})
    for runner in (CpuRunner(model, config), TritonRunner(model, config)):
        request = request_of(tokens, list(range(5)))
        got = torch.cat([runner.forward([Slice(request, 0, 33, True)]), runner.forward([Slice(request, 33, 37, True)])])
        assert (got - want[[32, 69]]).abs().max() < 2e-3, runner.name


def test_a_family_is_not_served_without_its_own_tensors(tmp_path: Path) -> None:
    """A Qwen2 checkpoint under a Llama's config.json would lose its biases without a word: it is refused."""
    import json

    from models.errors import UserError

    folder = write_tiny(tmp_path, family="qwen2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(UserError, match=r"self_attn\.[qkv]_proj\.bias"):
        load(str(folder))
