"""Behaviours 11 to 18 of docs/engine-behaviours.md on an engine that is stepped by hand; bits where it says bits.

The others: 1 to 10 in test_behaviours_text.py, 19 in test_policy.py, 20 to 23 in test_behaviours_server.py.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.native.runner import NativeRunner
from engine.scheduler import Slice
from models.store import LoadedModel
from telemetry import names
from telemetry.names import DECODE, PREEMPTED, PREFILL, QUEUE
from tests.engine import test_server_abort as gone
from tests.engine.conftest import Answer, HandDriven
from tests.engine.serving import client, serving
from tests.engine.test_random_operations import Monkey

compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc brings one")
PROMPT = list(range(20, 50))


class Recorder(NativeRunner):
    """The forward in C that keeps, for every token sampled, the logits that it was sampled from."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.rows: dict[str, list[torch.Tensor]] = {}

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        logits = super().forward(slices)
        sampled = [piece.request.id for piece in slices if piece.sample]
        for name, row in zip(sampled, logits, strict=True):
            self.rows.setdefault(name, []).append(row.clone())
        return logits


def rig(model: LoadedModel, **options: Any) -> HandDriven:
    return HandDriven(model, runner=Recorder, **options)


def bits(rig: HandDriven, answer: Answer) -> torch.Tensor:
    """[tokens, vocabulary]: the logits of every token of an answer."""
    runner = rig.engine.runner
    assert isinstance(runner, Recorder)
    return torch.stack(runner.rows[answer.request.id])


@pytest.mark.parametrize(
    ("state", "reach"),
    [
        ("queued", lambda engine: engine.submit(PROMPT)),
        ("mid-prefill", lambda engine: _stepped(engine, engine.submit([9] * 60), 1)),
        ("decoding", lambda engine: _stepped(engine, engine.submit(PROMPT, max_tokens=30), 6)),
        ("preempted", lambda engine: _preempted(engine)),
    ],
)
def test_behaviour_11_a_client_that_goes_frees_everything_once(
    drive: Callable[..., HandDriven], state: str, reach: Callable[[HandDriven], Answer]
) -> None:
    engine = drive(kv_blocks=7, token_budget=16, max_batch=4)
    answer = reach(engine)
    request = answer.request
    phase = {"queued": QUEUE, "mid-prefill": PREFILL, "decoding": DECODE, "preempted": PREEMPTED}[state]
    assert request.clock.phase == phase
    engine.abort(answer)
    engine.abort(answer)  # twice changes nothing
    assert answer.finish == "abort" and request.blocks == []
    engine.run()
    stats = engine.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used, stats.kv_free) == (0, 0, 0, stats.kv_total)
    assert stats.finished["abort"] == 1 and stats.live == 0
    assert sum(output.finish_reason is not None for output in answer.outputs) == 1
    if state == "decoding":  # and over the wire: gauges at 0, one span, with an error
        asyncio.run(gone.gone_in(_reach_decoding, phase=names.DECODE))


async def _reach_decoding(server: Any, gate: Any) -> Any:
    raw = await gone.RawClient.post(server, gone.ask(stream=True))
    await gate.arrived()
    await gate.step(4)
    return raw


def _stepped(engine: HandDriven, answer: Answer, steps: int) -> Answer:
    for _ in range(steps):
        engine.step()
    return answer


def _preempted(engine: HandDriven) -> Answer:
    answers = [engine.submit([60 + k] * 20, max_tokens=40) for k in range(3)]
    while engine.engine.stats().preemptions == 0:
        engine.step()
    return next(answer for answer in answers if answer.request.clock.facts.preemptions)


@pytest.mark.parametrize("seed", range(1, 4))
def test_behaviour_12_a_thousand_random_operations_on_a_tiny_pool(tiny: LoadedModel, seed: int) -> None:
    monkey = Monkey(tiny, 1000 + seed)
    monkey.run(1000)  # the invariants are checked after every operation
    monkey.finish()
    assert monkey.done["abort"] and monkey.done["length"]


@compiled
@pytest.mark.parametrize("k", [1, 2, 3])
def test_behaviour_13_a_prompt_of_whole_pages_all_cached_is_bit_equal(tiny: LoadedModel, k: int) -> None:
    engine = rig(tiny)
    prompt = [(7 * n) % 300 + 20 for n in range(16 * k)]
    engine.submit([*prompt, 5], max_tokens=1)  # leaves all k pages in the cache
    engine.run()
    warm = engine.submit(prompt, max_tokens=8)
    engine.run()
    assert warm.request.clock.facts.cached_tokens == 16 * (k - 1)  # one page is computed: a token must come from it
    cold = rig(tiny, prefix_cache=False)
    alone = cold.submit(prompt, max_tokens=8)
    cold.run()
    assert warm.tokens == alone.tokens
    assert torch.equal(bits(engine, warm), bits(cold, alone))


@compiled
@pytest.mark.parametrize("seed", range(3))
def test_behaviour_14_sharers_of_a_page_are_bit_equal_to_solo_whoever_goes(tiny: LoadedModel, seed: int) -> None:
    draw = random.Random(seed)
    shared = [(5 * n) % 300 + 20 for n in range(16)]
    prompts = [[*shared, 30 + k, *range(40, 40 + k % 5)] for k in range(15)]
    solo = {}
    for k, prompt in enumerate(prompts):
        engine = rig(tiny, prefix_cache=False)
        answer = engine.submit(prompt, max_tokens=12)
        engine.run()
        solo[k] = bits(engine, answer)
    engine = rig(tiny, max_batch=16, token_budget=32)
    engine.submit([*shared, 3], max_tokens=1)
    engine.run()
    asked = [(k, engine.submit(prompt, max_tokens=12)) for k, prompt in enumerate(prompts)]
    left: set[str] = set()
    while engine.engine.scheduler.has_work:
        engine.step()
        k, victim = draw.choice(asked)
        if victim.finish is None and draw.random() < 0.3:
            engine.abort(victim)
            left.add(victim.request.id)
            if len(left) < 12:
                asked.append((k, engine.submit(prompts[k], max_tokens=12)))  # and comes again
    assert left
    for k, answer in asked:
        if answer.request.id not in left:
            assert answer.request.clock.facts.cached_tokens == 16
            assert torch.equal(bits(engine, answer), solo[k])


@compiled
def test_behaviour_15_preempted_and_resumed_with_a_partial_hit_gives_the_same_tokens(tiny: LoadedModel) -> None:
    prompts = [[60 + k, *range(100, 135)] for k in range(4)]
    want = []
    for prompt in prompts:
        calm = rig(tiny, prefix_cache=False)
        answer = calm.submit(prompt, max_tokens=50)
        calm.run()
        want.append((answer.tokens, bits(calm, answer)))
    tight = rig(tiny, kv_blocks=11, max_batch=4, token_budget=32)
    answers = [tight.submit(prompt, max_tokens=50) for prompt in prompts]
    tight.run()
    resumed: dict[str, int] = {}  # request -> tokens that it found again when it came back
    for record in tight.engine.steps.since(-1):
        for name, cached in zip(record.admitted, record.admitted_cached, strict=True):
            if any(name in before.preempted_requests for before in tight.engine.steps.since(-1)[: record.step]):
                resumed[name] = max(resumed.get(name, 0), cached)
    assert any(0 < cached < 36 + 50 for cached in resumed.values())  # others evicted some of its pages, not all
    for answer, (tokens, rows) in zip(answers, want, strict=True):
        assert answer.tokens == tokens
        assert torch.equal(bits(tight, answer), rows)


@compiled
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_behaviour_16_alone_or_in_any_batch_and_chunks_is_bit_equal(tiny: LoadedModel, chunk: int, cache: bool) -> None:
    alone = rig(tiny, token_budget=512, prefix_cache=False)
    want = alone.submit(PROMPT, max_tokens=5)
    alone.run()
    for mates in (0, 1, 3, 7, 31, 63) if chunk >= 64 else (0,):
        size = max(1, mates + 1)
        budget = max(chunk, size)
        engine = rig(tiny, max_batch=size, token_budget=budget, kv_blocks=400, prefix_cache=cache)
        if cache:
            engine.submit(PROMPT, max_tokens=1)
            engine.run()
        before = [engine.submit([9 + k] * (3 + k % 20), max_tokens=8) for k in range(mates // 2)]
        answer = engine.submit(PROMPT, max_tokens=5)
        after = [engine.submit([90 + k] * (3 + k % 20), max_tokens=8) for k in range(mates - mates // 2)]
        engine.run()
        assert all(mate.finish == "length" for mate in (*before, *after))
        assert (answer.request.clock.facts.cached_tokens > 0) == cache
        assert torch.equal(bits(engine, answer), bits(alone, want)), (mates, chunk, cache)


def test_behaviour_17_a_seed_gives_the_same_tokens_beside_unseeded_mates(drive: Callable[..., HandDriven]) -> None:
    engine = drive()
    alone = engine.submit(PROMPT, temperature=1.0, seed=42, max_tokens=12)
    engine.run()
    assert len(set(alone.tokens)) > 1
    for count in (1, 4, 9):
        mates = [engine.submit([9 + k] * (5 + k), temperature=1.3, max_tokens=12) for k in range(count)]
        among = engine.submit(PROMPT, temperature=1.0, seed=42, max_tokens=12)
        engine.run()
        assert among.tokens == alone.tokens
        assert all(mate.finish == "length" for mate in mates)


def test_behaviour_18_a_row_that_is_not_finite_fails_alone_with_a_500_and_is_never_cached() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            engine = server.service.engine
            forward, bad = engine.runner.forward, [8] * 40

            def poisoned(slices: Sequence[Slice]) -> torch.Tensor:
                logits = forward(slices).clone()
                rows = [piece.request.prompt_ids for piece in slices if piece.sample]
                logits[[at for at, prompt in enumerate(rows) if prompt == bad]] = float("nan")
                return logits

            def body(prompt: list[int]) -> dict[str, Any]:
                return {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}

            alone = await (await http.post("/v1/completions", json=body([7] * 40))).json()
            engine.runner.forward = poisoned  # type: ignore[method-assign]
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body(prompt)) for prompt in ([7] * 40, bad, [6] * 40))
            )
            assert [answer.status for answer in answers] == [200, 500, 200]
            assert "not finite" in (await answers[1].json())["error"]["message"]
            assert (await answers[0].json())["choices"][0]["text"] == alone["choices"][0]["text"]
            engine.runner.forward = forward  # type: ignore[method-assign]
            again = await (await http.post("/v1/completions", json=body(bad))).json()
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert engine.integrity() == []

    asyncio.run(go())


def test_every_behaviour_has_one_test_and_stands_in_the_docs() -> None:
    folder = Path(__file__).parent
    found: Counter[str] = Counter()
    for path in folder.glob("test_*.py"):
        found.update(re.findall(r"^def test_behaviour_(\d\d)_", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert found == Counter({f"{number:02}": 1 for number in range(1, 24)})
    page = (folder.parents[1] / "docs" / "engine-behaviours.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| (\d+) \|.*`(test_\w+\.py)::test_behaviour_\d\d_\w+` \|$", page, re.MULTILINE))
    assert sorted(named, key=int) == [str(number) for number in range(1, 24)]
    for number, test in re.findall(r"^\| (\d+) \|.*`(test_\w+\.py::test_behaviour_\w+)` \|$", page, re.MULTILINE):
        file, name = test.split("::")
        assert f"def {name}(" in (folder / file).read_text(encoding="utf-8"), test
        assert name.startswith(f"test_behaviour_{int(number):02}_")
