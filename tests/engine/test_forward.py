"""The forward agrees with transformers on the same weights, however a prompt is cut and batched."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.phase_clock import PhaseClock
from engine.request import Request, SamplingParams
from engine.runner_cpu import CpuRunner
from engine.scheduler import Slice
from models.store import LoadedModel, load

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def logits_in_chunks(runner: CpuRunner, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits at the end of every chunk."""
    request = Request("r", tokens, SamplingParams(max_tokens=1), PhaseClock(0), lambda output: None)
    request.tokens, request.blocks = tokens, list(range(-(-len(tokens) // 16)))
    bounds = [0, *cuts, len(tokens)]
    return torch.cat([runner.forward([Slice(request, a, b - a, True)]) for a, b in itertools.pairwise(bounds)])


def test_tiny_llama_agrees_with_transformers(tiny: LoadedModel) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32).eval()
    tokens = torch.randint(3, 500, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        want = peer(torch.tensor([tokens])).logits[0]
    runner = CpuRunner(tiny, EngineConfig(dtype="fp32", kv_blocks=16, threads=1))
    for cuts in ([], [1], [16], [7, 33, 69]):
        got = logits_in_chunks(runner, tokens, cuts)
        ends = [c - 1 for c in cuts] + [len(tokens) - 1]
        assert (got - want[ends]).abs().max() < 1e-3


def test_smollm2_agrees_with_transformers_reading_the_same_gguf(smollm2: Path) -> None:
    """transformers reads the converted weights; the un-permutation of q and k is proven on the GGUF in tests/models."""
    transformers = pytest.importorskip("transformers")
    model = load("smollm2")
    peer = transformers.AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    tokens = model.tokenizer.encode(
        model.template.render([{"role": "user", "content": "What is the capital of France?"}])
    )
    with torch.inference_mode():
        want = peer(torch.tensor([tokens])).logits[0]
    runner = CpuRunner(model, EngineConfig(dtype="fp32", kv_blocks=16))
    got = logits_in_chunks(runner, tokens, [20])
    assert (got - want[[19, len(tokens) - 1]]).abs().max() < 1e-3
    assert model.tokenizer.decode([int(got[-1].argmax())]).strip() == "The"


def test_a_batch_of_decodes_and_chunks_equals_each_alone(drive: Callable[..., object]) -> None:
    prompts = [list(range(10, 10 + n)) for n in (3, 17, 40, 64)]
    alone = []
    for prompt in prompts:
        engine = drive()
        answer = engine.submit(prompt, max_tokens=12)
        engine.run()
        alone.append(answer.tokens)
    engine = drive(token_budget=24, max_batch=8)
    together = []
    for prompt in prompts:
        together.append(engine.submit(prompt, max_tokens=12))
        engine.step()
    engine.run()
    assert [answer.tokens for answer in together] == alone
