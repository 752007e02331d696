"""A whole model with random weights on the device: prefill, decode with and without graphs, and plain PyTorch beside.

Random weights cost what real ones cost, and need no download.  Every figure has its floor beside it, made of the
ceilings that were measured on this device (``models.roofline``).  Where a batch at its context needs more KV than the
device has, its sequences share pages, which is told (``pages``): what is read then comes partly from the L2 cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from benchmarks.gpu_clock import Ceilings
from benchmarks.gpu_peer import PlainGpu
from engine.config import EngineConfig
from engine.phase_clock import PhaseClock
from engine.request import Request, SamplingParams
from engine.runner_triton import TritonRunner
from engine.scheduler import Slice
from models.devices import GPU_STEP_NS, Device
from models.roofline import StepCost, pairs
from models.shape import ModelShape


class RandomWeights(Mapping[str, torch.Tensor]):
    """Made when they are read, the same each time."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes, self._device, self._dtype = shape.tensor_shapes(), device, dtype
        self._at = {name: i for i, name in enumerate(self._shapes)}

    def __getitem__(self, name: str) -> torch.Tensor:
        size = self._shapes[name]
        random = torch.Generator(self._device).manual_seed(self._at[name])
        made = torch.randn(size, generator=random, device=self._device, dtype=self._dtype)
        return made * size[-1] ** -0.5 if len(size) > 1 else 1 + 0.1 * made

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(frozen=True, slots=True)
class Bare:
    """A model without tokenizer: what a runner needs of one."""

    shape: ModelShape
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement.  tokens_s: of all sequences together.  of_floor: floor / time.  note: what is special."""

    what: str
    engine: str
    seconds: float
    tokens_s: float
    of_floor: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    repeats: int
    steps: int  # decodes in a round
    kinds: tuple[str, ...]
    compile_s: float  # torch.compile takes half a minute a batch: none is begun after so many seconds of the peer


REAL = Plan((2048, 8192), (1, 8, 64, 256), 4096, 5, 8, ("bf16",), 60.0)
DRY = Plan((20,), (1, 3), 24, 1, 2, ("fp32",), 0.0)


def median_of(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Wall seconds, from an idle device to an idle device: what a user of the engine waits."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return sorted(once() for _ in range(repeats))[repeats // 2]


def check_model(shape: ModelShape, ceiling: Ceilings, plan: Plan, device: torch.device) -> list[Figure]:
    """Our engine, then the peer."""
    found = []
    measured = Device("here", "this device", ceiling.flops, ceiling.bandwidth, 0.0, GPU_STEP_NS, "measured")
    for kind in plan.kinds:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        weights = RandomWeights(shape, device, dtype)
        config = EngineConfig(
            backend="triton",
            dtype=kind,
            max_batch=max(plan.batches),
            token_budget=max(*plan.prompts, *plan.batches),
            max_context=min(shape.max_context, max(plan.context + 64, *plan.prompts) + 64),
            kv_blocks=64 if device.type == "cpu" else None,
        )
        runner = TritonRunner(Bare(shape, weights), config)
        cost = StepCost(shape, measured, runner.weight_bytes, runner.kv_bytes)
        found += _Ours(runner, cost, plan, kind).all()
        del runner
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found += _peer(shape, weights, cost, plan, device, kind)
    return found


class _Ours:
    def __init__(self, runner: TritonRunner, cost: StepCost, plan: Plan, kind: str) -> None:
        self.runner, self.cost, self.plan, self.kind = runner, cost, plan, kind

    def request(self, tokens: int, first: int) -> Request:
        """So many tokens, on pages from ``first`` on, around the pool."""
        ids = [(7 * i + first) % 1000 + 3 for i in range(tokens)]
        request = Request("r", ids, SamplingParams(max_tokens=1, temperature=0.0), PhaseClock(0), lambda output: None)
        pages = -(-tokens // self.runner.config.block_size)
        request.tokens, request.blocks = ids, [(first + i) % self.runner.kv_blocks for i in range(pages)]
        return request

    def all(self) -> list[Figure]:
        found = []
        for n in self.plan.prompts:
            one = self.request(n, 0)
            slices = [Slice(one, 0, n, True)]
            seconds = median_of(lambda s=slices: self._step(s), self.plan.repeats, self.runner.device)  # type: ignore[misc]
            floor = self.cost.floor_ns(n, 0, n, 1, pairs(0, n)).floor_ns / 1e9
            found.append(Figure(f"prefill {n}", f"tailspan {self.kind}", seconds, n / seconds, floor / seconds))
        for batch in self.plan.batches:
            found += self._decode(batch)
        return found

    def _step(self, slices: list[Slice]) -> None:
        logits = self.runner.forward(slices)
        self.runner.sample(logits, [piece.request for piece in slices], frozenset())

    def _decode(self, batch: int) -> Iterator[Figure]:
        plan, runner = self.plan, self.runner
        pages = -(-(plan.context + 1) // runner.config.block_size)
        requests = [self.request(plan.context + 1, i * pages) for i in range(batch)]
        slices = [Slice(one, plan.context, 1, True, decode=True) for one in requests]
        floor = self.cost.floor_ns(0, batch, batch * (plan.context + 1), batch).floor_ns / 1e9
        note = "" if batch * pages <= runner.kv_blocks else f"pages shared {batch * pages / runner.kv_blocks:.1f} times"
        choices = [("graphs", True), ("no graphs", False)] if runner.use_graphs else [("no graphs", False)]
        for name, graphs in choices:
            runner.use_graphs = graphs
            if graphs:
                runner.capture_for(batch, plan.context + 1)

            def steps() -> None:
                for _ in range(plan.steps):
                    self._step(slices)

            seconds = median_of(steps, plan.repeats, runner.device) / plan.steps
            yield Figure(
                f"decode batch {batch}",
                f"tailspan {self.kind}, {name}",
                seconds,
                batch / seconds,
                floor / seconds,
                note,
            )
        runner.use_graphs = any(graphs for _, graphs in choices)


def _peer(
    shape: ModelShape, weights: RandomWeights, cost: StepCost, plan: Plan, device: torch.device, kind: str
) -> Iterator[Figure]:
    begin = time.monotonic()
    peer = PlainGpu(shape, weights, device, torch.float32 if kind == "fp32" else torch.bfloat16)
    for n in plan.prompts:
        peer.room(1, n)
        seconds = median_of(lambda n=n: peer.prefill(n), plan.repeats, device)  # type: ignore[misc]
        floor = cost.floor_ns(n, 0, n, 1, pairs(0, n)).floor_ns / 1e9
        yield Figure(f"prefill {n}", f"torch SDPA {kind}", seconds, n / seconds, floor / seconds)
    for batch in plan.batches:
        floor = cost.floor_ns(0, batch, batch * (plan.context + 1), batch).floor_ns / 1e9
        for compiled in (False, True) if device.type == "cuda" else (False,):
            name = f"torch {'compile' if compiled else 'SDPA'} {kind}"
            if compiled and time.monotonic() - begin > plan.compile_s:
                yield Figure(f"decode batch {batch}", name, float("nan"), float("nan"), float("nan"), "no time left")
                continue
            try:
                peer.room(batch, plan.context + 64)
                peer.compile(compiled)

                def steps() -> None:
                    for _ in range(plan.steps):
                        peer.decode(plan.context)

                seconds = median_of(steps, plan.repeats, device) / plan.steps
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                yield Figure(
                    f"decode batch {batch}", name, float("nan"), float("nan"), float("nan"), "no memory for KV"
                )
                continue
            yield Figure(f"decode batch {batch}", name, seconds, batch / seconds, floor / seconds)
