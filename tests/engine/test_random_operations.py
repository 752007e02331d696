"""A hundred thousand random operations in virtual time, the laws checked after every one of them and at every step.

Arrivals with shared prefixes, aborts in any state, a pool so small that requests are preempted, pools that grow and
shrink, all policies, with and without prefix cache.  A failure names its seed and operation.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.config import EngineConfig
from engine.policy import POLICIES
from engine.request import SamplingParams
from engine.simulated import Simulation
from engine.step_model import SHORTEST_NS
from engine.virtual import Arrival, VirtualEngine
from models.devices import DEVICES
from models.store import LoadedModel

OPERATIONS = int(os.environ.get("TAILSPAN_TEST_OPERATIONS", "100000"))
SEEDS = 10
POOL = 24


@dataclass
class Monkey:
    """Does random things to an engine and looks at its laws."""

    model: LoadedModel
    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.config = EngineConfig(
            backend="simulated",
            device="L4",
            dtype="bf16",
            kv_blocks=POOL,
            max_batch=self.draw.choice([2, 5, 8]),
            token_budget=self.draw.choice([8, 24, 64]),
            policy=sorted(POLICIES)[self.seed % len(POLICIES)],
            prefix_cache=self.seed % 2 == 0,
            watermark=self.draw.choice([0.0, 0.05]),
            queue_limit=12,
            queue_tokens=self.draw.choice([None, 600]),
            check_every=0,
        )
        what, leaping = Simulation(self.model, DEVICES["L4"], "bf16"), self.seed % 4 < 2  # and the plain engine
        self.rig = VirtualEngine(self.config, what, keep=True, leaping=leaping)
        self.prefixes = [[self.draw.randrange(3, 400) for _ in range(16 * n)] for n in (1, 2, 3)]

    def arrive(self) -> None:
        draw = self.draw
        prompt = list(draw.choice(self.prefixes)) if draw.random() < 0.6 else []
        prompt += [draw.randrange(3, 400) for _ in range(draw.randint(0 if prompt else 1, 40))]
        params = SamplingParams(
            max_tokens=draw.randint(1, 60), min_tokens=draw.choice([0, 0, 3]), ignore_eos=draw.random() < 0.5
        )
        deadline = draw.choice([None, 1, 50])
        self.rig.submit(Arrival(0, prompt, params, priority=draw.randint(-3, 3), deadline_ms=deadline))

    def leave(self) -> None:
        live = list(self.rig.engine.live)
        if live:
            self.rig.abort(self.draw.choice(live))

    def resize(self) -> None:
        self.rig.engine.resize_pool(self.draw.randint(6, POOL))

    def wait(self) -> None:
        self.rig.clock.wait_until(self.rig.clock.now_ns + self.draw.randint(1, 50 * SHORTEST_NS))

    def step(self) -> None:
        before = len(self.rig.engine.steps.since(-1)) if self.draw.random() < 0.01 else None
        if self.rig.turn():
            (record,) = self.rig.engine.steps.since(self.rig.engine.counts.steps - 2) or (None,)
            assert record is None or sum(record.request_tokens) <= self.config.token_budget
            assert record is None or len(record.requests) <= self.config.max_batch
            assert before is None or len(self.rig.engine.steps.since(-1)) <= before + 1

    def run(self, operations: int) -> None:
        choices: list[Callable[[], None]] = [self.arrive, self.leave, self.resize, self.wait, self.step]
        weights = [24, 5, 0.3, 5, 65.7]
        for number in range(operations):
            (what,) = self.draw.choices(choices, weights)
            try:
                what()
                wrong = self.rig.engine.integrity()
            except Exception as error:
                raise AssertionError(f"seed {self.seed}, operation {number}: {what.__name__}") from error
            assert wrong == [], f"seed {self.seed}, operation {number}, after {what.__name__}: {wrong}"
            self.done[what.__name__] += 1

    def finish(self) -> None:
        """Everything in flight ends; nothing is left."""
        rig = self.rig
        for _ in range(20_000):
            if not rig.turn() and not rig.engine.live:
                break
            assert rig.engine.integrity() == [], f"seed {self.seed}, while it ends"
        stats = rig.engine.stats()
        assert (stats.live, stats.running, stats.waiting, stats.kv_used) == (0, 0, 0, 0)
        taken = [life for life in rig.lives if life.clock is not None]
        assert len({life.id for life in taken}) == len(taken) == stats.received - sum(stats.rejected.values())
        for life in taken:
            assert life.clock is not None
            assert sum(life.clock.durations().values()) == life.clock.duration_ns
        self.done["preemptions"] += stats.preemptions
        self.done["hits"] += stats.prefix_hits
        self.done.update(stats.finished)
        self.done.update(stats.rejected)


@pytest.mark.timeout(600)
def test_a_hundred_thousand_random_operations_keep_the_laws_at_every_step(tiny: LoadedModel) -> None:
    total: Counter[str] = Counter()
    for seed in range(SEEDS):
        monkey = Monkey(tiny, seed)
        monkey.run(OPERATIONS // SEEDS)
        monkey.finish()
        total += monkey.done
    assert sum(total[name] for name in ("arrive", "leave", "resize", "wait", "step")) == OPERATIONS
    # everything that it is about did happen, and often
    for what, least in {
        "preemptions": 300, "hits": 3000, "stop": 100, "length": 3000, "abort": 500, "error": 3,
        "queue_full": 300, "queue_tokens": 20, "kv_oom": 3,
    }.items():  # fmt: skip
        assert total[what] >= least * OPERATIONS / 100_000, (what, dict(total))
