"""A paged KV pool for tests: scrambled pages, NaN wherever nobody may look, and what fp64 says about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.paged_prefill import PrefillBatch, attention_reference, prefill_tiles

PAGE = 16

#: Largest difference from fp64, absolute, for values of about 1.  Half a unit in the last place would be 2^-12 (fp16)
#: and 2^-9 (bf16); the interpreter cuts fp32 -> bf16 off instead of rounding, which doubles it, and inputs, weights
#: of the softmax and results are rounded each.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@dataclass
class Pool:
    """keys, values: [slots, K, D], the same sequences in fp64 beside them."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    lengths: list[int]
    exact: list[tuple[torch.Tensor, torch.Tensor]]


def pool(
    lengths: list[int], kv_heads: int, head: int, dtype: torch.dtype, *, seed: int = 0, width: int | None = None
) -> Pool:
    """Sequences of so many tokens, their pages in random order, everything else NaN."""
    random = torch.Generator().manual_seed(seed)
    pages = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(pages) + 3, generator=random).tolist()
    tables = torch.zeros(len(lengths), width or max(1, *pages), dtype=torch.int32)
    shape = ((sum(pages) + 3) * PAGE, kv_heads, head)
    keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    exact = []
    for i, n in enumerate(lengths):
        mine = [order.pop() for _ in range(pages[i])]
        tables[i, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        slots = torch.tensor([mine[t // PAGE] * PAGE + t % PAGE for t in range(n)], dtype=torch.long)
        k, v = (torch.randn(n, kv_heads, head, generator=random).to(dtype).float() for _ in range(2))
        keys[slots], values[slots] = k, v
        exact.append((k.double(), v.double()))
    return Pool(keys.to(dtype), values.to(dtype), tables, lengths, exact)


def queries(n: int, heads: int, head: int, dtype: torch.dtype, *, seed: int = 1) -> torch.Tensor:
    """[n, heads, head]."""
    return torch.randn(n, heads, head, generator=torch.Generator().manual_seed(seed)).to(dtype)


def prefill_batch(made: Pool, chunks: list[int], group: int, block_m: int, *, padding: int = 0) -> PrefillBatch:
    """The last ``chunks[i]`` tokens of each sequence are the chunk."""
    whose, first = prefill_tiles(chunks, group, block_m)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    begins = [sum(chunks[:i]) for i in range(len(chunks))]
    return PrefillBatch(
        tables=made.tables,
        q_begin=ints(begins),
        q_len=ints(chunks),
        context=ints([n - chunk for n, chunk in zip(made.lengths, chunks, strict=True)]),
        tile_seq=ints([*whose, *[-1] * padding]),
        tile_first=ints([*first, *[0] * padding]),
    )


def attended(made: Pool, q: torch.Tensor, chunks: list[int], scale: float) -> torch.Tensor:
    """fp64: the chunks' rows one after the other."""
    rows, at = [], 0
    for (k, v), n, chunk in zip(made.exact, made.lengths, chunks, strict=True):
        rows.append(attention_reference(q[at : at + chunk].double(), k, v, n - chunk, scale))
        at += chunk
    return torch.cat(rows)
