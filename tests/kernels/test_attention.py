"""Paged attention, prefill and decode, against fp64; and that a row's bits depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.paged_decode import occupancy_split, paged_decode, split_length
from engine.kernels.paged_prefill import paged_prefill, prefill_block_m
from tests.kernels.paged import PAGE, TOLERANCE, Pool, attended, pool, prefill_batch, queries

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPLIT = 128


def prefill(made: Pool, q: torch.Tensor, chunks: list[int], *, block_m: int = 128, padding: int = 0) -> torch.Tensor:
    group = q.shape[1] // made.keys.shape[1]
    batch = prefill_batch(made, chunks, group, block_m, padding=padding)
    return paged_prefill(
        q, made.keys, made.values, batch, page=PAGE, scale=q.shape[2] ** -0.5, block_m=block_m, out=torch.zeros_like(q)
    )


def decode(made: Pool, q: torch.Tensor, *, split: int = SPLIT, splits: int | None = None) -> torch.Tensor:
    lengths = torch.tensor(made.lengths, dtype=torch.int32)
    count = -(-max(made.lengths) // split) if splits is None else splits
    return paged_decode(
        q, made.keys, made.values, made.tables, lengths,
        page=PAGE, scale=q.shape[2] ** -0.5, split=split, splits=count, out=torch.zeros_like(q),
    )  # fmt: skip


# --- prefill ---
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head"), [(9, 3, 64), (4, 4, 64), (7, 1, 128), (8, 2, 128)], ids=["3", "1", "7", "4"]
)
def test_prefill_of_a_ragged_batch(dtype: torch.dtype, heads: int, kv_heads: int, head: int) -> None:
    """A fresh prompt across the page border, a chunk behind a prefix, and a chunk of one token."""
    lengths, chunks = [17, 90, 33], [17, 25, 1]
    made, q = pool(lengths, kv_heads, head, dtype), queries(sum(chunks), heads, head, dtype)
    got, want = prefill(made, q, chunks, padding=1), attended(made, q, chunks, head**-0.5)
    assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 129])
def test_prefill_at_the_borders_of_pages_and_tiles(length: int) -> None:
    made, q = pool([length], 1, 64, torch.float32), queries(length, 3, 64, torch.float32)
    got, want = prefill(made, q, [length]), attended(made, q, [length], 0.125)
    assert (got.double() - want).abs().max() < TOLERANCE[torch.float32]


def test_prefill_with_blocks_that_are_masked_whole_for_some_rows() -> None:
    """128 rows of one head over columns of 64: the first 64 rows see nothing of the tile's last block."""
    made, q = pool([128], 1, 64, torch.float32), queries(128, 1, 64, torch.float32)
    got, want = prefill(made, q, [128], block_m=128), attended(made, q, [128], 0.125)
    assert (got.double() - want).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("ordered_products")
def test_prefill_rows_have_the_same_bits_however_a_prompt_is_cut_and_batched() -> None:
    assert prefill_block_m(3, invariant=True) == prefill_block_m(30_000, invariant=True) == 128  # as ``prefill`` here
    made, q = pool([150, 40], 1, 64, torch.float32), queries(190, 3, 64, torch.float32)
    whole = prefill(made, q, [150, 40])[:150]
    alone = Pool(made.keys, made.values, made.tables[:1], [150], made.exact[:1])
    assert torch.equal(prefill(alone, q[:150], [150]), whole)
    for chunk in (1, 7, 64):
        for end in (chunk, 70, 150):
            part = Pool(made.keys, made.values, made.tables[:1], [end], made.exact[:1])
            assert torch.equal(prefill(part, q[end - chunk : end], [chunk]), whole[end - chunk : end])


@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(1, 140),
    share=st.floats(0.0, 1.0),
    group=st.integers(1, 5),
    head=st.sampled_from([64, 128]),
    block_m=st.sampled_from([64, 128]),
)
def test_prefill_of_any_length_prefix_and_group(length: int, share: float, group: int, head: int, block_m: int) -> None:
    chunk = max(1, round(share * length))
    made = pool([length], 1, head, torch.float32, seed=length)
    q = queries(chunk, group, head, torch.float32)
    got, want = prefill(made, q, [chunk], block_m=block_m), attended(made, q, [chunk], head**-0.5)
    assert (got.double() - want).abs().max() < TOLERANCE[torch.float32]


# --- decode ---
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head"), [(9, 3, 64), (2, 2, 128), (7, 1, 128), (20, 1, 64)], ids=["3", "1", "7", "20"]
)
def test_decode_of_uneven_rows(dtype: torch.dtype, heads: int, kv_heads: int, head: int) -> None:
    """Lengths of one, two and three splits, so that the short rows leave splits empty."""
    lengths = [1, SPLIT, 2 * SPLIT + 3]
    made, q = pool(lengths, kv_heads, head, dtype), queries(3, heads, head, dtype)
    got, want = decode(made, q), attended(made, q, [1, 1, 1], head**-0.5)
    assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257])
def test_decode_at_the_borders_of_pages_blocks_and_splits(length: int) -> None:
    made, q = pool([length], 1, 64, torch.float32), queries(1, 3, 64, torch.float32)
    got, want = decode(made, q), attended(made, q, [1], 0.125)
    assert (got.double() - want).abs().max() < TOLERANCE[torch.float32]


def test_decode_leaves_padding_rows_alone() -> None:
    """Rows of a CUDA graph's bucket that nobody uses have length 0."""
    made, q = pool([20, 0, 200, 0], 2, 64, torch.float32), queries(4, 6, 64, torch.float32)
    got = decode(made, q)
    want = attended(made, q[[0, 2]], [1, 0, 1, 0], 0.125)
    assert (got[[0, 2]].double() - want).abs().max() < TOLERANCE[torch.float32]
    assert (got[[1, 3]] == 0).all()


@pytest.mark.usefixtures("ordered_products")
def test_decode_rows_have_the_same_bits_alone_and_among_others_split_or_not() -> None:
    lengths = [100, 3, 300, 128, 129]
    made, q = pool(lengths, 1, 64, torch.float32), queries(5, 3, 64, torch.float32)
    together = decode(made, q)
    for i, n in enumerate(lengths):
        alone = Pool(made.keys, made.values, made.tables[i : i + 1], [n], made.exact[i : i + 1])
        assert torch.equal(decode(alone, q[i : i + 1]), together[i : i + 1])  # up to 128: written without a reduce
        assert torch.equal(decode(alone, q[i : i + 1], splits=7), together[i : i + 1])


def test_the_choice_by_occupancy_is_right_too_and_splits_less_in_a_large_batch() -> None:
    assert split_length(8192) == 256
    assert split_length(131_072) == 512
    assert occupancy_split(1, 8, 4096, 132) < occupancy_split(64, 8, 4096, 132)
    split = occupancy_split(2, 1, 700, 3)
    assert split % 64 == 0
    made, q = pool([700, 5], 1, 64, torch.float32), queries(2, 3, 64, torch.float32)
    got, want = decode(made, q, split=split), attended(made, q, [1, 1], 0.125)
    assert (got.double() - want).abs().max() < TOLERANCE[torch.float32]


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    group=st.integers(1, 6),
    head=st.sampled_from([64, 128]),
    split=st.sampled_from([64, 128, 256]),
)
def test_decode_of_any_lengths_and_group(lengths: list[int], group: int, head: int, split: int) -> None:
    made = pool(lengths, 1, head, torch.float32, seed=sum(lengths))
    q = queries(len(lengths), group, head, torch.float32)
    got, want = decode(made, q, split=split), attended(made, q, [1] * len(lengths), head**-0.5)
    assert (got.double() - want).abs().max() < TOLERANCE[torch.float32]


def test_a_cache_in_fp8_is_read_as_what_it_holds() -> None:
    made, q = pool([70, 33], 1, 64, torch.float8_e4m3fn), queries(2, 3, 64, torch.float32)
    want = attended(made, q, [1, 1], 0.125)
    assert (decode(made, q).double() - want).abs().max() < TOLERANCE[torch.float32]
    assert (prefill(made, q, [1, 1]).double() - want).abs().max() < TOLERANCE[torch.float32]


def test_large_scores_do_not_overflow() -> None:
    made, q = pool([70], 1, 64, torch.float32), queries(1, 3, 64, torch.float32) * 1e3
    got, want = decode(made, q), attended(made, q, [1], 0.125)
    assert torch.isfinite(got).all()
    assert (got.double() - want).abs().max() < 1e-3  # the softmax is nearly one-hot: scores of 1e3 lose digits
    assert (prefill(made, q, [1]).double() - want).abs().max() < 1e-3
