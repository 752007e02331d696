"""A step as the device sees it: one piece of int32 memory, whose layout a handful of numbers tells.

One copy brings a step to the device, one broadcast to the other ranks, and a CUDA graph replays over the same memory
again and again: all that a step needs to know lies in it.  Every field starts at a multiple of 16 bytes and tables are
a multiple of 16 wide, so that no step meets an alignment that no kernel was compiled for.

    rows     decodes first, then chunks; padding rows (slot -1, length 0) between them only where there are no chunks
    samples  rows whose logits are wanted, in the order in which the caller gave its pieces
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch

from engine.kernels.paged_prefill import PrefillBatch, prefill_block_m, prefill_tiles
from engine.request import Request
from engine.scheduler import Slice

_ALIGN = 16  # numbers; 64 bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens ``start ..`` of one sequence.  sampled: offsets of the rows whose logits are wanted.

    decode: one token, whose attention goes through the decode kernel.
    """

    ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    sampled: Sequence[int]
    decode: bool


def piece_of(one: Slice, row: Mapping[Request, int]) -> Piece:
    """A decode by the scheduler's own word: a chunk of one token is prefill, whose sums are made in another order.

    row: where each request's token lies among those drawn last, for one that the host does not know (``feed``).
    """
    request = one.request
    sampled = range(one.n) if one.all_logits else (one.n - 1,) if one.sample else ()
    decode = one.decode and not one.all_logits
    ids = request.tokens[one.start : one.end] or [-1 - row[request]]
    return Piece(ids, one.start, request.blocks, sampled, decode)


def halves(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]] | None:
    """Two smaller steps with the same rows in the same order; None where there is one row."""
    if len(pieces) > 1:
        middle = len(pieces) // 2
        return list(pieces[:middle]), list(pieces[middle:])
    one = pieces[0]
    if len(one.ids) < 2:
        return None
    n = len(one.ids) // 2
    first = Piece(one.ids[:n], one.start, one.blocks, [r for r in one.sampled if r < n], False)
    second = Piece(one.ids[n:], one.start + n, one.blocks, [r - n for r in one.sampled if r >= n], False)
    return [first], [second]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a step, in rows, sequences and columns.  splits: of the longest decode, at the fixed split length."""

    rows: int
    decodes: int
    decode_width: int
    splits: int
    chunks: int
    chunk_width: int
    tiles: int
    block_m: int
    samples: int

    def fields(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each field, in order."""
        for name in ("ids", "positions", "slots"):
            yield name, (self.rows,)
        yield "samples", (self.samples,)
        yield "lengths", (self.decodes,)
        yield "decode_tables", (self.decodes, self.decode_width)
        for name in ("q_begin", "q_len", "context"):
            yield name, (self.chunks,)
        yield "chunk_tables", (self.chunks, self.chunk_width)
        for name in ("tile_seq", "tile_first"):
            yield name, (self.tiles,)

    def places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Where each field begins, and its shape."""
        at, found = 0, {}
        for name, shape in self.fields():
            found[name] = (at, shape)
            at += _aligned(int(np.prod(shape)))
        return found

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(_aligned(int(np.prod(shape))) for _, shape in self.fields())

    def views(self, ints: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of one step's memory, without copying."""
        return {name: ints[at : at + int(np.prod(shape))].view(shape) for name, (at, shape) in self.places().items()}

    def numbers(self) -> tuple[int, ...]:
        """As plain numbers, for the other ranks."""
        return tuple(astuple(self))


def chunk_batch(views: dict[str, torch.Tensor]) -> PrefillBatch:
    """What the prefill kernel is told."""
    return PrefillBatch(
        tables=views["chunk_tables"],
        q_begin=views["q_begin"],
        q_len=views["q_len"],
        context=views["context"],
        tile_seq=views["tile_seq"],
        tile_first=views["tile_first"],
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What steps are cut to.

    split: tokens a split; a step is laid out for 1, 4, 16 .. of them.  buckets: sizes that a step of decodes alone is
    padded to.  invariant: one prefill tile for all chunks.
    """

    page: int
    group: int
    split: int
    max_context: int
    buckets: tuple[int, ...]
    invariant: bool = True

    def bucket(self, decodes: int) -> int:
        """The least bucket that holds them, or their own number beyond the last."""
        return next((size for size in self.buckets if size >= decodes), decodes)

    def split_bucket(self, longest: int) -> int:
        """Splits that a step is laid out for: few different numbers, so that few graphs serve all."""
        need, splits = -(-longest // self.split), 1
        while splits < need:
            splits *= 4
        return min(splits, self.most_splits)

    @property
    def most_splits(self) -> int:
        """Of a row as long as the context."""
        return max(1, -(-self.max_context // self.split))

    def decode_layout(self, decodes: int, longest: int) -> Layout:
        """A step of decodes alone, padded."""
        rows, splits = self.bucket(decodes), self.split_bucket(longest)
        width = _aligned(-(-min(splits * self.split, self.max_context) // self.page))
        return Layout(rows, rows, width, splits, 0, 0, 0, 64, rows)

    def decode_layouts(self) -> list[Layout]:
        """Every layout that ``decode_layout`` can give for as many decodes as the last bucket."""
        lengths = [1]
        while lengths[-1] < self.max_context:
            lengths.append(min(self.max_context, self.split_bucket(lengths[-1]) * self.split + 1))
        layouts = [self.decode_layout(size, longest) for size in self.buckets for longest in lengths]
        return list(dict.fromkeys(layouts))


def bucket_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of a half and a whole power: at most a third of a step is padding."""
    sizes, size = [1, 2, 4], 8
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return (*(n for n in sizes if n < most), most)


def build_step(pieces: Sequence[Piece], limits: Limits) -> tuple[Layout, np.ndarray]:
    """Layout and memory of a step of these pieces."""
    decodes = [piece for piece in pieces if piece.decode]
    chunks = [piece for piece in pieces if not piece.decode]
    longest = max((piece.start + 1 for piece in decodes), default=0)
    samples = sum(len(piece.sampled) for piece in pieces)
    if not chunks:
        layout = limits.decode_layout(len(decodes), longest)
    else:
        lengths = [len(piece.ids) for piece in chunks]
        block_m = prefill_block_m(max(lengths) * limits.group, invariant=limits.invariant)
        tile_seq, tile_first = prefill_tiles(lengths, limits.group, block_m)
        layout = Layout(
            rows=len(decodes) + sum(lengths),
            decodes=len(decodes),
            decode_width=_width(decodes) if decodes else 0,
            splits=limits.split_bucket(longest) if decodes else 0,
            chunks=len(chunks),
            chunk_width=_width(chunks),
            tiles=len(tile_seq),
            block_m=block_m,
            samples=samples,
        )
    ints = np.zeros(layout.size, np.int32)
    at = {
        name: ints[begin : begin + int(np.prod(shape))].reshape(shape)
        for name, (begin, shape) in layout.places().items()
    }
    at["slots"].fill(-1)
    first: dict[int, int] = {}
    row = 0
    for i, piece in enumerate(decodes):
        _fill(at, piece, row, limits.page)
        at["lengths"][i] = piece.start + 1
        at["decode_tables"][i, : len(_used(piece, limits.page))] = _used(piece, limits.page)
        first[id(piece)] = row
        row += 1
    for i, piece in enumerate(chunks):
        _fill(at, piece, row, limits.page)
        at["q_begin"][i], at["q_len"][i], at["context"][i] = row - len(decodes), len(piece.ids), piece.start
        at["chunk_tables"][i, : len(_used(piece, limits.page))] = _used(piece, limits.page)
        first[id(piece)] = row
        row += len(piece.ids)
    if chunks:
        at["tile_seq"][:], at["tile_first"][:] = tile_seq, tile_first
    wanted = [first[id(piece)] + offset for piece in pieces for offset in piece.sampled]
    at["samples"][: len(wanted)] = wanted
    return layout, ints


def _fill(at: dict[str, np.ndarray], piece: Piece, row: int, page: int) -> None:
    n = len(piece.ids)
    positions = np.arange(piece.start, piece.start + n)
    at["ids"][row : row + n], at["positions"][row : row + n] = piece.ids, positions
    blocks = np.asarray(piece.blocks, np.int32)
    at["slots"][row : row + n] = blocks[positions // page] * page + positions % page


def _used(piece: Piece, page: int) -> Sequence[int]:
    """Pages up to its last token; the request may hold more."""
    return piece.blocks[: -(-(piece.start + len(piece.ids)) // page)]


def _width(pieces: Sequence[Piece]) -> int:
    return _aligned(max(len(piece.blocks) for piece in pieces))


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN
