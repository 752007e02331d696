"""Tokens go from step to step on the device: the kernel, and the runner with steps started ahead."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device_batch import Piece, build_step
from engine.device_sampling import draw
from engine.device_weights import DeviceWeights, Layer
from engine.kernels.feed import feed, feed_reference
from engine.kernels.launch import recording
from engine.runner_triton import TritonRunner
from engine.triton_forward import Forward
from models.store import LoadedModel, load
from models.tiny import write_tiny
from tests.kernels.engines import HandDriven, request_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    return load(str(write_tiny(folder, n_layers=1, hidden=64, n_heads=4, n_kv_heads=2, vocab=300, max_context=128)))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 600), drawn=st.integers(1, 70), seed=st.integers(0, 99))
def test_open_ids_become_the_tokens_drawn_last_and_known_ones_stay(rows: int, drawn: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2**31 - 1, (drawn,), generator=random)
    ids = torch.randint(-drawn, 50_000, (rows,), generator=random, dtype=torch.int32)
    open_ids = -1 - torch.randint(0, drawn, (rows,), generator=random, dtype=torch.int32)
    ids = torch.where(torch.rand(rows, generator=random) < 0.5, ids, open_ids)
    want = feed_reference(ids, tokens)
    memory = torch.cat((ids, torch.full((300,), -1, dtype=torch.int32)))  # what lies behind must stay as it is
    feed(memory[:rows], tokens)
    assert torch.equal(memory[:rows], want) and (want >= 0).all()
    assert (memory[rows:] == -1).all()


def use(driven: HandDriven) -> list[list[int]]:
    """Chunks, arrivals, seeds, ends that only the host sees."""
    asked: list[tuple[list[int], dict[str, Any]]] = [
        ([5, 9, 13], {"max_tokens": 9}),
        (list(range(20, 77)), {"max_tokens": 5, "temperature": 1.0, "seed": 7}),
        (list(range(100, 117)), {"max_tokens": 9, "temperature": 2.0, "seed": 8, "stop_token_ids": tuple(range(150))}),
        ([7] * 30, {"max_tokens": 4, "logit_bias": ((40, 50.0),)}),
        ([8] * 20, {"max_tokens": 6}),
    ]
    answers = []
    for prompt, params in asked:
        answers.append(driven.submit(prompt, **params))
        driven.engine.step()
    driven.run()
    return [answer.tokens for answer in answers]


def test_the_tokens_are_those_of_steps_one_after_the_other(tiny: LoadedModel) -> None:
    ahead = HandDriven(tiny, backend="triton", token_budget=24)
    runner = ahead.runner
    assert isinstance(runner, TritonRunner) and runner.feeds
    fed: list[int] = []
    compute = runner._compute

    def seen(layout: Any, ints: torch.Tensor) -> torch.Tensor:
        fed.append(int((layout.views(ints)["ids"] < 0).sum()))
        return compute(layout, ints)

    runner._compute = seen  # type: ignore[method-assign]
    got = use(ahead)
    assert got == use(HandDriven(tiny, backend="triton", token_budget=24, overlap=False))
    assert sum(fed) > 10  # tokens that the host did not know when their step was started
    stats = ahead.engine.stats()
    assert stats.void_tokens > 0 and stats.kv_free == stats.kv_total


def test_with_drafts_a_step_is_read_before_the_next_is_planned(tiny: LoadedModel) -> None:
    """Drafts are made from what the host knows."""
    driven = HandDriven(tiny, backend="triton", speculate=2)
    assert isinstance(driven.runner, TritonRunner) and not driven.runner.feeds
    driven.submit([5, 9, 13], max_tokens=3)
    driven.engine.step()
    assert driven.engine._flight is None


def without_memory(thing: Any) -> Any:
    """The same with tensors that have a shape and no values."""
    if isinstance(thing, torch.Tensor):
        return thing.to("meta")
    if isinstance(thing, tuple | list):
        return type(thing)(without_memory(one) for one in thing)
    if isinstance(thing, DeviceWeights | Layer | Forward):
        return replace(thing, **{one.name: without_memory(getattr(thing, one.name)) for one in fields(thing)})
    return thing


def test_starting_a_step_reads_nothing_from_the_device(tiny: LoadedModel) -> None:
    """From a step's memory to the drawn tokens, over tensors without values: whatever asked for one would fail."""
    runner = HandDriven(tiny, backend="triton").runner
    assert isinstance(runner, TritonRunner)
    pieces = [Piece([-1], 5, [0], (0,), True), Piece([4, 5, 6], 0, [1], (2,), False)]
    layout, ints = build_step(pieces, runner.limits)
    runner._forward, runner._kv, runner._drawn = without_memory((runner._forward, runner._kv, runner._drawn))
    with recording(90) as started:
        logits = runner._compute(layout, torch.from_numpy(ints).to("meta"))
        drawn = draw(logits, [(request_of([1], [0]), 6), (request_of([2], [1]), 3)])
    assert drawn.device.type == "meta" and drawn.shape == (2, 2)
    names = {one.kernel.fn.__name__.strip("_") for one in started}
    assert {"feed", "paged_decode", "paged_prefill", "sample"} <= names
