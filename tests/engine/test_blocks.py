"""The pool never loses or doubles a page, and never hands out another prompt's KV."""

from __future__ import annotations

import random

import pytest

from engine.blocks import ROOT, BlockPool


def computed(pool: BlockPool, tokens: list[int]) -> list[int]:
    pages, chain = pool.match(tokens)
    hit = len(pages)
    taken = pool.take(pool.pages(len(tokens)) - hit)
    assert taken is not None
    pages += taken
    for i in range(hit, len(tokens) // pool.size):
        chain = pool.register(pages[i], chain, tokens[i * pool.size : (i + 1) * pool.size])
    return pages


def test_a_prompt_whose_pages_are_all_cached_still_computes_a_token() -> None:
    pool = BlockPool(8, 4)
    pool.release(computed(pool, list(range(8))))
    pages, _ = pool.match(list(range(8)))
    assert len(pages) == 1
    pool.release(pages)
    assert pool.violations([]) == []


def test_the_same_tokens_after_another_prefix_are_not_a_hit() -> None:
    pool = BlockPool(8, 2)
    pool.release(computed(pool, [1, 2, 9, 9, 0]))
    pages, chain = pool.match([3, 4, 9, 9, 0])
    assert pages == [] and chain == ROOT


def test_a_page_whose_parent_was_evicted_cannot_be_reached() -> None:
    pool = BlockPool(3, 2)
    first = computed(pool, [1, 2, 3, 4, 5])
    pool.release(first)
    taken = pool.take(3)  # evicts both pages
    assert taken is not None
    pool.release(taken)
    assert pool.match([1, 2, 3, 4, 5])[0] == []


def test_eviction_takes_the_oldest_and_leaves_first() -> None:
    pool = BlockPool(4, 2)
    pool.release(computed(pool, [1, 2, 3, 4]))
    pool.release(computed(pool, [7, 8, 9, 9]))
    taken = pool.take(1)
    assert taken is not None
    hit, _ = pool.match([1, 2, 3, 4, 5])
    assert len(hit) == 1  # the second page of the older prompt went, its first is still there
    pool.release(hit + taken)


def test_asking_for_too_many_takes_nothing() -> None:
    pool = BlockPool(4, 2)
    assert pool.take(5) is None
    assert pool.available == 4


def test_a_double_release_is_an_error() -> None:
    pool = BlockPool(2, 2)
    taken = pool.take(1)
    assert taken is not None
    pool.release(taken)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(taken)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_laws(seed: int) -> None:
    draw = random.Random(seed)
    pool = BlockPool(12, 2)
    held: list[list[int]] = []
    for _ in range(400):
        if held and (draw.random() < 0.5 or pool.available < 4):
            pool.release(held.pop(draw.randrange(len(held))))
        else:
            held.append(computed(pool, [draw.randrange(3) for _ in range(draw.randint(1, 7))]))
        assert pool.violations(held) == []
        assert pool.used + pool.available == pool.total
