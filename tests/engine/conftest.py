"""A tiny random Llama, and an engine on it that a test steps by hand: no thread, no clock, no luck."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.phase_clock import PhaseClock
from engine.request import Output, Request, SamplingParams
from engine.runner import Runner
from engine.runner_cpu import CpuRunner
from models.store import LoadedModel, load
from models.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(write_tiny(tmp_path_factory.mktemp("tiny"))))


@dataclass
class Answer:
    request: Request
    outputs: list[Output] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class HandDriven:
    """An engine without its thread."""

    def __init__(self, model: LoadedModel, runner: Callable[..., Runner] | None = None, **options: object) -> None:
        settings: dict[str, object] = {
            "model": "tiny",
            "dtype": "fp32",
            "threads": 1,
            "kv_blocks": 64,
            "token_budget": 64,
        }
        self.config = EngineConfig(**{**settings, **options})  # type: ignore[arg-type]
        self.engine = Engine(self.config, model, (runner or CpuRunner)(model, self.config))
        self._n = 0

    def submit_at(self, now: int, prompt: list[int], max_tokens: int) -> Answer:
        """Submit at a moment of a clock of the test's own."""
        return self.submit(prompt, now=now, max_tokens=max_tokens)

    def submit(
        self,
        prompt: list[int],
        *,
        now: int | None = None,
        priority: int = 0,
        deadline_ms: int | None = None,
        **params: object,
    ) -> Answer:
        self._n += 1
        now = time.monotonic_ns() if now is None else now
        clock = PhaseClock(now)
        clock.parsed(now)
        clock.tokenized(now)
        settings: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        answer = Answer(
            Request(
                f"r{self._n}",
                prompt,
                SamplingParams(**{**settings, **params}),
                clock,
                lambda output: answer.outputs.append(output),
            )  # type: ignore[arg-type]
        )
        answer.request.priority = priority
        answer.request.deadline_ns = now + deadline_ms * 1_000_000 if deadline_ms is not None else None
        self.engine.submit(answer.request)
        self.engine._drain(wait=False)
        return answer

    def abort(self, answer: Answer) -> None:
        self.engine.abort(answer.request.id)
        self.engine._drain(wait=False)

    def step(self) -> None:
        self.engine.step()
        assert self.engine.integrity() == []

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.engine.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")


@pytest.fixture
def drive(tiny: LoadedModel) -> Iterator[Callable[..., HandDriven]]:
    torch.manual_seed(0)
    yield lambda **options: HandDriven(tiny, **options)
