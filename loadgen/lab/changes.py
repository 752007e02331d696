"""What is done to side B of a virtual trial: one small function a fault, from the healthy world to the faulty one.

``size`` comes drawn from the scenario's file and means what the function says; ``draw`` is for moments and places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from loadgen.lab.world import Wire, World
from loadgen.patience import Patience
from models.errors import UserError

Change = Callable[[World, float, random.Random], World]


def _length(world: World) -> float:
    return float(world.load.at_s[-1])


def _setting(world: World, **changes: Any) -> World:
    return replace(world, setting=replace(world.setting, **changes))


def arrivals(world: World, size: float, draw: random.Random) -> World:
    """The same requests ``size`` times as fast."""
    return replace(world, load=replace(world.load, at_s=world.load.at_s / size))


def kv_pool(world: World, size: float, draw: random.Random) -> World:
    """``size`` of the pages, but at least what the longest request needs."""
    longest = int((world.load.input_tokens + world.load.output_tokens).max()) // world.setting.block_size + 2
    return _setting(world, kv_blocks=max(longest, round(size * world.notes["peak_blocks"])))


def kv_pool_too_small(world: World, size: float, draw: random.Random) -> World:
    """A pool of ``size`` times what the over-long requests need; the others fit as before."""
    longest = int((world.load.input_tokens + world.load.output_tokens).max()) // world.setting.block_size + 2
    return _setting(world, kv_blocks=round(size * longest))


def batch_size(world: World, size: float, draw: random.Random) -> World:
    """``size`` times as many requests may share a step, with room for their KV and for their tokens in a step."""
    limit = round(size * world.setting.max_batch)
    blocks = round(size * (world.setting.kv_blocks or 0))
    return _setting(
        world, max_batch=limit, kv_blocks=blocks or None, token_budget=max(limit, world.setting.token_budget)
    )


def cache_misses(world: World, size: float, draw: random.Random) -> World:
    """``size`` of the prompts begin with another system prompt each, as long as before."""
    prefixes = [
        [10_000 + at] if draw.random() < size else list(one) for at, one in enumerate(world.load.prefixes or [])
    ]
    return replace(world, load=replace(world.load, prefixes=prefixes))


def host_stall(world: World, size: float, draw: random.Random) -> World:
    """The engine's loop sleeps ``size`` seconds every so often (2 to 4 s)."""
    every = draw.uniform(2.0, 4.0) + size
    at = np.arange(draw.uniform(0, every), _length(world) * 2, every)
    return _setting(world, pauses=tuple((float(one), size) for one in at))


def engine_speed(world: World, size: float, draw: random.Random) -> World:
    """Every step takes ``size`` times as long."""
    return _setting(world, speed=1 / size)


def cold_start(world: World, size: float, draw: random.Random) -> World:
    """Compile caches are lost while serving: ``size`` seconds for each shape of a step that is new since then."""
    return _setting(world, compile_s=size, cold_at_s=draw.uniform(0.2, 0.6) * _length(world))


def retries(world: World, size: float, draw: random.Random) -> World:
    """One stall of ``size`` times the client's patience, in the middle of the run.

    It is over before the last to come makes its last attempt: what nobody sees the end of is a hang.
    """
    at = draw.uniform(0.3, 0.5) * _length(world)
    limit = world.patience.total_s if world.patience and world.patience.total_s else world.timeout_s
    attempts = 0 if world.patience is None else world.patience.retries
    return _setting(world, pauses=((at, min(size * limit, _length(world) + attempts * limit - at)),))


def hang(world: World, size: float, draw: random.Random) -> World:
    """From ``size`` of the run on no step ends any more; clients give up after their time-out."""
    return _setting(world, pauses=((size * _length(world), 100 * (world.timeout_s + _length(world))),))


def queue_limit(world: World, size: float, draw: random.Random) -> World:
    """No more than ``size`` requests may wait."""
    return _setting(world, queue_limit=max(1, round(size)))


def output_cap(world: World, size: float, draw: random.Random) -> World:
    """No answer is longer than ``size`` times the median of what was asked for."""
    cap = max(2, round(size * float(np.median(world.asked_tokens))))
    return replace(world, load=replace(world.load, output_tokens=np.minimum(world.load.output_tokens, cap)))


def prompt_lengths(world: World, size: float, draw: random.Random) -> World:
    """Prompts are ``size`` times as long."""
    longer = np.round(world.load.input_tokens * size).astype(np.int64)
    blocks = round(size * (world.setting.kv_blocks or 0))  # the pool is not the fault
    return _setting(replace(world, load=replace(world.load, input_tokens=longer)), kv_blocks=blocks or None)


def client(world: World, size: float, draw: random.Random) -> World:
    """The load generator has 1 / ``size`` of the CPU time that sending and reading this load takes."""
    gap = _length(world) / max(1, len(world.load))
    return replace(world, client_s=size * gap)


def tokenizer(world: World, size: float, draw: random.Random) -> World:
    """A tokenizer that lacks the last ``size`` of its merges."""
    return replace(world, reading=("tokenizer", size))


def template(world: World, size: float, draw: random.Random) -> World:
    """Another model's chat template."""
    return replace(world, reading=("template", size))


def stream_cut(world: World, size: float, draw: random.Random) -> World:
    """``size`` of the streams end early, in order, without a finish reason."""
    return _wire(world, Wire("cut", size, draw.uniform(0.1, 0.9), draw.getrandbits(31)))


def reset(world: World, size: float, draw: random.Random) -> World:
    """``size`` of the streams are reset."""
    return _wire(world, Wire("reset", size, draw.uniform(0.1, 0.9), draw.getrandbits(31)))


def network(world: World, size: float, draw: random.Random) -> World:
    """Every answer comes ``size`` times the median time to first token later."""
    return _wire(world, Wire("delay", 1.0, size * world.notes["e2e_p99_s"] / 10, draw.getrandbits(31)))


def slow_replica(world: World, size: float, draw: random.Random) -> World:
    """One of the replicas takes ``size`` times as long for each step."""
    return replace(world, slow_replica=size)


def nothing(world: World, size: float, draw: random.Random) -> World:
    """Nothing changes."""
    return world


def impatient(world: World) -> World:
    """Clients of both sides give up after twice a healthy server's slow answer, and try three times more."""
    limit = 2 * world.notes["e2e_p99_s"]
    # no budget holds these users back: with one there is no storm
    patience = Patience(total_s=limit, retries=3, backoff_s=limit / 20, factor=1.5, jitter=0.5, budget=3.0)
    return replace(world, patience=patience, timeout_s=limit)


def with_long_ones(world: World) -> World:
    """In both sides one request in forty has a context as long as all that the others ever hold, and fits."""
    block, peak = world.setting.block_size, world.notes["peak_blocks"]
    inputs = world.load.input_tokens.copy()
    inputs[20::40] = round(1.5 * peak) * block
    load = replace(world.load, input_tokens=inputs)
    return _setting(replace(world, load=load), kv_blocks=round(3.5 * peak))


def replicated(world: World) -> World:
    """Both sides have three replicas, asked in turn, and three times the load."""
    return replace(world, replicas=3)


CHANGES: Final[Mapping[str, Change]] = {
    one.__name__: one
    for one in (
        arrivals, kv_pool, kv_pool_too_small, batch_size, cache_misses, host_stall, engine_speed, cold_start, retries,
        hang, queue_limit, output_cap, prompt_lengths, client, tokenizer, template, stream_cut, reset, network,
        slow_replica, nothing,
    )
}  # fmt: skip
#: Of both sides, before the change.
BEFORE: Final[Mapping[str, Callable[[World], World]]] = {
    "retries": impatient,
    "slow_replica": replicated,
    "kv_pool_too_small": with_long_ones,
}


def _wire(world: World, wire: Wire) -> World:
    return replace(world, wires=(*world.wires, wire))


def apply(world: World, name: str, size: float, draw: random.Random) -> World:
    """The world of side B.  Raises UserError for a change that is not known."""
    if name not in CHANGES:
        raise UserError(f"no change is called {name!r}", where="virtual", remedy=f"one of {', '.join(CHANGES)}")
    return CHANGES[name](world, size, draw)
