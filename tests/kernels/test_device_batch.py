"""The memory of a step: every number where the kernels look for it, and padding that does nothing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device_batch import Limits, Piece, bucket_sizes, build_step

LIMITS = Limits(page=16, group=3, split=64, max_context=1000, buckets=bucket_sizes(8))


def decode(position: int, blocks: list[int]) -> Piece:
    return Piece([7], position, blocks, (0,), True)


def test_a_mixed_step_puts_decodes_first_and_samples_in_the_callers_order() -> None:
    pieces = [Piece([1, 2, 3], 15, [4, 9], (2,), False), decode(16, [5, 6]), Piece([8], 0, [2], (), False)]
    layout, ints = build_step(pieces, LIMITS)
    at = {name: view.tolist() for name, view in layout.views(torch.from_numpy(ints)).items()}
    assert (layout.rows, layout.decodes, layout.chunks) == (5, 1, 2)
    assert at["ids"] == [7, 1, 2, 3, 8]
    assert at["positions"] == [16, 15, 16, 17, 0]
    assert at["slots"] == [96, 79, 144, 145, 32]  # 6 * 16; 4 * 16 + 15; 9 * 16 ..; 2 * 16
    assert at["samples"] == [3, 0]
    assert at["lengths"] == [17]
    assert at["decode_tables"][0][:2] == [5, 6]
    assert at["q_begin"] == [0, 3]
    assert at["q_len"] == [3, 1]
    assert at["context"] == [15, 0]
    assert [row[:2] for row in at["chunk_tables"]] == [[4, 9], [2, 0]]
    assert at["tile_seq"] == [0, 1]


def test_decodes_alone_are_padded_to_a_bucket() -> None:
    layout, ints = build_step([decode(70, [0, 1, 2, 3, 4]), decode(3, [9]), decode(0, [8])], LIMITS)
    at = {name: view.tolist() for name, view in layout.views(torch.from_numpy(ints)).items()}
    assert layout.rows == 4
    assert at["slots"] == [70, 147, 128, -1]
    assert at["lengths"] == [71, 4, 1, 0]
    assert at["samples"] == [0, 1, 2, 0]
    assert layout.splits == 4  # two are needed: 1, 4, 16 .. are laid out
    assert layout == LIMITS.decode_layout(3, 71)


def test_every_field_is_aligned_and_tables_are_a_multiple_of_16_wide() -> None:
    layout, _ = build_step([Piece(list(range(5)), 0, [1], (4,), False), decode(600, list(range(40)))], LIMITS)
    assert all(begin % 16 == 0 for begin, _ in layout.places().values())
    assert layout.decode_width % 16 == layout.chunk_width % 16 == 0


@settings(max_examples=60, deadline=None)
@given(decodes=st.integers(1, 8), longest=st.integers(1, 1000))
def test_every_step_of_decodes_has_a_layout_that_is_captured(decodes: int, longest: int) -> None:
    layout = LIMITS.decode_layout(decodes, longest)
    assert layout in LIMITS.decode_layouts()
    assert layout.rows >= decodes
    assert layout.splits * LIMITS.split >= longest
    assert layout.decode_width * LIMITS.page >= longest


def test_buckets_waste_a_third_at_most() -> None:
    sizes = bucket_sizes(256)
    assert sizes[-1] == 256
    assert bucket_sizes(1) == (1,)
    assert list(sizes) == sorted(set(sizes))
    for n in range(5, 257):
        size = next(one for one in sizes if one >= n)
        assert (size - n) / size < 0.5 if n < 8 else (size - n) / size <= 1 / 3
