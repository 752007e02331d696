"""One side of a virtual trial: what arrives, the engine, the way between, the client; and its run as a bundle.

Everything is drawn from the seed: size of the server, lengths, burstiness.  Must always hold: side A and side B of a
pair get the same arrivals, prompts and lengths, other noise; nothing in the bundle tells which fault was played.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loadgen.patience import Patience
from telemetry.twin import Twin, TwinLoad, TwinRun, TwinSetting

#: Step noise of the real engine on a quiet machine, as docs/virtual-time.md has it from `make bench-anchor`.
NOISE: Final = (0.08, 0.76, 0.648, 0.007)
DEVICES: Final = (("llama-3.1-8b", "a100"), ("llama-3.1-8b", "h100"), ("llama-3.1-8b", "l4"))
SYSTEM: Final = 1  # id of the block that all prompts begin with


@dataclass(frozen=True, slots=True)
class Wire:
    """What happens between client and server.  kind: see loadgen.lab.wire.  share: of the requests that it meets."""

    kind: str
    share: float
    size: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """asked_tokens: of the answers that the client expects (the engine may give fewer).  patience: None, or retries.

    replicas: how many servers share the load.  client_s: CPU seconds of a starved client for each request; 0: it has
    all it needs.  reading: (kind, size) of a wrong reading of prompts.
    """

    load: TwinLoad
    setting: TwinSetting
    asked_tokens: npt.NDArray[np.int64]
    patience: Patience | None = None
    wires: tuple[Wire, ...] = ()
    client_s: float = 0.0
    reading: tuple[str, float] | None = None
    timeout_s: float = 600.0
    replicas: int = 1
    slow_replica: float = 1.0
    notes: dict[str, Any] = field(default_factory=dict)


def base(twin: Twin, seed: int, utilisation: float, requests: int) -> World:
    """The healthy side: a server and a load drawn from the seed, at a share of what that server carries."""
    draw = random.Random(f"lab world {seed}")
    rng = np.random.default_rng(draw.getrandbits(63))
    model, device = draw.choice(DEVICES)
    batch = draw.choice((16, 24, 32))
    setting = TwinSetting(
        model=model,
        device=device,
        max_batch=batch,
        token_budget=draw.choice((512, 1024, 2048)),
        noise=NOISE,
        seed=seed,
    )
    system = draw.choice((128, 256, 384))
    inputs = np.clip(rng.lognormal(np.log(draw.uniform(150, 400)), 0.7, requests), 16, 2500).astype(np.int64) + system
    outputs = np.clip(rng.lognormal(np.log(draw.uniform(50, 110)), 0.5, requests), 8, 400).astype(np.int64)
    cv = draw.uniform(0.8, 1.4)
    gaps = rng.gamma(1 / cv**2, cv**2, requests)
    at = np.cumsum(gaps) / gaps.sum() * requests
    load = TwinLoad(at, inputs, outputs, prefixes=[[SYSTEM]] * requests, prefix_tokens=system)
    world, calm = _settled(twin, World(load, setting, outputs), utilisation)
    assert calm.steps is not None
    # a pool with some room above what this load ever holds
    peak = int(np.max(calm.steps.column("kv_used").to_numpy()))
    longest = int((inputs + outputs).max()) // setting.block_size + 2
    setting = replace(setting, kv_blocks=max(round(1.25 * peak), longest + batch))
    return replace(world, setting=setting, notes={**world.notes, "peak_blocks": peak})


def settled(twin: Twin, world: World, utilisation: float) -> World:
    """The same with the arrivals at this share of what the server carries, whatever its requests are like by now."""
    return _settled(twin, world, utilisation)[0]


def _settled(twin: Twin, world: World, utilisation: float) -> tuple[World, TwinRun]:
    """And its run.  The capacity is measured: all requests come at once, and the last ends after so many seconds.

    A client waits eight times as long as a slow answer takes then.
    """
    requests = len(world.load.at_s)
    burst = replace(world.load, at_s=np.zeros(requests))
    capacity = requests / twin.replay(burst, world.setting).length_s
    at = world.load.at_s / world.load.at_s[-1] * requests / (utilisation * capacity)
    load = replace(world.load, at_s=at)
    calm = twin.replay(load, world.setting, steps=True)
    slow = float(np.percentile(calm.e2e_s[~np.isnan(calm.e2e_s)], 99))
    notes = {**world.notes, "capacity": capacity, "utilisation": utilisation, "e2e_p99_s": slow}
    return replace(world, load=load, timeout_s=8 * slow, notes=notes), calm
