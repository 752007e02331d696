"""An engine on a tiny model, stepped by hand, with the Triton runner (in the interpreter) or torch's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig
from engine.core import Engine
from engine.phase_clock import PhaseClock
from engine.request import Output, Request, SamplingParams
from engine.runner_cpu import CpuRunner
from engine.runner_triton import TritonRunner
from models.store import LoadedModel

#: fp32 on both sides, so that what is compared is the arithmetic and its order; small, since launches cost milliseconds
SETTINGS: dict[str, Any] = {"dtype": "fp32", "kv_blocks": 32, "token_budget": 48, "max_batch": 4, "threads": 1}


@dataclass
class Answer:
    request: Request
    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def error(self) -> str | None:
        return self.outputs[-1].error


class HandDriven:
    """An engine without its thread.  triton: the runner to use, else torch's on the CPU."""

    def __init__(self, model: LoadedModel, *, triton: bool | TritonRunner = True, **options: Any) -> None:
        self.config = EngineConfig(model="tiny", **{**SETTINGS, **options})
        if isinstance(triton, TritonRunner):
            self.runner: TritonRunner | CpuRunner = triton
        else:
            self.runner = TritonRunner(model, self.config) if triton else CpuRunner(model, self.config)
        self.engine = Engine(self.config, model, self.runner)
        self._n = 0

    def submit(self, prompt: list[int], **params: Any) -> Answer:
        self._n += 1
        settings = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **params}
        clock = PhaseClock(0)
        clock.parsed(0)
        clock.tokenized(0)
        answer = Answer(Request(f"r{self._n}", prompt, SamplingParams(**settings), clock, lambda out: take(out)))

        def take(output: Output) -> None:
            answer.outputs.append(output)

        self.engine.submit(answer.request)
        self.engine._drain(wait=False)
        return answer

    def run(self, limit: int = 200) -> None:
        for _ in range(limit):
            if not self.engine.scheduler.has_work:
                return
            self.engine.step()
            assert self.engine.integrity() == []
        raise AssertionError(f"still busy after {limit} steps")


def request_of(tokens: list[int], blocks: list[int]) -> Request:
    """A request that holds its pages, for a runner without an engine."""
    request = Request("r", tokens, SamplingParams(max_tokens=1), PhaseClock(0), lambda output: None)
    request.tokens, request.blocks = list(tokens), blocks
    return request
