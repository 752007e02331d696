"""The forward in Triton kernels, on a GPU, or on the CPU in Triton's interpreter (which is for tests: it is slow).

One call computes one step over the same plan and paged KV as the CPU runners.  The host builds the step as one piece
of int32 memory (``device_batch``), one copy takes it to the device, and nothing waits for the device until the sampled
tokens are read back: that is the step's only synchronisation.  ``launch`` starts a step and leaves the reading to
later: its tokens stay on the device as well, where the next step takes them from (``feed``), so that it can be started
before they are read (``engine.flight``).  Steps of decodes alone are padded to a bucket and replayed as CUDA graphs;
``padded_tokens`` counts the padding.

What must hold: a page's KV is written by the step that computes its tokens, padding writes nothing, and a row's bits
depend on the row alone unless ``invariant`` is off.  A step too large for the device's free memory is computed in
halves (``divided_steps``), never dropped; the engine then plans smaller ones (``engine.step_limits``).

Unchecked on a GPU: see docs/kernels.md.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from engine.config import EngineConfig
from engine.device_batch import Layout, Limits, Piece, bucket_sizes, build_step, halves, piece_of
from engine.device_sampling import Reader, draw, draw_and_read
from engine.device_weights import Shard, load_weights
from engine.flight import DeviceFull, Drawn, Read
from engine.graphs import Graphs
from engine.kernels.feed import feed
from engine.kernels.launch import INTERPRETED, compile_seconds
from engine.kernels.paged_decode import split_length
from engine.lookahead import Lookahead
from engine.parallel import CAPTURE, STEP, STOP, Followers, Parallel
from engine.request import Request
from engine.rope_tables import rope_tables
from engine.sampling import plain
from engine.scheduler import Slice
from engine.triton_forward import Forward
from models.devices import DEVICES, Device
from models.errors import UserError
from models.shape import ModelShape

if TYPE_CHECKING:
    from models.store import LoadedModel

log = logging.getLogger("tailspan.engine")
_INTERPRETER_PAGES = 256  # in the interpreter every launch walks over the whole pool
_KV_SHARE = 0.95  # of what is free once weights and the largest step have their memory; the rest is for graphs
_KV_TYPES = {"auto": None, "fp8": torch.float8_e4m3fn}


def device_of(rank: int) -> torch.device:
    """The device of a rank.  Raises UserError where there is no GPU and the interpreter was not asked for."""
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "no CUDA device is visible",
            where="--backend triton",
            remedy="use --backend cpu; TRITON_INTERPRET=1 runs the kernels on the CPU, very slowly",
        )
    return torch.device("cuda", rank % torch.cuda.device_count())


def make_triton_runner(model: LoadedModel, config: EngineConfig) -> TritonRunner:
    """The runner; with tensor parallelism also the other ranks' processes."""
    if config.tensor_parallel == 1:
        return TritonRunner(model, config)
    followers = Followers(config, str(model.folder), {"TRITON_INTERPRET": "1"} if INTERPRETED else {})
    parallel = Parallel(0, config.tensor_parallel, followers.port, device_of(0))
    runner = TritonRunner(model, config, parallel, followers)
    atexit.register(runner.close)  # the other ranks wait for the next step until they are told that there is none
    return runner


def limits_of(shape: ModelShape, config: EngineConfig, max_context: int) -> Limits:
    """What this model's steps are cut to."""
    return Limits(
        page=config.block_size,
        group=shape.n_heads // shape.n_kv_heads,
        split=split_length(max_context),
        max_context=max_context,
        buckets=bucket_sizes(config.max_batch * (1 + config.speculate)),
        invariant=config.invariant,
    )


def _refuse_unfit(shape: ModelShape, config: EngineConfig, device: torch.device) -> None:
    """Raises UserError for what the kernels or the device cannot do."""
    if device.type == "cuda" and config.dtype == "fp32":
        raise UserError("fp32 is not for the GPU path", where="--weights", remedy="use auto, bf16, int8 or int4")
    if shape.head_dim not in (64, 128) and not (INTERPRETED and shape.head_dim in (16, 32)):
        raise UserError(
            f"heads of {shape.head_dim} are not supported",
            where="--backend triton",
            remedy="the kernels take 64 and 128",
        )
    if config.kv_dtype == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError("this GPU has no fp8", where="--kv-dtype", remedy="use auto; fp8 came with sm_89")


class Weighted(Protocol):
    """What a runner needs of a model (``models.store.LoadedModel`` has more)."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def weights(self) -> Mapping[str, torch.Tensor]: ...


class TritonRunner:
    """``forward(slices)`` -> logits of the rows that sample, [rows, vocabulary] float32, on the device."""

    name = "triton"

    def __init__(
        self,
        model: Weighted,
        config: EngineConfig,
        parallel: Parallel | None = None,
        followers: Followers | None = None,
    ) -> None:
        shape = model.shape
        self.shape, self.config, self._parallel, self._followers = shape, config, parallel, followers
        self.shard = parallel.shard if parallel is not None else Shard()
        self.device = device_of(self.shard.rank)
        _refuse_unfit(shape, config, self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # triton starts kernels on the current device
        self.threads = 1  # of the host
        self.has_logits = True
        self.max_context = min(config.max_context or shape.max_context, shape.max_context)
        self.limits = limits_of(shape, config, self.max_context)
        cos, sin = rope_tables(shape, self.max_context)
        self._rope = cos.to(self.device), sin.to(self.device)
        self._forward = self._load(model.weights)
        weights = self._forward.weights
        self.dtype = weights.kind
        self.kv_dtype = _KV_TYPES[config.kv_dtype] or weights.dtype
        self.kv_bytes = self.kv_dtype.itemsize
        self.weight_bytes = weights.bytes * self.shard.world / shape.parameters()
        self.lookahead = Lookahead(config.speculate, config.block_size) if config.speculate else None
        # may a step be started before the one before it is read?  Drafts are made, and ranks told, by the host
        self.feeds = config.overlap and self.lookahead is None and parallel is None
        self._drawn = torch.zeros(config.max_batch, dtype=torch.int64, device=self.device)  # tokens of the last launch
        self._row: dict[Request, int] = {}  # and whose they are
        self.padded_tokens = self.divided_steps = 0
        self.last_step: dict[str, int] = {}  # columns of the step log that only this runner knows
        self.compile_seconds = compile_seconds
        self.use_graphs = self.device.type == "cuda" and config.cuda_graphs
        self._graphs = Graphs(self._compute, self.device) if self.use_graphs else None
        self.kv_blocks = self._allocate_kv()

    def _load(self, weights: Mapping[str, torch.Tensor]) -> Forward:
        on_gpu = self.device.type == "cuda"
        return Forward(
            shape=self.shape,
            weights=load_weights(weights, self.shape, self.config.dtype, self.device, self.shard),
            rope=self._rope,
            limits=self.limits,
            invariant=self.config.invariant,
            world=self.shard.world,
            processors=torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 8,
            add_up=self._parallel.add_up if self._parallel is not None else None,
            put_together=self._parallel.put_together if self._parallel is not None else None,
        )

    def reweigh(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights from now on; the KV pool stays as it is.  Graphs hold the old ones: no more."""
        if self._parallel is not None:
            raise UserError("weights cannot be changed across ranks", where="--tensor-parallel", remedy="use one rank")
        self._forward, self._graphs = self._load(weights), None

    @property
    def account(self) -> Device | None:
        """The device's peaks, for the floors; None where they are not known."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((device for key, device in DEVICES.items() if key in name), None)

    # --- memory ---
    def _allocate_kv(self) -> int:
        """The KV pool: as configured, else what is free when the largest step has what it needs."""
        shape, config = self.shape, self.config
        page_bytes = shape.kv_bytes_per_token(self.kv_bytes) * config.block_size // self.shard.world
        if config.kv_blocks is not None:
            blocks = config.kv_blocks
        elif self.device.type != "cuda":
            blocks = _INTERPRETER_PAGES
        else:
            try:
                need = self._largest_step()
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"weights and a step of {config.token_budget} tokens do not fit into the device's memory",
                    where="--token-budget",
                    remedy="lower it, or use --weights int4, a smaller model or more GPUs",
                ) from error
            free, _total = torch.cuda.mem_get_info(self.device)
            most = config.max_batch * -(-self.max_context // config.block_size)
            blocks = min(int((free - need) * _KV_SHARE) // page_bytes, most)
        if self._parallel is not None:
            blocks = self._parallel.least(blocks)
        while blocks >= 1:
            try:
                self._kv = self._pool(blocks)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                blocks = blocks * 9 // 10
                continue
            return self._parallel.least(blocks) if self._parallel is not None else blocks
        raise UserError(
            "no memory is left for KV", where="--backend triton", remedy="use a smaller model, int4, or more GPUs"
        )

    def _pool(self, blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        size = (blocks * self.config.block_size, self.shape.n_kv_heads // self.shard.world, self.shape.head_dim)
        # never zeroed: a slot is written before it is read
        return [
            (
                torch.empty(size, dtype=self.kv_dtype, device=self.device),
                torch.empty(size, dtype=self.kv_dtype, device=self.device),
            )
            for _ in range(self.shape.n_layers)
        ]

    def _largest_step(self) -> int:
        """Bytes that a step of the whole budget takes beside weights and KV; found by running it over a small pool."""
        n = min(self.config.token_budget, self.max_context)
        blocks = -(-n // self.config.block_size)
        self._kv = self._pool(blocks)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        layout, ints = build_step([Piece([0] * n, 0, range(blocks), (n - 1,), False)], self.limits)
        self._compute(layout, torch.from_numpy(ints).to(self.device))
        torch.cuda.synchronize()
        need = torch.cuda.max_memory_allocated(self.device) - before
        self._kv = []
        torch.cuda.empty_cache()
        return need

    # --- a step ---
    @torch.inference_mode()
    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Compute the slices and write their KV; logits of ``rows`` of each, in order."""
        before = self.padded_tokens
        if self.lookahead is None:
            logits = self._run([piece_of(one, self._row) for one in slices])
            self.last_step = {"padded_tokens": self.padded_tokens - before}
            return logits
        drafted, accepted = self.lookahead.drafted, self.lookahead.accepted
        logits = self._ahead(slices, self.lookahead)
        self.last_step = {
            "padded_tokens": self.padded_tokens - before,
            "drafted_tokens": self.lookahead.drafted - drafted,
            "accepted_tokens": self.lookahead.accepted - accepted,
        }
        return logits

    def _ahead(self, slices: Sequence[Slice], lookahead: Lookahead) -> torch.Tensor:
        """The rows that are not known yet, and those of the drafts."""
        pieces: list[Piece] = []
        made: list[torch.Tensor | tuple[Slice, list[int], int]] = []  # a known row, or where its rows begin
        rows = 0
        for one in slices:
            known = lookahead.known(one)
            if known is not None:
                made.append(known)
                continue
            drafts = lookahead.drafts(one)
            made.append((one, drafts, rows))
            pieces += [piece_of(one, self._row), *lookahead.pieces(one, drafts)]
            rows += one.rows + len(drafts)
        logits = self._run(pieces) if pieces else torch.empty(0, self.shape.vocab, device=self.device)
        found = []
        for entry in made:
            if isinstance(entry, torch.Tensor):
                found.append(entry)
                continue
            one, drafts, at = entry
            found.append(logits[at : at + one.rows])
            if drafts:
                lookahead.keep(one, drafts, logits[at + 1 : at + 1 + len(drafts)].clone())
        return torch.cat(found)

    def _run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The pieces' logits; in two halves where the device has no memory for them together."""
        try:
            layout, ints = build_step(pieces, self.limits)
            if self._parallel is not None:
                self._parallel.tell(STEP, layout, ints)
            logits = self._execute(layout, ints)
        except torch.OutOfMemoryError as error:
            self.divided_steps += 1
            if self._parallel is not None or not (parts := halves(pieces)):
                raise DeviceFull(f"no memory for a step of {sum(len(one.ids) for one in pieces)} tokens") from error
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            # in this order: the second half may attend to what the first writes
            return torch.cat([self._run(half) for half in parts])
        wanted = sum(len(piece.sampled) for piece in pieces)
        self.padded_tokens += layout.rows - sum(len(piece.ids) for piece in pieces)
        return logits[:wanted]

    def _execute(self, layout: Layout, ints: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(ints)
        if self.device.type == "cuda":
            host = host.pin_memory()  # so that the copy does not wait for the device
        if self._graphs is not None and self.use_graphs and (found := self._graphs.replay(layout, host)) is not None:
            return found
        return self._compute(layout, host.to(self.device, non_blocking=True))

    def _compute(self, layout: Layout, ints: torch.Tensor) -> torch.Tensor:
        if self.feeds:
            feed(layout.views(ints)["ids"], self._drawn)
        return self._forward(layout, ints, self._kv)

    # --- sampling ---
    @torch.inference_mode()
    def launch(self, slices: Sequence[Slice]) -> Read | None:
        """Start a step without waiting for anything; its tokens are read by what is returned.

        None, and nothing started: a row needs the host for its token.
        """
        sampling = [one for one in slices if one.sample]
        if any(one.all_logits for one in slices) or not all(plain(one.request, one.end) for one in sampling):
            return None
        drawn = draw(self.forward(slices), [(one.request, one.end) for one in sampling])
        self._drawn[: len(sampling)] = drawn[0]
        self._row = {one.request: row for row, one in enumerate(sampling)}
        return Reader(drawn).read

    def sample(self, logits: torch.Tensor, requests: Sequence[Request], eos: frozenset[int]) -> Drawn:
        """As ``engine.sampling.sample``, with the same tokens."""
        with torch.inference_mode():
            return draw_and_read(logits, requests, eos)

    # --- before ready, and across ranks ---
    def warm_up(self, make_slices: Callable[[int], list[Slice]]) -> float:
        """Compile every kernel and capture every graph, so that no request waits for it; returns seconds taken."""
        start = time.perf_counter()
        budget = self.config.token_budget
        # one token, each height of a tile, and the whole budget; in the interpreter nothing is compiled
        for n in (1,) if INTERPRETED else sorted({n for n in (1, 17, 33, 65, budget) if n <= budget}):
            if (read := self.launch(make_slices(n))) is not None:
                read()
        layouts = self.limits.decode_layouts()
        for layout in layouts[:1] if INTERPRETED else layouts:
            if not self.use_graphs:
                self._rehearse(layout)
                continue
            if self._parallel is not None:
                self._parallel.tell(CAPTURE, layout)
            if not self._capture(layout):
                break
        if self._graphs is not None:
            log.info("captured %d CUDA graphs of decodes", len(self._graphs))
        return time.perf_counter() - start

    @torch.inference_mode()
    def _rehearse(self, layout: Layout) -> None:
        """Run a step of decodes that is padding alone: it compiles what it needs and writes nothing."""
        ints = np.zeros(layout.size, np.int32)
        layout.views(torch.from_numpy(ints))["slots"].fill_(-1)
        if self._parallel is not None:
            self._parallel.tell(STEP, layout, ints)
        self._execute(layout, ints)

    def capture_for(self, decodes: int, longest: int) -> bool:
        """Capture the graph of one size of step, if it is not there yet; for those who skip ``warm_up``."""
        return self._capture(self.limits.decode_layout(decodes, longest))

    def _capture(self, layout: Layout) -> bool:
        """False where the device has no memory for another graph: such steps then run without."""
        if self._graphs is None:
            return False
        try:
            with torch.inference_mode():
                self._graphs.capture(layout)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            log.warning("no memory for more than %d CUDA graphs; other steps run without", len(self._graphs))
            return False
        return True

    @torch.inference_mode()
    def follow(self) -> None:
        """A rank above 0: compute what rank 0 computes until it says stop."""
        if self._parallel is None:
            raise RuntimeError("one rank alone has nobody to follow")
        while True:
            what, layout, ints = self._parallel.hear()
            if what == STOP:
                return
            if what == CAPTURE:
                self._capture(layout)
            elif ints is not None:
                self._execute(layout, ints)

    def close(self) -> None:
        """Tell the other ranks that it is over and wait for them."""
        if self._parallel is not None and self._followers is not None:
            self._parallel.tell(STOP)
            codes = self._followers.join(30.0)
            self._parallel.close()
            self._parallel = self._followers = None
            if any(codes):
                log.warning("ranks ended with %s", codes)
