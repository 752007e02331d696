"""Faults for testing the tester: what a serving stack does wrong in the field, switched on while the engine runs.

Off unless the server was started with ``--enable-faults``; then nothing of this module is even imported.  What is
injected stands in ``/debug/faults`` and in the log ``tailspan.faults`` and nowhere else: no span, metric, account or
step carries it, so whoever looks for the fault has to find it by what it does.

Each fault acts at one seam: around the forward (``FaultyRunner``), between two steps (``Engine.before_step``), in the
pool (``resize``, ``redirect``), in the limits of admission, where prompts are read, where streams are written.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.request import Request, SamplingParams
from engine.scheduler import Slice
from models.errors import UserError
from models.misreading import OTHER_TEMPLATE, fewer_merges
from models.store import LoadedModel
from models.template import ChatTemplate
from models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.core import Engine
    from engine.runner import Runner

log = logging.getLogger("tailspan.faults")

GROUP: Final = 32  # weights that share a scale when they are rounded


@dataclass(frozen=True, slots=True)
class Kind:
    """What a fault does; what its size means, its default and bounds; whom its share is drawn from ("" : all)."""

    what: str
    of: str = ""
    size: float = 0.0
    unit: str = ""
    low: float = 0.0
    high: float = 1e9


KINDS: Final[dict[str, Kind]] = {
    "slow_step": Kind("a step takes longer", "steps", 50, "ms more", 0, 60_000),
    "stalled_loop": Kind("the loop sleeps between two steps, every so often", "", 300, "ms", 0, 60_000),
    "frozen_scheduler": Kind("a step never ends; health says ok"),
    "nan_row": Kind("a row's logits are not finite", "requests", 1, "tokens generated before", 0),
    "nan_layer": Kind("weights of one layer are not finite", "", 0, "layer", 0, 1000),
    "kv_pool": Kind("the KV pool is smaller", "", 0.4, "share of the pages that stays", 0.001, 1),
    "queue_limit": Kind("fewer requests may wait", "", 16, "requests", 1),
    "weights": Kind("weights were rounded to fewer bits", "", 4, "bits", 2, 8),
    "broken_cache": Kind("a hit in the prefix cache gives another prompt's page", "hits"),
    "race": Kind("a row reads a batch-mate's last token in large batches", "rows", 16, "requests in the batch", 2),
    "end_suppressed": Kind("end-of-text is never chosen", "requests"),
    "sampling_ignored": Kind("temperature, top-p, top-k and seed have no effect: always greedy", "requests"),
    "empty_output": Kind("end-of-text comes first", "requests"),
    "output_cap": Kind("no answer is longer", "requests", 64, "tokens", 1),
    "wrong_template": Kind("messages go through another model's chat template", "requests"),
    "double_bos": Kind("one more BOS stands before the prompt", "requests"),
    "other_tokenizer": Kind("the tokenizer lacks its last merges", "requests", 0.5, "share of merges lost", 0.001, 1),
    "cut_stream": Kind("a stream ends early, without finish reason", "streams", 3, "frames of text before", 0),
    "reset_stream": Kind("the connection of a stream is reset", "streams", 3, "frames of text before", 0),
}
NEED_LOGITS: Final = (
    "nan_row", "end_suppressed", "sampling_ignored", "empty_output", "race", "broken_cache",
)  # fmt: skip
ON_ENGINE: Final = ("nan_layer", "kv_pool", "queue_limit", "weights", "broken_cache")  # changed between two steps


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in force.  share: 0..1 of what its kind says.  every_s: period of the stalled loop."""

    name: str
    share: float = 1.0
    size: float = 0.0
    seed: int = 0
    every_s: float = 2.0

    def draws(self, key: str) -> bool:
        """Does it hit this request?  The same answer every time."""
        if self.share >= 1:
            return True
        digest = hashlib.blake2b(f"{self.seed} {self.name} {key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.share * 2.0**64


def make(body: Mapping[str, Any]) -> Fault:
    """A fault from {"name", "share", "size", "seed", "every_s"}.  Raises UserError that names what is wrong."""
    name = body.get("name")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(name, str):
        raise UserError(f"no fault is called {name!r}", where="name", remedy=f"one of {', '.join(KINDS)}")
    unknown = sorted(set(body) - {"name", "share", "size", "seed", "every_s"})
    if unknown:
        raise UserError(f"a fault has no {unknown[0]!r}", where=unknown[0])
    share = _number(body, "share", 1.0, 0.0, 1.0)
    if share < 1 and not kind.of:
        raise UserError(f"{name} concerns all of the engine: its share is 1", where="share")
    size = _number(body, "size", kind.size, kind.low, kind.high)
    seed = body.get("seed", 0)
    if type(seed) is not int:
        raise UserError(f"seed is {seed!r}, but must be an integer", where="seed")
    return Fault(name, share, size, seed, _number(body, "every_s", 2.0, 0.0, 3600.0))


def _number(body: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise UserError(f"{key} is {value!r}, but must be a number between {low:g} and {high:g}", where=key)
    return float(value)


class Faults:
    """The faults in force, and what the seams ask.  ``set`` and ``clear`` on any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._active: dict[str, Fault] = {}  # replaced, never changed: read without a lock
        self._draw = {name: random.Random(0) for name in KINDS}
        self._thaw = threading.Event()
        self._thaw.set()
        self._closed = threading.Event()
        self._stalled_at = 0.0
        self._limit = engine.admission.limits.requests
        self._pages = engine.pool.total
        self._tokenizers: dict[float, Tokenizer] = {}
        self._template = ChatTemplate(OTHER_TEMPLATE)
        engine.runner = FaultyRunner(engine.runner, self)
        engine.before_step = self.before_step

    @property
    def active(self) -> dict[str, Fault]:
        """By name."""
        return self._active

    def set(self, fault: Fault) -> Future[None]:
        """Put it in force; done when it is.  Raises UserError when this engine cannot have it."""
        shape = self._engine.model.shape
        if fault.name == "double_bos" and shape.bos_token_id is None:
            raise UserError("this model has no BOS", where="name")
        if fault.name == "nan_layer" and fault.size >= shape.n_layers:
            raise UserError(f"this model has layers 0 to {shape.n_layers - 1}", where="size")
        if fault.name == "other_tokenizer":
            self._tokenizers[fault.size] = fewer_merges(self._engine.model.folder / "tokenizer.json", fault.size)
        if fault.name in ("weights", "nan_layer") and not hasattr(self._engine.runner, "reweigh"):
            raise UserError("this backend has no weights", where="name")
        if fault.name in NEED_LOGITS and not self._engine.has_logits:
            raise UserError("this backend computes nothing that it could spoil", where="name")
        log.warning("set: %s", fault)
        self._draw[fault.name] = random.Random(fault.seed)
        return self._change({**self._active, fault.name: fault}, fault.name)

    def clear(self, name: str) -> Future[None]:
        """Take it out of force; done when it is.  Harmless when it was not."""
        log.warning("cleared: %s", name)
        return self._change({key: fault for key, fault in self._active.items() if key != name}, name)

    def _change(self, active: dict[str, Fault], name: str) -> Future[None]:
        self._active = active
        if name == "frozen_scheduler":
            (self._thaw.clear if name in active else self._thaw.set)()
        if name in ON_ENGINE:
            return self._engine.call(lambda: self._apply(name))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _apply(self, name: str) -> None:
        """Engine thread: bring its state in line with what is in force."""
        engine, fault = self._engine, self._active.get(name)
        if name == "kv_pool":
            engine.resize_pool(max(1, int(self._pages * fault.size)) if fault else self._pages)
        elif name == "queue_limit":
            limit = int(fault.size) if fault else self._limit
            engine.admission.limits = replace(engine.admission.limits, requests=limit)
        elif name == "broken_cache":
            engine.pool.redirect = self._other_page if fault else None
            if fault is None:
                engine.pool.forget()  # pages that were computed on others' pages
        else:
            model = engine.model
            if not isinstance(model, LoadedModel):
                raise TypeError("a model without weights has none to change")
            weights: Mapping[str, torch.Tensor] = model.weights
            if "weights" in self._active:
                weights = Changed(weights, _rounding(int(self._active["weights"].size)))
            if "nan_layer" in self._active:
                weights = Changed(weights, _poison(int(self._active["nan_layer"].size)))
            getattr(engine.runner, "reweigh")(weights)  # noqa: B009 -- not every backend has weights; ``set`` looked
            engine.pool.forget()  # what is cached was computed with other weights

    def close(self) -> None:
        """Hold nothing up any more."""
        self._active = {}
        self._closed.set()
        self._thaw.set()

    # --- the seams of the engine thread ---
    def before_step(self) -> None:
        """Between two steps."""
        fault = self._active.get("stalled_loop")
        if fault is not None and time.monotonic() - self._stalled_at >= fault.every_s:
            self._closed.wait(fault.size / 1e3)
            self._stalled_at = time.monotonic()

    def forward(self, runner: Runner, slices: Sequence[Slice]) -> torch.Tensor:
        """Around a step's computation."""
        active = self._active
        self._thaw.wait()
        if (race := active.get("race")) is not None and len(slices) >= race.size:
            slices = self._racing(race, slices)
        logits = runner.forward(slices)
        if (slow := active.get("slow_step")) is not None and self._draw["slow_step"].random() < slow.share:
            self._closed.wait(slow.size / 1e3)
        return self._spoil(active, logits, slices)

    def _racing(self, fault: Fault, slices: Sequence[Slice]) -> list[Slice]:
        """Some decoding rows read the last token of the row beside them."""
        raced = list(slices)
        for at, piece in enumerate(slices):
            if piece.decode and self._draw["race"].random() < fault.share:
                victim = copy.copy(piece.request)
                mate = slices[(at + 1) % len(slices)].request
                victim.tokens = [*piece.request.tokens[:-1], mate.tokens[-1]]
                raced[at] = replace(piece, request=victim)
        return raced

    def _spoil(self, active: dict[str, Fault], logits: torch.Tensor, slices: Sequence[Slice]) -> torch.Tensor:
        """What is wrong with the logits of the rows that sample: the last of each slice's rows."""
        ends = sorted(self._engine.end_tokens)
        row_faults = [active[name] for name in _ROWS if name in active]
        if not row_faults:
            return logits
        logits = logits.clone()
        end = 0
        for piece in slices:
            end += piece.rows
            for fault in row_faults if piece.sample else ():
                if fault.draws(piece.request.id):
                    _ROWS[fault.name](logits[end - 1], piece.request, fault, ends)
        return logits

    def _other_page(self, page: int) -> int:
        fault = self._active.get("broken_cache")
        draw = self._draw["broken_cache"]
        if fault is None or draw.random() >= fault.share:
            return page
        others = [other for other in self._engine.pool.findable if other != page]
        return draw.choice(others) if others else page

    # --- the seams of the server ---
    def reading(self, key: str) -> tuple[ChatTemplate, Tokenizer, tuple[int, ...]]:
        """Template, tokenizer, and what stands before the prompt in addition."""
        model, hits = self._engine.model, self._hits(key)
        template = self._template if "wrong_template" in hits else model.template
        tokenizer = self._tokenizers[hits["other_tokenizer"].size] if "other_tokenizer" in hits else model.tokenizer
        bos = model.shape.bos_token_id
        return template, tokenizer, (bos,) if "double_bos" in hits and bos is not None else ()

    def params(self, key: str, params: SamplingParams) -> SamplingParams:
        """What the engine is told in place of what was asked."""
        cap = self._hits(key).get("output_cap")
        if cap is None:
            return params
        most = min(params.max_tokens, int(cap.size))
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    def stream(self, key: str) -> tuple[int, bool] | None:
        """Frames of text after which the stream breaks, and whether by a reset; None: it does not."""
        hits = self._hits(key)
        fault = hits.get("reset_stream") or hits.get("cut_stream")
        return None if fault is None else (int(fault.size), fault.name == "reset_stream")

    def _hits(self, key: str) -> dict[str, Fault]:
        return {name: fault for name, fault in self._active.items() if fault.draws(key)}


class FaultyRunner:
    """Stands before the real runner."""

    launch = None  # steps go through ``forward``, one after the other

    def __init__(self, inner: Runner, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self.name, self.has_logits = inner.name, inner.has_logits
        self.kv_blocks, self.max_context = inner.kv_blocks, inner.max_context

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """The runner's method."""
        return self._faults.forward(self._inner, slices) if self._faults.active else self._inner.forward(slices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Changed(Mapping[str, torch.Tensor]):
    """Weights, each changed when it is read."""

    def __init__(self, inner: Mapping[str, torch.Tensor], change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._inner, self._change = inner, change

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._change(name, self._inner[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A matrix as it is after symmetric rounding to ``bits`` with one scale for 32 inputs; vectors stay."""
    if weight.dim() != 2:
        return weight
    rows, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % GROUP)).view(rows, -1, GROUP)
    top = 2 ** (bits - 1) - 1
    scale = padded.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / top
    values: torch.Tensor = (padded / scale).round().clamp(-top, top) * scale
    return values.view(rows, -1)[:, :inputs].contiguous()


def _rounding(bits: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    # the embedding and the head stay at 8 bits, as quantised models have them
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        return rounded(weight, bits if ".layers." in name else 8)

    return change


def _poison(layer: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name != f"model.layers.{layer}.mlp.down_proj.weight":
            return weight
        weight = weight.clone()
        weight[0] = float("nan")
        return weight

    return change


def _nan_row(row: torch.Tensor, request: Request, fault: Fault, ends: list[int]) -> None:
    if request.generated >= fault.size:
        row[0] = float("nan")


def _greedy(row: torch.Tensor, request: Request, fault: Fault, ends: list[int]) -> None:
    _only(row, int(row.argmax()))


def _no_end(row: torch.Tensor, request: Request, fault: Fault, ends: list[int]) -> None:
    row[ends] = _NEVER


def _only_end(row: torch.Tensor, request: Request, fault: Fault, ends: list[int]) -> None:
    if ends:
        _only(row, ends[0])


def _only(row: torch.Tensor, token: int) -> None:
    """Leave one token to choose."""
    row.fill_(_NEVER)
    row[token] = 0.0


_NEVER: Final = -1e9  # finite: the engine takes infinities for damage
_Spoiler = Callable[[torch.Tensor, Request, Fault, list[int]], None]
_ROWS: Final[dict[str, _Spoiler]] = {
    "end_suppressed": _no_end,
    "sampling_ignored": _greedy,
    "empty_output": _only_end,
    "nan_row": _nan_row,
}
