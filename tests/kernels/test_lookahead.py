"""n-gram speculation gives the very tokens that the engine gives without it, in fewer computed steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.lookahead import Lookahead, continuation
from engine.request import Request
from engine.runner_triton import TritonRunner
from engine.scheduler import Slice
from models.store import LoadedModel, load
from models.tiny import write_tiny
from tests.kernels.engines import HandDriven, request_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(write_tiny(tmp_path_factory.mktemp("tiny"), n_layers=1, vocab=300, max_context=256)))


def test_the_latest_occurrence_is_continued() -> None:
    assert continuation([1, 2, 3, 4, 1, 2, 3, 9, 8, 1, 2, 3], 2) == [9, 8]
    assert continuation([1, 2, 3, 4], 3) == []
    assert continuation([7, 7, 7, 7], 3) == [7]
    assert continuation([], 3) == []


def kept() -> tuple[Lookahead, Request]:
    """Drafts 5 and 6 behind the tokens 1 2 3 4; then 5 was sampled."""
    ahead, request = Lookahead(3, 16), request_of([1, 2, 3, 4], [0])
    request.prompt_ids = [1]  # the rest counts as generated
    ahead.keep(Slice(request, 3, 1, True), [5, 6], torch.tensor([[0.5], [0.6]]))
    request.tokens.append(5)
    return ahead, request


def test_a_row_is_used_only_for_the_token_that_it_was_computed_with() -> None:
    ahead, request = kept()
    row = ahead.known(Slice(request, 4, 1, True, decode=True))
    assert row is not None
    assert row.tolist() == [[0.5]]
    request.tokens.append(9)  # not the draft 6
    assert ahead.known(Slice(request, 5, 1, True, decode=True)) is None
    assert ahead.accepted == request.clock.facts.drafts_accepted == 1


@pytest.mark.parametrize("change", ["blocks", "lost", "position", "chunk"])
def test_a_row_is_not_used_once_its_pages_may_hold_something_else(change: str) -> None:
    ahead, request = kept()
    piece = Slice(request, 4, 1, True, decode=True)
    if change == "blocks":
        request.blocks = [7]
    elif change == "lost":
        request.lost = 4
    elif change == "position":
        piece = Slice(request, 3, 1, True, decode=True)
    else:
        piece = Slice(request, 3, 2, True)
    assert ahead.known(piece) is None
    request.blocks, request.lost = [0], 0
    assert ahead.known(Slice(request, 4, 1, True, decode=True)) is None  # it is forgotten for good


def greedy(tiny: LoadedModel, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], HandDriven]:
    driven = HandDriven(tiny, backend="triton", **options)
    answers = [driven.submit(prompt, max_tokens=24) for prompt in prompts]
    driven.run()
    return [answer.tokens for answer in answers], driven


def test_drafts_change_no_token_and_save_computed_steps(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = TritonRunner._compute

    def counted(self: TritonRunner, layout: Any, ints: torch.Tensor) -> torch.Tensor:
        computed.append(layout.rows)
        return compute(self, layout, ints)

    monkeypatch.setattr(TritonRunner, "_compute", counted)
    prompts = [[5, 6, 7, 8] * 4]  # a random model falls into loops, which are what is drafted
    plain, _ = greedy(tiny, prompts)
    without = len(computed)
    computed.clear()
    drafted, driven = greedy(tiny, prompts, speculate=4)
    assert drafted == plain
    assert isinstance(driven.runner, TritonRunner)
    ahead = driven.runner.lookahead
    assert ahead is not None
    assert 0 < ahead.accepted <= ahead.drafted
    assert len(computed) == without - ahead.accepted
    records = driven.engine.steps.since(-1)
    assert sum(record.drafted_tokens or 0 for record in records) == ahead.drafted
    assert sum(record.accepted_tokens or 0 for record in records) == ahead.accepted
    facts = driven.engine.counts
    assert facts.generation_tokens == 24


def test_drafts_survive_batches_preemption_and_sampled_mates(tiny: LoadedModel) -> None:
    chance = random.Random(3)
    prompts = [[chance.randrange(3, 12) for _ in range(20)] for _ in range(3)]
    plain, _ = greedy(tiny, prompts)
    tight = {"kv_blocks": 6, "prefix_cache": False, "watermark": 0.0}
    drafted, driven = greedy(tiny, prompts, speculate=3, **tight)
    assert driven.engine.stats().preemptions > 0
    assert drafted == plain


def test_a_request_that_samples_is_not_drafted_for(tiny: LoadedModel) -> None:
    driven = HandDriven(tiny, backend="triton", speculate=4)
    driven.submit([5, 6, 7, 8] * 4, temperature=1.0, seed=3)
    driven.run()
    assert isinstance(driven.runner, TritonRunner)
    assert driven.runner.lookahead is not None
    assert driven.runner.lookahead.drafted == 0
