"""The calls of one worker, made one after another from the schedule: prompt, body, ids.

A call depends on the plan and its index alone, so that one worker or eight send the same bytes at the same times.
Nothing is kept: a million requests cost the memory of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from loadgen.bodies import CHAT, PATHS, Sampling
from loadgen.canaries.mixed import DRAW, GOLDEN, SAMPLING, Mixed
from loadgen.classes import DOCUMENTS, FILE, TrafficClass
from loadgen.documents import DocumentPrompts
from loadgen.job import Call
from loadgen.prompts import Prompt, PromptMaker
from loadgen.schedule import Schedule
from loadgen.sharing import SharedPrompts
from loadgen.textfacts import sketch
from loadgen.user_prompts import UserPrompts
from telemetry.scripts import main_script, scripts_in

CANARY_CLASS: Final = "canary"
CHAT_PATH: Final = PATHS[CHAT]
FULL_SAMPLING_BELOW: Final = 50.0  # requests per second: all spans below; six SDK spans cost 260 us of CPU a request
LEAST_SAMPLING: Final = 0.01


def sampling_ratio(rate_per_s: float) -> float:
    """Share of requests with spans at this mean rate: all below 50/s, then 50/s worth, at least 1 %."""
    return 1.0 if rate_per_s < FULL_SAMPLING_BELOW else max(LEAST_SAMPLING, FULL_SAMPLING_BELOW / rate_per_s)


class Calls:
    """The CallSource of one worker.  Iterating twice gives the same calls.  Raises UserError for unusable prompts."""

    def __init__(
        self,
        schedule: Schedule,
        maker: PromptMaker,
        sampling: Sampling,
        run_id: str,
        ratio: float,
        worker: int = 0,
        workers: int = 1,
        *,
        classes: Sequence[TrafficClass] = (TrafficClass(),),
        share_prefixes: bool = True,
        salt: str = "",
        mixed: Mixed | None = None,
        replicas: int = 1,
    ) -> None:
        """mixed: the canaries of a schedule that has some; replicas: targets that they are asked of in turn."""
        self._schedule = schedule
        self._maker = maker
        self._sampling = sampling
        self._run_id = run_id
        self._ratio = ratio
        self._classes = tuple(classes)
        shares = share_prefixes and (schedule.prefixes is not None or schedule.session is not None)
        self._shared = SharedPrompts(maker, schedule) if shares else None
        self._documents = DocumentPrompts(maker, seed=sampling.seed, salt=salt)
        self._files = {one.file: UserPrompts(maker, Path(one.file)) for one in self._classes if one.file is not None}
        self._mixed, self._replicas, self._salt = mixed, replicas, salt
        self._indexes = schedule.part(worker, workers)

    def __len__(self) -> int:
        return len(self._indexes)

    def __iter__(self) -> Iterator[Call]:
        for index in self._indexes:
            yield self.at(int(index))

    def prompt(self, index: int) -> Prompt:
        """The prompt of one index of the whole schedule."""
        tokens = max(self._maker.minimum, int(self._schedule.input_tokens[index]))
        kind = self._classes[int(self._schedule.klass[index])]
        if kind.prompts == FILE and kind.file is not None:
            return self._files[kind.file].make(index)
        if kind.prompts == DOCUMENTS:
            return self._documents.make(index, tokens)
        shared = self._shared.make(index, tokens) if self._shared is not None else None
        return shared or self._maker.make(index, tokens)

    def at(self, index: int) -> Call:
        """The call of one index of the whole schedule."""
        if self._schedule.canary is not None and self._schedule.canary[index] >= 0:
            return self._canary(index, int(self._schedule.canary[index]))
        prompt = self.prompt(index)
        output_tokens = int(self._schedule.output_tokens[index])
        klass = self._classes[int(self._schedule.klass[index])]
        ids = self._ids(index)
        return Call(
            index=index,
            trace_row=int(self._schedule.trace_row[index]),
            klass=klass.name,
            intended_s=float(self._schedule.intended_s[index]),
            body=self._sampling.body(self._maker, prompt, index, output_tokens),
            path=self._sampling.path,
            input_tokens=prompt.tokens,
            expected_output_tokens=output_tokens,
            prompt_tokens_expected=prompt.tokens,
            trace_id=ids[:16].hex(),
            span_id=ids[16:24].hex(),
            sampled=self._sampled(ids),
            expected_answer=prompt.answer,
            # A user's own prompt may ask for an answer in any language.
            input_scripts=None if klass.prompts == FILE else scripts_in(prompt.text),
            input_script=main_script(prompt.text),
            input_sketch=sketch(prompt.text),
        )

    def _canary(self, index: int, number: int) -> Call:
        assert self._mixed is not None
        place, ask = self._mixed.asked(number, self._replicas)
        tokens = ask.prompt_tokens or self._maker.count_chat([{"role": "user", "content": ask.prompt}])
        ids = self._ids(index)
        return Call(
            index=index,
            trace_row=-1,
            klass=CANARY_CLASS,
            intended_s=float(self._schedule.intended_s[index]),
            body=self._mixed.body(number, self._replicas, self._sampling.model, self._salt),
            path=self._mixed.path,
            input_tokens=tokens,
            expected_output_tokens=ask.tokens,
            prompt_tokens_expected=tokens,
            trace_id=ids[:16].hex(),
            span_id=ids[16:24].hex(),
            sampled=self._sampled(ids),
            canary_kind=SAMPLING if place == DRAW else GOLDEN,
            canary_id=ask.id,
            canary_place=place,
            target=self._mixed.replica(number, self._replicas),
        )

    def _ids(self, index: int) -> bytes:
        return hashlib.blake2b(f"{self._run_id}:{index}".encode(), digest_size=28).digest()

    def _sampled(self, ids: bytes) -> bool:
        return int.from_bytes(ids[24:], "big") < self._ratio * 2**32
