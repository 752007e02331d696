"""A step is scheduled and started while the one before it runs: the same tokens, exact books, nothing left over."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.structured import Grammars
from engine.virtual import VirtualEngine
from models.errors import UserError
from models.store import LoadedModel
from telemetry.names import PREEMPTED, QUEUE, STALL
from tests.engine.conftest import Answer, HandDriven
from tests.engine.overlapping import Simulated, Threaded
from tests.engine.test_random_operations import Monkey
from tests.engine.test_virtual import MS, arrivals, flat, rebuild, virtual

PROMPTS = [[5, 9, 13], list(range(20, 75)), list(range(100, 117)), [7] * 33]


def both(model: LoadedModel, use: Callable[[HandDriven], Any], **options: Any) -> tuple[Any, Any, HandDriven]:
    """What ``use`` gives without overlap and with it, and the engine that had it."""
    plain = use(HandDriven(model, Threaded, overlap=False, **options))
    driven = HandDriven(model, Threaded, **options)
    found = use(driven)
    return plain, found, driven


def runner_of(driven: HandDriven) -> Threaded:
    runner = driven.engine.runner
    assert isinstance(runner, Threaded)
    return runner


def over(answers: list[Answer]) -> list[tuple[list[int], str, str | None]]:
    return [(answer.tokens, answer.text, answer.finish) for answer in answers]


def test_the_next_step_is_started_before_the_one_that_runs_is_done(tiny: LoadedModel) -> None:
    """The device does not begin step k before step k + 1 was launched: an engine that waits for k never launches it."""
    driven = HandDriven(tiny, Threaded)
    runner, launched = runner_of(driven), [threading.Event() for _ in range(12)]
    launch = runner.launch

    def told(slices: Any) -> Any:
        read = launch(slices)
        launched[runner.launched - 1].set()
        return read

    runner.launch = told  # type: ignore[method-assign]
    late: list[int] = []
    runner.before = lambda k: None if k == 9 or launched[k + 1].wait(20.0) else late.append(k)
    answer = driven.submit(PROMPTS[0], max_tokens=10)
    driven.run()
    assert late == [] and len(answer.tokens) == 10
    assert runner.ahead == 9  # every step but the first; none was started for the token behind the last
    assert driven.engine.stats().void_tokens == 0


def test_without_overlap_every_step_is_read_before_the_next(tiny: LoadedModel) -> None:
    driven = HandDriven(tiny, Threaded, overlap=False)
    driven.submit(PROMPTS[0])
    driven.run()
    assert runner_of(driven).ahead == 0 and runner_of(driven).launched == 8


def mixed(driven: HandDriven) -> list[tuple[list[int], str, str | None]]:
    """Greedy and seeded, ends by length, by end-of-text, by a stop token and by a stop string, some come later."""
    ends: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": 40, "ignore_eos": False, "temperature": 1.5, "seed": 3},
        {"max_tokens": 40, "stop_token_ids": (11, 40, 90, 200, 300), "temperature": 2.0, "seed": 4},
        {"max_tokens": 40, "stop": ("e", "a"), "temperature": 1.0, "seed": 5},
        {"max_tokens": 17, "temperature": 0.7, "seed": 6},
        {"max_tokens": 9},
    ]
    answers = []
    for k, params in enumerate(ends * 2):
        answers.append(driven.submit([*PROMPTS[k % 4], k % 3], **params))
        if k % 2:
            driven.step()
    driven.run()
    return over(answers)


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_blocks": 14, "watermark": 0.0, "token_budget": 24, "max_batch": 6}, {"prefix_cache": False}],
    ids=["roomy", "preempting", "no cache"],
)
def test_the_tokens_are_those_without_overlap(tiny: LoadedModel, options: dict[str, Any]) -> None:
    want, got, driven = both(tiny, mixed, **options)
    assert got == want
    assert {finish for _, _, finish in got} == {"length", "stop"}
    stats, runner = driven.engine.stats(), runner_of(driven)
    assert runner.ahead > runner.launched // 2
    assert stats.void_tokens > 0  # ends that only the host could see
    assert (stats.preemptions > 0) == ("watermark" in options)
    assert stats.kv_free == stats.kv_total and stats.step_tokens == stats.request_tokens
    records = driven.engine.steps.since(-1)
    assert sum(record.padded_tokens or 0 for record in records) <= stats.void_tokens
    assert sum(sum(record.request_tokens) for record in records) == stats.request_tokens


def test_what_needs_the_token_on_the_host_is_not_started_ahead(tiny: LoadedModel) -> None:
    grammar = Grammars(tiny.tokenizer, tiny.shape).compile('{"type": "array", "items": {"type": "boolean"}}')
    asked: list[dict[str, Any]] = [
        {"grammar": grammar, "max_tokens": 30, "ignore_eos": False},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"logit_bias": ((40, 50.0),)},
        {"top_p": 0.8, "temperature": 1.0, "seed": 4},
        {"min_tokens": 4, "stop_token_ids": (11,), "temperature": 1.0, "seed": 1},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
    ]
    for params in asked:
        plain, got, driven = both(tiny, lambda d, p=params: [d.submit(PROMPTS[1], **p), d.run()][0])
        assert over([got]) == over([plain]), params
        # min_tokens and the logprobs of a prompt bind only the first steps
        free = "min_tokens" in params or "prompt_logprobs" in params
        assert (runner_of(driven).ahead > 0) == free, params

    def beside(driven: HandDriven) -> list[Answer]:
        answers = [driven.submit(PROMPTS[0], max_tokens=12)]
        driven.step()
        answers += [driven.submit(PROMPTS[1], **params) for params in asked]
        driven.run()
        return answers

    plain, got, _ = both(tiny, beside)
    assert over(got) == over(plain)
    assert [a.outputs[0].logprobs for a in got] == [a.outputs[0].logprobs for a in plain]


@pytest.mark.parametrize("seed", range(2))
def test_random_adds_and_aborts_keep_the_laws_and_every_answer_is_that_of_the_request_alone(
    tiny: LoadedModel, seed: int
) -> None:
    draw = random.Random(seed)
    driven = HandDriven(tiny, Threaded, kv_blocks=12, max_batch=5, token_budget=24, watermark=0.0)
    asked: list[tuple[Answer, list[int], dict[str, Any]]] = []
    for _ in range(150):
        what = draw.random()
        if what < 0.3 and len(driven.engine.live) < 9:
            prompt = [draw.randrange(3, 6) for _ in range(draw.randint(1, 50))]
            params = {
                "max_tokens": draw.randint(1, 30), "temperature": draw.choice([0.0, 1.5]), "seed": draw.randint(0, 99),
                "ignore_eos": draw.random() < 0.5, "stop_token_ids": draw.choice([(), (11, 40, 90, 200, 300, 400)]),
            }  # fmt: skip
            asked.append((driven.submit(prompt, **params), prompt, params))
        elif what < 0.4 and asked:
            driven.abort(draw.choice(asked)[0])
            assert driven.engine.integrity() == []
        elif driven.engine.scheduler.has_work:
            driven.step()
    driven.run()
    driven.engine.settle()
    stats = driven.engine.stats()
    assert stats.kv_free == 12 and stats.void_tokens > 0 and stats.preemptions > 0
    alone = HandDriven(tiny, Threaded, overlap=False, prefix_cache=False)
    for answer, prompt, params in asked:
        again = alone.submit(prompt, **params)
        alone.run()
        if answer.finish == "abort":
            assert again.tokens[: len(answer.tokens)] == answer.tokens
        else:
            assert (answer.tokens, answer.finish) == (again.tokens, again.finish)


def test_the_page_of_a_void_token_is_never_found(tiny: LoadedModel) -> None:
    """The token behind a stop fills a page exactly: it must not enter the prefix cache.  What is whole is found."""

    def use(driven: HandDriven) -> tuple[list[int], int, int, int]:
        first = driven.submit(list(range(20, 34)), max_tokens=20)  # 14 tokens: the third fills the page
        driven.run()
        stop = first.tokens[1]
        cut = driven.submit(list(range(20, 34)), max_tokens=20, stop_token_ids=(stop,))
        driven.run()
        assert cut.tokens == first.tokens[:2]
        again = driven.submit(list(range(20, 34)) + first.tokens, max_tokens=1)
        driven.run()
        facts, pool = again.request.clock.facts, driven.engine.pool
        return first.tokens, facts.cached_tokens, len(pool.findable), min(len(tokens) for _, tokens in pool._index)

    plain, got, driven = both(tiny, use)
    assert got == plain and got[1:] == (32, 2, 16)
    assert driven.engine.stats().void_tokens == 1


def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(tiny: LoadedModel) -> None:
    driven = HandDriven(tiny, Threaded)
    runner = runner_of(driven)

    def fall(k: int) -> None:
        if k == 3:
            raise RuntimeError("the device fell over")

    runner.before = fall
    answer, other = driven.submit(PROMPTS[0]), driven.submit(PROMPTS[2])
    driven.run()
    assert answer.finish == other.finish == "error" and len(answer.tokens) == 3
    assert "the device fell over" in str(answer.outputs[-1].error)
    after = driven.submit(PROMPTS[0])
    driven.run()
    assert after.finish == "length" and driven.engine.stats().kv_free == 64


def test_a_row_that_is_not_finite_fails_alone(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = HandDriven(tiny, Threaded)
    inner = runner_of(driven).inner
    forward, calls = inner.forward, Counter[str]()

    def spoilt(slices: Any) -> torch.Tensor:
        logits = forward(slices).clone()
        calls["steps"] += 1
        if calls["steps"] == 3:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(inner, "forward", spoilt)
    bad, good = driven.submit(PROMPTS[0]), driven.submit(PROMPTS[2])
    driven.run()
    assert bad.finish == "error" and len(bad.tokens) == 2
    assert good.finish == "length" and len(good.tokens) == 8
    assert driven.engine.stats().nonfinite_rows == 1


def test_between_two_steps_none_is_under_way(tiny: LoadedModel) -> None:
    driven = HandDriven(tiny, Threaded)
    driven.submit(PROMPTS[0])
    driven.step()
    request = driven.engine.scheduler.running[0]
    assert request.pending == 1
    seen = driven.engine.call(lambda: (request.pending, request.generated, driven.engine.integrity()))
    driven.engine._drain(wait=False)
    assert seen.result(0) == (0, 2, [])
    driven.run()


def overlapped(rig: VirtualEngine) -> VirtualEngine:
    """The same engine over a device that works while the host goes on."""
    rig.engine.runner = Simulated(rig.config, rig.what, rig.clock)
    return rig


def test_steps_tile_the_time_and_every_phase_can_be_rebuilt_from_the_log(tiny: LoadedModel) -> None:
    options: dict[str, Any] = {"kv_blocks": 14, "max_batch": 6, "token_budget": 24, "seed": 1}
    rig = overlapped(virtual(tiny, flat(0.010, per_token=3e-4), leaping=False, **options))
    rig.feed(arrivals(1, 120, 60 * MS, prompt=80, output=90))
    rig.run()
    records = rig.engine.steps.since(-1)
    seen: Counter[str] = Counter()
    for life in rig.lives:
        assert life.clock is not None and life.reason == "length"
        rebuilt = rebuild(life, records)
        assert rebuilt == life.clock.durations(), life.id
        seen.update({phase: int(ns > 0) for phase, ns in rebuilt.items()})
    assert seen[PREEMPTED] > 5 and seen[QUEUE] > 50 and seen[STALL] == 0
    for before, after in itertools.pairwise(records):
        assert after.start_ns >= before.end_ns


def test_the_host_is_out_of_the_way_of_the_device(tiny: LoadedModel) -> None:
    """Three requests, all at once: 1 ms of host and 10 ms of device a step, behind one another or beside."""
    took = []
    for overlap in (False, True):
        rig = overlapped(virtual(tiny, flat(0.010), leaping=False, max_batch=4))
        runner = rig.engine.runner
        assert isinstance(runner, Simulated)
        runner.feeds, runner.host_ns = overlap, MS
        rig.feed([*arrivals(5, 3, 1, output=40)])
        rig.run()
        took.append(rig.clock.now_ns)
        steps = rig.engine.counts.steps
    assert took[0] == pytest.approx(steps * 11 * MS, rel=0.05)
    assert took[1] == pytest.approx(steps * 10 * MS, rel=0.05)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_in_virtual_time_keep_the_laws_at_every_step(tiny: LoadedModel, seed: int) -> None:
    """Aborts, arrivals and pools that shrink while steps are under way."""
    monkey = Monkey(tiny, seed)
    overlapped(monkey.rig)
    monkey.run(4000)
    monkey.finish()
    assert monkey.done["preemptions"] > 0 and monkey.rig.engine.stats().void_tokens > 10


def test_the_option_is_for_the_backend_that_heeds_it() -> None:
    with pytest.raises(UserError, match="for the kernels"):
        EngineConfig(backend="cpu", overlap=False)
