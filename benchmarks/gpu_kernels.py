"""Every kernel on the device: right against fp64 or fp32, and how fast beside the ceilings measured there.

Shapes are those of Llama-3.1-8B in bf16 (dry: a tiny one in fp32).  Attention and products are compared on rows drawn
at random, since an fp64 reference of the whole would take longer than the check may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu_clock import Ceilings, Clock
from engine.kernels.gemm_quant import embed_q8, gemm_quant
from engine.kernels.gemm_small_m import gemm_reference, gemm_small_m
from engine.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from engine.kernels.paged_decode import paged_decode, split_length
from engine.kernels.paged_prefill import PrefillBatch, paged_prefill, prefill_block_m, prefill_tiles
from engine.kernels.quantised import pack_q4, pack_q8, unpack
from engine.kernels.rope import rope_and_cache, rope_reference
from engine.kernels.sample import sample_reference, sample_rows
from engine.kernels.silu_mul import silu_mul, silu_mul_reference

PAGE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and of the workload."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    rows: int  # of elementwise kernels
    batch: int  # of decode
    context: int
    prompt: int
    dtype: torch.dtype
    peers: bool  # SDPA beside prefill


REAL = Sizes(4096, 14_336, 32, 8, 128, 128_256, 4096, 64, 4096, 8192, torch.bfloat16, True)
DRY = Sizes(96, 64, 3, 1, 64, 320, 2, 2, 40, 20, torch.float32, True)


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel's result.  error: largest difference, relative where the reference is above 1; bound: allowed."""

    name: str
    error: float
    bound: float
    seconds: float
    least: float
    most: float
    bytes: float
    flops: float
    of_bandwidth: float
    of_flops: float

    @property
    def right(self) -> bool:
        """Within its bound, and a number."""
        return self.error <= self.bound


def check_kernels(clock: Clock, ceiling: Ceilings, sizes: Sizes) -> list[Row]:
    """All of them."""
    return _Check(clock, ceiling, sizes).all()


class _Check:
    def __init__(self, clock: Clock, ceiling: Ceilings, sizes: Sizes) -> None:
        self.clock, self.ceiling, self.s, self.device = clock, ceiling, sizes, clock.device
        self.random = torch.Generator(self.device).manual_seed(1)
        self.bound = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[sizes.dtype]
        self.rows: list[Row] = []

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(*shape, generator=self.random, device=self.device)
        return made.to(dtype or self.s.dtype)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def row(
        self,
        name: str,
        work: Callable[[], object],
        got: torch.Tensor,
        want: torch.Tensor,
        *,
        size: float,
        flops: float,
        bound: float | None = None,
    ) -> None:
        off = (got.double() - want.double()).abs() / want.double().abs().clamp(min=1.0)
        error = float("inf") if not bool(torch.isfinite(got).all()) else float(off.max())
        timed = self.clock.time(work)
        self.rows.append(
            Row(
                name,
                error,
                self.bound if bound is None else bound,
                timed.median,
                timed.least,
                timed.most,
                size,
                flops,
                size / timed.median / self.ceiling.bandwidth,
                flops / timed.median / self.ceiling.flops,
            )
        )

    def all(self) -> list[Row]:
        self.elementwise()
        self.products()
        self.decode()
        self.prefill()
        self.sampling()
        return self.rows

    def elementwise(self) -> None:
        s, n = self.s, self.s.dtype.itemsize
        x, residual, weight = self.randn(s.rows, s.hidden), self.randn(s.rows, s.hidden), self.randn(s.hidden)
        out = torch.empty_like(x)
        want = rms_norm_reference(x.double(), weight.double(), 1e-5)
        size = s.rows * s.hidden * n
        got = rms_norm(x, weight, 1e-5)
        self.row("rms_norm", lambda: rms_norm(x, weight, 1e-5, out), got, want, size=2 * size, flops=4 * size / n)
        total = (x + residual).double()
        kept = residual.clone()
        got = add_rms_norm(x, kept, weight, 1e-5)
        want = rms_norm_reference(total, weight.double(), 1e-5)
        zero = torch.zeros_like(x)  # so that the residual stays what it is, run after run
        work = lambda: add_rms_norm(zero, kept, weight, 1e-5, out)  # noqa: E731
        self.row("add_rms_norm", work, got, want, size=4 * size, flops=5 * size / n)
        both = self.randn(s.rows, 2 * s.ffn)
        gated = torch.empty(s.rows, s.ffn, dtype=s.dtype, device=self.device)
        size = s.rows * s.ffn * n
        want = silu_mul_reference(both.double())
        self.row("silu_mul", lambda: silu_mul(both, gated), silu_mul(both), want, size=3 * size, flops=5 * size / n)
        width = (s.heads + 2 * s.kv_heads) * s.head
        qkv, q = self.randn(s.rows, width), torch.empty(s.rows, s.heads, s.head, dtype=s.dtype, device=self.device)
        keys, values = (torch.zeros(s.rows, s.kv_heads, s.head, dtype=s.dtype, device=self.device) for _ in range(2))
        angle = torch.rand(s.rows, s.head // 2, generator=self.random, device=self.device) * 6
        at = self.ints(list(range(s.rows)))
        cos, sin = angle.cos(), angle.sin()
        work = lambda: rope_and_cache(qkv, q, keys, values, cos, sin, at, at)  # noqa: E731
        work()
        rows = qkv.view(s.rows, -1, s.head).double()
        turned = rope_reference(rows[:, : s.heads + s.kv_heads], cos, sin)
        want = torch.cat((turned, rows[:, s.heads + s.kv_heads :]), 1)
        size = s.rows * width * n
        self.row("rope_and_cache", work, torch.cat((q, keys, values), 1), want, size=2 * size, flops=3 * size / n)

    def products(self) -> None:
        s, n = self.s, self.s.dtype.itemsize
        for m in (1, s.batch):
            for name, (outputs, inputs) in {"gate_up": (2 * s.ffn, s.hidden), "down": (s.hidden, s.ffn)}.items():
                x, w = self.randn(m, inputs), self.randn(outputs, inputs) * inputs**-0.5
                want = gemm_reference(x.double(), w.double())
                weights = outputs * inputs
                flops = 2.0 * m * weights
                for invariant in (True, False):
                    got = gemm_small_m(x, w, invariant=invariant)
                    work = lambda x=x, w=w, i=invariant: gemm_small_m(x, w, invariant=i)  # type: ignore[misc]  # noqa: E731
                    kind = "" if invariant else " varying"
                    self.row(f"gemm_small_m {name} M={m}{kind}", work, got, want, size=weights * n, flops=flops)
                for kind, pack, share in (("q8", pack_q8, 1.0625), ("q4", pack_q4, 0.625)):
                    packed = pack(w)
                    exact = gemm_reference(x.double(), unpack(packed).double())
                    got = gemm_quant(x, packed)
                    work = lambda x=x, p=packed: gemm_quant(x, p)  # type: ignore[misc]  # noqa: E731
                    self.row(f"gemm_{kind} {name} M={m}", work, got, exact, size=weights * share, flops=flops)
        table = pack_q8(self.randn(min(s.vocab, 8192), s.hidden))
        ids = self.ints([i % table.outputs for i in range(s.rows)])
        want = unpack(table)[ids.long()].double()
        size = s.rows * s.hidden * (1.0625 + n)
        self.row(
            "embed_q8", lambda: embed_q8(ids, table, s.dtype), embed_q8(ids, table, s.dtype), want,
            size=size, flops=size,
        )  # fmt: skip

    def pool(self, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """keys, values, and tables of pages in random order."""
        s, pages = self.s, -(-length // PAGE)
        order = torch.randperm(sequences * pages, generator=self.random, device=self.device)
        size = (sequences * pages * PAGE, s.kv_heads, s.head)
        width = -(-pages // 16) * 16
        tables = torch.zeros(sequences, width, dtype=torch.int32, device=self.device)
        tables[:, :pages] = order.view(sequences, pages).to(torch.int32)
        return self.randn(*size), self.randn(*size), tables

    def attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, length: int
    ) -> torch.Tensor:
        """fp32, one query [heads, D] that sees ``length`` tokens."""
        at = torch.arange(length, device=self.device)
        slots = table[at // PAGE].long() * PAGE + at % PAGE
        group = self.s.heads // self.s.kv_heads
        k, v = (x[slots].double().repeat_interleave(group, 1) for x in (keys, values))
        weight = torch.softmax(torch.einsum("hd,khd->hk", q.double(), k) * self.s.head**-0.5, -1)
        return torch.einsum("hk,khd->hd", weight, v)

    def decode(self) -> None:
        s = self.s
        for batch in sorted({1, s.batch}):
            keys, values, tables = self.pool(batch, s.context)
            lengths, q = self.ints([s.context] * batch), self.randn(batch, s.heads, s.head)
            split = split_length(s.context)
            out = torch.empty_like(q)

            def work(
                q: torch.Tensor = q,
                keys: torch.Tensor = keys,
                values: torch.Tensor = values,
                tables: torch.Tensor = tables,
                lengths: torch.Tensor = lengths,
                split: int = split,
                out: torch.Tensor = out,
            ) -> torch.Tensor:
                return paged_decode(
                    q, keys, values, tables, lengths,
                    page=PAGE, scale=s.head**-0.5, split=split, splits=-(-s.context // split), out=out,
                )  # fmt: skip

            got = work().clone()
            some = sorted({0, batch - 1})
            want = torch.stack([self.attended(q[i], keys, values, tables[i], s.context) for i in some])
            size = 2 * batch * s.context * s.kv_heads * s.head * s.dtype.itemsize
            flops = 4.0 * batch * s.context * s.heads * s.head
            self.row(f"paged_decode batch {batch}, context {s.context}", work, got[some], want, size=size, flops=flops)

    def prefill(self) -> None:
        s, n = self.s, self.s.prompt
        keys, values, tables = self.pool(1, n)
        q, group = self.randn(n, s.heads, s.head), s.heads // s.kv_heads
        block_m = prefill_block_m(n * group, invariant=True)
        tile_seq, tile_first = prefill_tiles([n], group, block_m)
        zero, length = self.ints([0]), self.ints([n])
        batch = PrefillBatch(tables, zero, length, zero, self.ints(tile_seq), self.ints(tile_first))
        out = torch.empty_like(q)

        def work() -> torch.Tensor:
            return paged_prefill(q, keys, values, batch, page=PAGE, scale=s.head**-0.5, block_m=block_m, out=out)

        got = work().clone()
        some = sorted({0, n // 3, n - 1})
        want = torch.stack([self.attended(q[i], keys, values, tables[0], i + 1) for i in some])
        size = (2 * s.heads + 2 * s.kv_heads) * n * s.head * s.dtype.itemsize
        flops = 2.0 * n * n * s.heads * s.head
        self.row(f"paged_prefill {n} tokens", work, got[some], want, size=size, flops=flops)
        if s.peers:
            k, v = (x[:n].transpose(0, 1)[None] for x in (keys, values))
            rows = q.transpose(0, 1)[None]
            sdpa = torch.nn.functional.scaled_dot_product_attention

            def peer() -> torch.Tensor:
                return sdpa(rows, k, v, is_causal=True, enable_gqa=True)

            others = peer()[0].transpose(0, 1)
            self.row(f"SDPA {n} tokens (peer)", peer, others[some], want, size=size, flops=flops)

    def sampling(self) -> None:
        s = self.s
        logits = self.randn(s.batch, s.vocab, dtype=torch.float32) * 3
        heat = torch.full((s.batch,), 0.8, device=self.device)
        seed = torch.arange(s.batch, device=self.device)
        got, _ = sample_rows(logits, heat, seed, seed)
        want = sample_reference(logits.cpu(), heat.cpu(), seed.cpu(), seed.cpu())
        size = 2 * logits.nbytes
        self.row(
            "sample",
            lambda: sample_rows(logits, heat, seed, seed),
            got.cpu(),
            want,
            size=size,
            flops=size / 2,
            bound=0.0,
        )
