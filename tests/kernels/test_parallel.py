"""Two ranks over gloo on this CPU give the tokens of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device_weights import Shard, load_weights
from engine.kernels.linear import linear
from engine.runner_triton import TritonRunner, limits_of, make_triton_runner
from engine.triton_forward import Forward
from models.errors import UserError
from models.store import LoadedModel, load
from models.tiny import write_tiny
from tests.kernels.engines import SETTINGS, HandDriven

PROMPTS = [[5, 9, 13], list(range(20, 57))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    return load(str(write_tiny(folder, hidden=64, n_heads=4, n_kv_heads=2, vocab=300, max_context=256)))


@pytest.fixture
def two_ranks(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonRunner]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    runner = make_triton_runner(tiny, EngineConfig(**SETTINGS, backend="triton", tensor_parallel=2))
    yield runner
    runner.close()


def test_two_ranks_give_the_tokens_of_one(tiny: LoadedModel, two_ranks: TritonRunner) -> None:
    tokens = []
    for runner in (True, two_ranks):
        driven = HandDriven(tiny, triton=runner)
        answers = [driven.submit(prompt, max_tokens=5) for prompt in PROMPTS]
        driven.run()
        tokens.append([answer.tokens for answer in answers])
    assert tokens[0] == tokens[1]
    assert two_ranks._kv[0][0].shape[1] == 1  # one of the two KV heads lies here
    table = two_ranks._forward.weights.embedding
    assert isinstance(table, torch.Tensor) and len(table) == 150  # and half of the vocabulary


def test_shards_are_parts_of_the_whole(tiny: LoadedModel) -> None:
    """Rows of qkv and of gate and up by head, columns of o and down; together they are every weight once."""
    cpu = torch.device("cpu")
    whole, *parts = (
        load_weights(tiny.weights, tiny.shape, "fp32", cpu, shard) for shard in (Shard(), Shard(0, 2), Shard(1, 2))
    )
    head, heads, kv = tiny.shape.head_dim, tiny.shape.n_heads, tiny.shape.n_kv_heads
    for mine, *halves in zip(whole.layers, *(part.layers for part in parts), strict=True):
        sizes = [heads * head // 2, kv * head // 2, kv * head // 2]
        pieces = [torch.split(torch.as_tensor(half.qkv), sizes) for half in halves]
        assert torch.equal(
            torch.cat([torch.cat(pair) for pair in zip(*pieces, strict=True)]), torch.as_tensor(mine.qkv)
        )
        for name in ("o", "down"):
            assert torch.equal(torch.cat([getattr(half, name) for half in halves], dim=1), getattr(mine, name))
        gates = [half.gate_up.chunk(2) for half in halves if isinstance(half.gate_up, torch.Tensor)]
        assert torch.equal(
            torch.cat([torch.cat(pair) for pair in zip(*gates, strict=True)]), torch.as_tensor(mine.gate_up)
        )


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_embedding_and_head_are_cut_by_vocabulary_where_that_goes(tmp_path: Path, tiny: LoadedModel, kind: str) -> None:
    """Tokens of both parts: rows that are exactly the whole's, logits one behind the other."""
    cpu, ids = torch.device("cpu"), torch.tensor([0, 149, 150, 299, 7], dtype=torch.int32)
    whole, *parts = (load_weights(tiny.weights, tiny.shape, kind, cpu, s) for s in (Shard(), Shard(0, 2), Shard(1, 2)))
    assert [one.first for one in (whole, *parts)] == [None, 0, 150]
    limits = limits_of(tiny.shape, EngineConfig(**SETTINGS), 256)
    rope = torch.zeros(256, 8), torch.zeros(256, 8)
    # every rank's contribution, summed here in place of the all-reduce
    made = [Forward(tiny.shape, w, rope, limits, world=2, add_up=lambda x: x)._embedded(ids) for w in parts]
    assert torch.equal(made[0] + made[1], Forward(tiny.shape, whole, rope, limits)._embedded(ids))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(whole.dtype)
    logits = [linear(hidden, w.head, invariant=True, dtype=torch.float32) for w in (whole, *parts)]
    assert torch.allclose(torch.cat(logits[1:], dim=1), logits[0], rtol=1e-5, atol=1e-6)
    odd = load(str(write_tiny(tmp_path, hidden=64, n_heads=4, n_kv_heads=2, vocab=301, max_context=64)))
    uneven = load_weights(odd.weights, odd.shape, kind, cpu, Shard(1, 2))
    assert uneven.first is None and uneven.bytes > parts[1].bytes


def test_heads_that_cannot_be_shared_out_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(UserError, match="2 KV heads cannot be cut into 3"):
        Shard(0, 3).check(tiny.shape)
