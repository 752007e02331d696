"""The calls of one worker, made one after another from the schedule: prompt, body, ids.

A call depends on the plan and its index alone, so that one worker or eight send the same bytes at the same times.
Nothing is kept: a million requests cost the memory of one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from loadgen.job import Call
from loadgen.prompts import Prompt, PromptMaker
from loadgen.schedule import Schedule

CHAT_PATH: Final = "/v1/chat/completions"
CLASS: Final = "default"
FULL_SAMPLING_BELOW: Final = 50.0  # requests per second: all spans below; six SDK spans cost 260 us of CPU a request
LEAST_SAMPLING: Final = 0.01


def sampling_ratio(rate_per_s: float) -> float:
    """Share of requests with spans at this mean rate: all below 50/s, then 50/s worth, at least 1 %."""
    return 1.0 if rate_per_s < FULL_SAMPLING_BELOW else max(LEAST_SAMPLING, FULL_SAMPLING_BELOW / rate_per_s)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every body says about decoding.  exact_output asks for exactly the planned number of tokens."""

    model: str
    seed: int
    temperature: float
    top_p: float
    exact_output: bool

    def body(self, messages: list[dict[str, Any]], index: int, output_tokens: int) -> bytes:
        """The JSON of one streamed chat completion; min_tokens and ignore_eos are vLLM's extensions."""
        draw = hashlib.blake2b(f"{self.seed}:{index}:sampling".encode(), digest_size=4).digest()
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": int.from_bytes(draw, "big") >> 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.exact_output:
            body |= {"min_tokens": output_tokens, "ignore_eos": True}
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


class Calls:
    """The CallSource of one worker.  Iterating twice gives the same calls."""

    def __init__(
        self,
        schedule: Schedule,
        maker: PromptMaker,
        sampling: Sampling,
        run_id: str,
        ratio: float,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self._schedule = schedule
        self._maker = maker
        self._sampling = sampling
        self._run_id = run_id
        self._ratio = ratio
        self._indexes = schedule.part(worker, workers)

    def __len__(self) -> int:
        return len(self._indexes)

    def __iter__(self) -> Iterator[Call]:
        for index in self._indexes:
            yield self.at(int(index))

    def prompt(self, index: int) -> Prompt:
        """The prompt of one index of the whole schedule."""
        return self._maker.make(index, max(self._maker.minimum, int(self._schedule.input_tokens[index])))

    def at(self, index: int) -> Call:
        """The call of one index of the whole schedule."""
        prompt = self.prompt(index)
        output_tokens = int(self._schedule.output_tokens[index])
        ids = hashlib.blake2b(f"{self._run_id}:{index}".encode(), digest_size=28).digest()
        return Call(
            index=index,
            trace_row=int(self._schedule.trace_row[index]),
            klass=CLASS,
            intended_s=float(self._schedule.intended_s[index]),
            body=self._sampling.body(self._maker.messages(prompt), index, output_tokens),
            path=CHAT_PATH,
            input_tokens=prompt.tokens,
            expected_output_tokens=output_tokens,
            prompt_tokens_expected=prompt.tokens,
            trace_id=ids[:16].hex(),
            span_id=ids[16:24].hex(),
            sampled=int.from_bytes(ids[24:], "big") < self._ratio * 2**32,
        )
