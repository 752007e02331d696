"""The sampling kernel draws the very tokens of the CPU path, whatever the batch; it sees logits that are not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.sample import sample_reference, sample_rows


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(
    rows: torch.Tensor, heat: list[float], seeds: list[int], positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return sample_rows(rows, torch.tensor(heat), torch.tensor(seeds), torch.tensor(positions))


@pytest.mark.parametrize("vocab", [259, 4096, 4097, 9000])
def test_the_tokens_are_those_of_the_cpu_path(vocab: int) -> None:
    rows = logits(4, vocab)
    heat, seeds, positions = [0.0, 0.7, 1.0, 3.0], [0, 42, -1, 2**62 + 7], [1, 5, 100_000, 0]
    got, finite = draw(rows, heat, seeds, positions)
    want = sample_reference(rows, torch.tensor(heat), torch.tensor(seeds), torch.tensor(positions))
    assert got.tolist() == want.tolist()
    assert finite.tolist() == [1, 1, 1, 1]


def test_a_row_draws_the_same_alone_and_in_any_place() -> None:
    rows = logits(3, 700)
    heat, seeds, positions = [1.0, 0.5, 2.0], [1, 2, 3], [10, 20, 30]
    together, _ = draw(rows, heat, seeds, positions)
    order = [2, 0, 1]
    moved, _ = draw(rows[order], *([values[i] for i in order] for values in (heat, seeds, positions)))  # type: ignore[arg-type]
    assert [together[i] for i in order] == moved.tolist()
    alone, _ = draw(rows[1:2], [0.5], [2], [20])
    assert alone.item() == together[1].item()


def test_greedy_ties_go_to_the_lowest_id_across_blocks() -> None:
    rows = torch.zeros(1, 9000)
    rows[0, [5000, 8000]] = 4.0
    assert draw(rows, [0.0], [0], [0])[0].tolist() == [5000]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 4500])
def test_a_row_that_is_not_finite_is_told_and_its_mates_are_not(bad: float, at: int) -> None:
    rows = logits(3, 5000)
    clean, _ = draw(rows, [0.0, 1.0, 1.0], [1, 2, 3], [4, 5, 6])
    rows[1, at] = bad
    got, finite = draw(rows, [0.0, 1.0, 1.0], [1, 2, 3], [4, 5, 6])
    assert finite.tolist() == [1, 0, 1]
    assert got[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_the_shares_of_tokens_are_those_of_the_softmax() -> None:
    row = torch.tensor([[0.0, 1.0, 2.0]])
    n = 300
    got, _ = sample_rows(row.expand(n, 3).contiguous(), torch.ones(n), torch.full((n,), 9), torch.arange(n))
    share = torch.bincount(got, minlength=3) / n
    want = torch.softmax(row[0], 0)
    assert (share - want).abs().max() < 4 * (0.25 / n) ** 0.5  # four standard errors; the draws are fixed


@settings(max_examples=15, deadline=None)
@given(
    vocab=st.integers(1, 600),
    heat=st.floats(0.0625, 5.0, width=32),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 200_000),
)
def test_any_seed_position_and_temperature_draw_as_the_cpu_path(
    vocab: int, heat: float, seed: int, position: int
) -> None:
    rows = logits(1, vocab, seed=vocab)
    arguments = torch.tensor([heat]), torch.tensor([seed]), torch.tensor([position])
    assert sample_rows(rows, *arguments)[0].tolist() == sample_reference(rows, *arguments).tolist()
